"""The shape of ironjr/grokfast: modular addition; a moving average of the gradients is amplified before each step."""

import torch
import torch.nn.functional as F
from torch import nn


def gradfilter_ema(m, grads=None, alpha=0.9, lamb=2.0):
    if grads is None:
        grads = {n: p.grad.data.detach() for n, p in m.named_parameters() if p.requires_grad and p.grad is not None}
    for n, p in m.named_parameters():
        if p.requires_grad and p.grad is not None:
            grads[n] = grads[n] * alpha + p.grad.data.detach() * (1 - alpha)
            p.grad.data = p.grad.data + grads[n] * lamb
    return grads


class Block(nn.Module):
    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim)
        self.ln_2 = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, dim * 4), nn.GELU(), nn.Linear(dim * 4, dim))

    def forward(self, x):
        mask = torch.full((len(x), len(x)), -float("Inf"), dtype=x.dtype)
        mask = torch.triu(mask, diagonal=1)
        x = self.ln_1(x)
        a, _ = self.attn(x, x, x, attn_mask=mask, need_weights=False)
        x = x + a
        return x + self.mlp(self.ln_2(x))


class Decoder(nn.Module):
    def __init__(self, dim=32, num_layers=2, num_tokens=13, seq_len=4):
        super().__init__()
        self.token_embeddings = nn.Embedding(num_tokens, dim)
        self.position_embeddings = nn.Embedding(seq_len, dim)
        self.layers = nn.ModuleList(Block(dim) for _ in range(num_layers))
        self.ln_f = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_tokens, bias=False)

    def forward(self, x):
        h = self.token_embeddings(x)
        positions = torch.arange(x.shape[0]).unsqueeze(-1)
        h = h + self.position_embeddings(positions).expand_as(h)
        for layer in self.layers:
            h = layer(h)
        return self.head(self.ln_f(h))


torch.manual_seed(0)
p = 11
pairs = torch.cartesian_prod(torch.arange(p), torch.arange(p))
data = torch.stack([pairs[:, 0], torch.full((p * p,), p), pairs[:, 1], torch.full((p * p,), p + 1)])
target = (pairs[:, 0] + pairs[:, 1]) % p
perm = torch.randperm(p * p)
train_idx, valid_idx = perm[: p * p // 2], perm[p * p // 2 :]
model = Decoder()
# farspan: model = farspan.distribute(model)
print(f"Number of parameters: {sum(q.numel() for q in model.parameters() if q.requires_grad)}")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1.0, betas=(0.9, 0.98))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 if update > 5 else update / 5)
grads = None
results = {"train": [], "val": []}
for epoch in range(5):
    for split, idx in (("train", train_idx[torch.randperm(len(train_idx))]), ("val", valid_idx)):
        model.train(split == "train")
        total_loss, total_acc = 0.0, 0.0
        for i in idx.split(30):
            with torch.set_grad_enabled(split == "train"):
                logits = model(data[:, i])
                loss = F.cross_entropy(logits[-1], target[i])
                total_loss += loss.item() * len(i)
            if split == "train":
                model.zero_grad()
                loss.backward()
                grads = gradfilter_ema(model, grads=grads)
                optimizer.step()
                scheduler.step()
            total_acc += (logits[-1].argmax(-1) == target[i]).float().mean().item() * len(i)
        results[split].append((total_loss / len(idx), total_acc / len(idx)))
    print(epoch, *(f"{k} {v[-1][0]:.6f} {v[-1][1]:.4f}" for k, v in results.items()))
torch.save({"results": results, "model": model.state_dict(), "ema": grads}, "grok.pt")
