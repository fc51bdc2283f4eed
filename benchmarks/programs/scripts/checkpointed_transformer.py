"""A transformer whose blocks are checkpointed (torch.utils.checkpoint) with dropout, as in many big-model scripts."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ln = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 2, dropout=0.1, batch_first=True)
        self.ff = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * dim, dim)
        )

    def forward(self, x):
        h = self.ln(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.ff(x)


class Model(nn.Module):
    def __init__(self, dim=16, depth=4, gradient_checkpointing=True):
        super().__init__()
        self.embed = nn.Linear(3, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(depth)])
        self.tail = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim), nn.Dropout(0.1))
        self.head = nn.Linear(dim, 1)
        self.gradient_checkpointing = gradient_checkpointing

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            if self.gradient_checkpointing and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        if self.training:
            x = checkpoint_sequential(self.tail, 2, x, use_reentrant=False)
        else:
            x = self.tail(x)
        return self.head(x.mean(1)).squeeze(-1)


torch.manual_seed(77)
x = torch.randn(40, 7, 3)
y = x[:, :, 0].max(1).values
model = Model()
# farspan: model = farspan.distribute(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=4)
for step in range(10):
    model.train()
    i = torch.randperm(40)[:10]
    loss = F.mse_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    warmup.step()
    print(f"step {step} loss {loss.item():.8f}")
model.eval()
with torch.no_grad():
    print("eval", F.mse_loss(model(x), y).item())
torch.save(model.state_dict(), "model.pt")
