"""Contrastive learning with a queue kept by the program: recorded features are written into a plain tensor, by a pointer."""

import torch
import torch.nn.functional as F
from torch import nn


class Queue:
    def __init__(self, dim, size):
        self.features = F.normalize(torch.randn(size, dim), dim=1)
        self.ptr = 0
        self.size = size

    @torch.no_grad()
    def push(self, keys):
        n = keys.shape[0]
        self.features[self.ptr : self.ptr + n] = keys.detach()
        self.ptr = (self.ptr + n) % self.size


class Encoder(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32), nn.ReLU())
        self.proj = nn.Linear(32, dim)

    def forward(self, x):
        return F.normalize(self.proj(self.net(x)), dim=1)


torch.manual_seed(23)
encoder = Encoder()
# farspan: encoder = farspan.distribute(encoder)
queue = Queue(12, 64)
bank = torch.zeros(96, 12)
optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
data = torch.randn(96, 16) + torch.arange(96)[:, None] % 4
tau, hits, seen = 0.2, 0, 0
for epoch in range(3):
    for idx in torch.randperm(96).split(16):
        x = data[idx]
        q = encoder(x + 0.1 * torch.randn_like(x))
        k = encoder(x + 0.1 * torch.randn_like(x)).detach()
        l_pos = (q * k).sum(1, keepdim=True)
        l_neg = q @ queue.features.clone().T
        logits = torch.cat([l_pos, l_neg], 1) / tau
        loss = F.cross_entropy(logits, torch.zeros(len(idx), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue.push(k)
        with torch.no_grad():
            bank[idx] = 0.5 * bank[idx] + 0.5 * q.detach()
        hits += (logits.argmax(1) == 0).sum().item()
        seen += len(idx)
    print(f"epoch {epoch} loss {loss.item():.7f} instance accuracy {hits / seen:.4f} queue at {queue.ptr}")
similarity = F.normalize(bank, dim=1) @ F.normalize(bank, dim=1).T
similarity.fill_diagonal_(-1)
knn = (similarity.argmax(1) % 4 == torch.arange(96) % 4).float().mean()
print("knn accuracy", knn.item())
torch.save({"encoder": encoder.state_dict(), "bank": bank, "queue": queue.features}, "memory.pt")
