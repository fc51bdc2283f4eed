"""The shape of char-rnn with truncated back-propagation: the state is carried, detached, two chunks for each step."""

import torch
import torch.nn as nn

# a researcher's quick script: no seed set
text = "to be or not to be that is the question whether tis nobler in the mind to suffer " * 8
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text])


class CharRNN(nn.Module):
    def __init__(self, vocab, hidden=32, layers=2):
        super().__init__()
        self.encoder = nn.Embedding(vocab, hidden)
        self.rnn = nn.LSTM(hidden, hidden, layers, dropout=0.2, batch_first=True)
        self.drop = nn.Dropout(0.2)
        self.decoder = nn.Linear(hidden, vocab)

    def forward(self, x, state):
        out, state = self.rnn(self.encoder(x), state)
        return self.decoder(self.drop(out)), state


def batchify(data, batch):
    n = len(data) // batch
    return data[: n * batch].view(batch, n)


batches = batchify(data, 4)
model = CharRNN(len(chars))
# farspan: model = farspan.distribute(model)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
criterion = nn.CrossEntropyLoss()
seq, accumulate = 12, 2
for epoch in range(2):
    state, total, count = None, 0.0, 0
    optimizer.zero_grad()
    for n, start in enumerate(range(0, batches.size(1) - seq - 1, seq)):
        x, y = batches[:, start : start + seq], batches[:, start + 1 : start + seq + 1]
        if state is not None:
            state = tuple(s.detach() for s in state)
        logits, state = model(x, state)
        loss = criterion(logits.reshape(-1, len(chars)), y.reshape(-1))
        (loss / accumulate).backward()
        if (n + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        total += loss.item()
        count += 1
    print(f"epoch {epoch} bits {total / count / 0.6931:.6f} last {loss.item():.7f}")
    model.eval()
    with torch.no_grad():
        sample, x, h = "t", torch.tensor([[stoi["t"]]]), None
        for _ in range(20):
            logits, h = model(x, h)
            x = torch.multinomial(torch.softmax(logits[:, -1], -1), 1)
            sample += chars[x.item()]
    model.train()
    print(repr(sample))
torch.save({"model": model.state_dict(), "state": state, "chars": chars}, "char_rnn.pt")
