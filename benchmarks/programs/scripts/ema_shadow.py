"""The much copied EMA class: a shadow dictionary; apply_shadow and restore exchange p.data for each evaluation."""

import torch
import torch.nn.functional as F
from torch import nn


class EMA:
    def __init__(self, model, decay):
        self.model = model
        self.decay = decay
        self.shadow = {}
        self.backup = {}

    def register(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                self.shadow[name] = param.data.clone()

    def update(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                assert name in self.shadow
                new_average = (1.0 - self.decay) * param.data + self.decay * self.shadow[name]
                self.shadow[name] = new_average.clone()

    def apply_shadow(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                assert name in self.shadow
                self.backup[name] = param.data
                param.data = self.shadow[name]

    def restore(self):
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                assert name in self.backup
                param.data = self.backup[name]
        self.backup = {}


class TextCNN(nn.Module):
    def __init__(self, vocab=50, dim=16):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.convs = nn.ModuleList([nn.Conv2d(1, 6, (k, dim)) for k in (2, 3, 4)])
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(18, 3)

    def forward(self, x):
        out = self.embedding(x).unsqueeze(1)
        pooled = [F.relu(conv(out)).squeeze(3).max(2).values for conv in self.convs]
        return self.fc(self.dropout(torch.cat(pooled, 1)))


torch.manual_seed(10)
ids = torch.randint(0, 50, (90, 12))
label = (ids % 3 == 0).sum(1).clamp(max=5) // 2
model = TextCNN()
# farspan: model = farspan.distribute(model)
ema = EMA(model, 0.9)
ema.register()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def evaluate():
    model.eval()
    with torch.no_grad():
        out = model(ids[60:])
    model.train()
    return F.cross_entropy(out, label[60:]).item(), (out.argmax(1) == label[60:]).float().mean().item()


best = float("inf")
for epoch in range(4):
    for i in torch.randperm(60).split(15):
        loss = F.cross_entropy(model(ids[i]), label[i])
        model.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update()
    raw = evaluate()
    ema.apply_shadow()
    averaged = evaluate()
    if averaged[0] < best:
        best = averaged[0]
        torch.save(model.state_dict(), "TextCNN.ckpt")
    ema.restore()
    print(
        f"Epoch {epoch} train {loss.item():.6f} raw {raw[0]:.6f} {raw[1]:.3f} ema {averaged[0]:.6f} {averaged[1]:.3f}"
    )
model.load_state_dict(torch.load("TextCNN.ckpt"))
print("best", evaluate(), "after restoring", sum(p.data.double().sum().item() for p in model.parameters()))
