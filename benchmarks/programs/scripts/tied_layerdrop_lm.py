"""A transformer language model with tied embeddings, LayerDrop (fairseq) and stochastic depth (timm's drop_path)."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def drop_path(x, drop_prob, training):
    if drop_prob == 0.0 or not training:
        return x
    keep_prob = 1 - drop_prob
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    random_tensor = x.new_empty(shape).bernoulli_(keep_prob)
    random_tensor.div_(keep_prob)
    return x * random_tensor


class Layer(nn.Module):
    def __init__(self, dim, drop_prob):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 2, dropout=0.1, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.drop_prob = drop_prob

    def forward(self, x, mask):
        h = self.norm1(x)
        x = x + drop_path(self.attn(h, h, h, attn_mask=mask, need_weights=False)[0], self.drop_prob, self.training)
        return x + drop_path(self.fc2(F.gelu(self.fc1(self.norm2(x)))), self.drop_prob, self.training)


class LayerDropList(nn.ModuleList):
    def __init__(self, p, modules):
        super().__init__(modules)
        self.p = p

    def __iter__(self):
        dropout_probs = torch.empty(len(self)).uniform_()
        for i, m in enumerate(super().__iter__()):
            if not self.training or (dropout_probs[i] > self.p):
                yield m


class LM(nn.Module):
    def __init__(self, vocab=40, dim=20, depth=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.register_buffer("pos", self.sinusoid(32, dim))
        self.drop = nn.Dropout(0.1)
        self.layers = LayerDropList(0.2, [Layer(dim, 0.1 * i / depth) for i in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.decoder = nn.Linear(dim, vocab, bias=False)
        self.decoder.weight = self.embed.weight

    @staticmethod
    def sinusoid(length, dim):
        position = torch.arange(length)[:, None]
        div = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
        pe = torch.zeros(length, dim)
        pe[:, 0::2], pe[:, 1::2] = torch.sin(position * div), torch.cos(position * div)
        return pe

    def forward(self, ids):
        x = self.drop(self.embed(ids) * math.sqrt(20) + self.pos[: ids.shape[1]])
        mask = torch.triu(torch.full((ids.shape[1], ids.shape[1]), float("-inf")), diagonal=1)
        for layer in self.layers:
            x = layer(x, mask)
        return F.log_softmax(self.decoder(self.norm(x)), dim=-1)


torch.manual_seed(1111)
corpus = (torch.arange(600) * 3 + torch.randint(0, 4, (600,))) % 40
model = LM()
# farspan: model = farspan.distribute(model)
criterion = nn.NLLLoss()
lr, best_val_loss = 1.0, None


def evaluate():
    model.eval()
    total = 0.0
    with torch.no_grad():
        for s in range(400, 560, 40):
            out = model(corpus[s : s + 20][None])
            total += criterion(out.view(-1, 40), corpus[s + 1 : s + 21]).item()
    return total / 4


for epoch in range(1, 4):
    model.train()
    for s in torch.randint(0, 380, (5, 4)):
        x = torch.stack([corpus[i : i + 15] for i in s])
        y = torch.stack([corpus[i + 1 : i + 16] for i in s])
        model.zero_grad()
        loss = criterion(model(x).view(-1, 40), y.view(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-lr)
    val_loss = evaluate()
    print(
        f"| end of epoch {epoch} | train {loss.item():.6f} | valid loss {val_loss:.6f} | ppl {math.exp(val_loss):.4f}"
    )
    if not best_val_loss or val_loss < best_val_loss:
        with open("model.pt", "wb") as f:
            torch.save(model.state_dict(), f)
        best_val_loss = val_loss
    else:
        lr /= 4.0
with open("model.pt", "rb") as f:
    model.load_state_dict(torch.load(f))
print("tied", model.decoder.weight is model.embed.weight, "test", evaluate())
