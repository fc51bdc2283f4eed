"""Mixture of experts with capacity: top-2 routing, one-hot cumsum positions, dropped tokens, auxiliary losses in a list on the layer."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class MoE(nn.Module):
    def __init__(self, d, n, k=2, cap=1.25):
        super().__init__()
        self.gate = nn.Linear(d, n, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(n)
        )
        self.n, self.k, self.cap = n, k, cap
        self.register_buffer("usage", torch.zeros(n))
        self.l_aux, self.exp_counts = None, None

    def forward(self, x):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        T = x.size(0)
        logits = self.gate(x)
        if self.training:
            logits = logits + torch.rand_like(logits) * 0.01
        probs = F.softmax(logits, 1)
        topv, topi = probs.topk(self.k, 1)
        capacity = int(self.cap * T * self.k / self.n)
        onehot = F.one_hot(topi.t().reshape(-1), self.n)
        pos = torch.cumsum(onehot, 0) * onehot
        pos = pos.sum(1) - 1
        keep = (pos < capacity).view(self.k, T).t()
        topv = topv * keep
        topv = topv / topv.sum(1, keepdim=True).clamp(min=1e-9)
        me, ce = probs.mean(0), F.one_hot(topi[:, 0], self.n).float().mean(0)
        self.l_aux = (me * ce).sum() * self.n
        self.exp_counts = onehot.sum(0).detach().to("cpu")
        self.usage += self.exp_counts
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            tok, slot = torch.where((topi == e) & keep)
            if tok.numel() == 0:
                continue
            out.index_add_(0, tok, expert(x[tok]) * topv[tok, slot].unsqueeze(1))
        return out.view(shape)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.att, self.moe = nn.MultiheadAttention(d, 2, batch_first=True), MoE(d, 4)

    def forward(self, x):
        h = self.n1(x)
        x = x + self.att(h, h, h, need_weights=False)[0]
        return x + self.moe(self.n2(x))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([Block(8) for _ in range(3)])
        self.head = nn.Linear(8, 20)

    def forward(self, idx):
        x = self.emb(idx)
        for b in self.blocks:
            x = b(x)
        return self.head(x)


torch.manual_seed(12)
model = LM()
# farspan: model = farspan.distribute(model)
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(6):
    opt.zero_grad()
    for micro in range(2):
        x = torch.randint(20, (3, 8))
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
        aux = sum(m.l_aux for m in model.modules() if isinstance(m, MoE))
        ((loss + 0.01 * aux) / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    counts = torch.stack([b.moe.exp_counts for b in model.blocks])
    print(
        step,
        loss.item(),
        aux.item(),
        counts.tolist(),
        [p.grad is None for p in model.blocks[1].moe.experts.parameters()].count(True),
    )
print(model.blocks[2].moe.usage.tolist())
