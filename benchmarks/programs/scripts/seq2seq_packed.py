"""The shape of bentrevett/pytorch-seq2seq: packed sequences, attention with a mask, dropout, teacher forcing by random."""

import random

import torch
import torch.nn as nn
import torch.nn.functional as F

SEED = 1234
random.seed(SEED)
torch.manual_seed(SEED)
PAD, SOS, EOS, VOCAB = 0, 1, 2, 14


class Encoder(nn.Module):
    def __init__(self, emb=12, hid=16, dropout=0.3):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, emb)
        self.rnn = nn.GRU(emb, hid, bidirectional=True)
        self.fc = nn.Linear(hid * 2, hid)
        self.dropout = nn.Dropout(dropout)

    def forward(self, src, src_len):
        embedded = self.dropout(self.embedding(src))
        packed = nn.utils.rnn.pack_padded_sequence(embedded, src_len, enforce_sorted=False)
        packed_outputs, hidden = self.rnn(packed)
        outputs, _ = nn.utils.rnn.pad_packed_sequence(packed_outputs)
        hidden = torch.tanh(self.fc(torch.cat((hidden[-2, :, :], hidden[-1, :, :]), dim=1)))
        return outputs, hidden


class Attention(nn.Module):
    def __init__(self, hid=16):
        super().__init__()
        self.attn = nn.Linear(hid * 3, hid)
        self.v = nn.Linear(hid, 1, bias=False)

    def forward(self, hidden, encoder_outputs, mask):
        hidden = hidden.unsqueeze(1).repeat(1, encoder_outputs.shape[0], 1)
        energy = torch.tanh(self.attn(torch.cat((hidden, encoder_outputs.permute(1, 0, 2)), dim=2)))
        attention = self.v(energy).squeeze(2).masked_fill(mask == 0, -1e10)
        return F.softmax(attention, dim=1)


class Decoder(nn.Module):
    def __init__(self, emb=12, hid=16, dropout=0.3):
        super().__init__()
        self.attention = Attention(hid)
        self.embedding = nn.Embedding(VOCAB, emb)
        self.rnn = nn.GRU(hid * 2 + emb, hid)
        self.fc_out = nn.Linear(hid * 3 + emb, VOCAB)
        self.dropout = nn.Dropout(dropout)

    def forward(self, token, hidden, encoder_outputs, mask):
        embedded = self.dropout(self.embedding(token.unsqueeze(0)))
        a = self.attention(hidden, encoder_outputs, mask).unsqueeze(1)
        weighted = torch.bmm(a, encoder_outputs.permute(1, 0, 2)).permute(1, 0, 2)
        output, hidden = self.rnn(torch.cat((embedded, weighted), dim=2), hidden.unsqueeze(0))
        prediction = self.fc_out(torch.cat((output.squeeze(0), weighted.squeeze(0), embedded.squeeze(0)), dim=1))
        return prediction, hidden.squeeze(0)


class Seq2Seq(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()

    def forward(self, src, src_len, trg, teacher_forcing_ratio=0.5):
        outputs = torch.zeros(trg.shape[0], src.shape[1], VOCAB)
        encoder_outputs, hidden = self.encoder(src, src_len)
        mask = (src != PAD).permute(1, 0)
        token = trg[0, :]
        for t in range(1, trg.shape[0]):
            output, hidden = self.decoder(token, hidden, encoder_outputs, mask)
            outputs[t] = output
            teacher_force = random.random() < teacher_forcing_ratio
            token = trg[t] if teacher_force else output.argmax(1)
        return outputs


def init_weights(m):
    for name, param in m.named_parameters():
        if "weight" in name:
            nn.init.normal_(param.data, mean=0, std=0.1)
        else:
            nn.init.constant_(param.data, 0)


def batch(n=6):
    lengths = [random.randint(3, 6) for _ in range(n)]
    src = torch.full((max(lengths), n), PAD)
    trg = torch.full((max(lengths) + 2, n), PAD)
    for i, length in enumerate(lengths):
        word = torch.randint(3, VOCAB, (length,))
        src[:length, i] = word
        trg[: length + 2, i] = torch.cat([torch.tensor([SOS]), word.flip(0), torch.tensor([EOS])])
    return src, torch.tensor(lengths), trg


model = Seq2Seq()
model.apply(init_weights)
# farspan: model = farspan.distribute(model)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
criterion = nn.CrossEntropyLoss(ignore_index=PAD)
best_valid_loss = float("inf")
for epoch in range(3):
    model.train()
    epoch_loss = 0
    for _ in range(3):
        src, src_len, trg = batch()
        optimizer.zero_grad()
        output = model(src, src_len, trg)
        loss = criterion(output[1:].view(-1, VOCAB), trg[1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        epoch_loss += loss.item()
    model.eval()
    with torch.no_grad():
        src, src_len, trg = batch()
        output = model(src, src_len, trg, 0)
        valid_loss = criterion(output[1:].view(-1, VOCAB), trg[1:].reshape(-1)).item()
    if valid_loss < best_valid_loss:
        best_valid_loss = valid_loss
        torch.save(model.state_dict(), "tut4-model.pt")
    print(f"Epoch: {epoch + 1:02}\tTrain Loss: {epoch_loss / 3:.6f}\tVal. Loss: {valid_loss:.6f}")
model.load_state_dict(torch.load("tut4-model.pt"))
with torch.no_grad():
    print("best", output.argmax(2)[1:, 0].tolist(), trg[1:, 0].tolist())
