"""The shape of pytorch-image-models/train.py: a small ViT, Lamb (a global gradient norm, trust ratios), a summary.csv."""

import csv

import torch
import torch.nn.functional as F
from timm.optim import Lamb, param_groups_weight_decay
from torch import nn


class Block(nn.Module):
    def __init__(self, dim, heads, drop):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, dropout=drop, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(drop), nn.Linear(2 * dim, dim))
        self.drop = nn.Dropout(drop)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.drop(self.attn(h, h, h, need_weights=False)[0])
        return x + self.drop(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    def __init__(self, dim=24, depth=3, heads=2, num_classes=5, drop=0.1):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, dim) * 0.02)
        self.pos_drop = nn.Dropout(drop)
        self.blocks = nn.ModuleList(Block(dim, heads, drop) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.pos_drop(x + self.pos_embed)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


torch.manual_seed(42)
images = torch.randn(96, 3, 16, 16)
labels = images.mean((2, 3)).argmax(1) + 2 * (images.std((1, 2, 3)) > 1).long()
model = ViT()
# farspan: model = farspan.distribute(model)
optimizer = Lamb(param_groups_weight_decay(model, 0.02), lr=5e-3, max_grad_norm=1.0)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)

rows = []
for epoch in range(4):
    model.train()
    total = 0.0
    for i in torch.randperm(80).split(16):
        loss = F.cross_entropy(model(images[i]), labels[i], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() * len(i)
    model.eval()
    with torch.no_grad():
        output = model(images[80:])
        eval_loss = F.cross_entropy(output, labels[80:]).item()
        top1 = (output.argmax(1) == labels[80:]).float().mean().item() * 100
    rows.append({"epoch": epoch, "train_loss": total / 80, "eval_loss": eval_loss, "eval_top1": top1})
    rows[-1]["lr"] = optimizer.param_groups[0]["lr"]
    print(f"Train: {epoch}  loss {total / 80:.6f}  Test: {eval_loss:.6f}  Acc@1: {top1:.3f}")
    scheduler.step()
    with open("summary.csv", "w", newline="") as f:
        writer = csv.DictWriter(f, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
torch.save(
    {"epoch": 4, "arch": "vit_nano", "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()},
    "last.pth.tar",
)
