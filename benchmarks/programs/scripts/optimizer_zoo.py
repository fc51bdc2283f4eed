"""The shape of the optimizer comparisons of pytorch_optimizer: the same start, many optimizers, a table of results."""

import csv

import torch
import torch.nn.functional as F
from pytorch_optimizer import load_optimizer
from torch import nn

NAMES = ["adabelief", "adan", "lion", "novograd", "lars", "diffgrad", "adafactor", "came", "tiger", "ranger"]


def build():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 24), nn.LayerNorm(24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3)
    )


torch.manual_seed(1)
x = torch.randn(60, 8)
y = x[:, :3].argmax(1)
results = []
for name in NAMES:
    model = build()
    # farspan: model = farspan.distribute(model)
    optimizer = load_optimizer(name)(model.parameters(), lr=1e-2)
    losses = []
    for epoch in range(2):
        for xb, yb in zip(x.split(20), y.split(20)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        acc = (model(x).argmax(1) == y).float().mean().item()
    print(f"{name:10s} first {losses[0]:.6f} last {losses[-1]:.6f} accuracy {acc:.3f}")
    results.append([name, *losses, acc])
    torch.save(model.state_dict(), f"{name}.pt")
with open("zoo.csv", "w", newline="") as f:
    csv.writer(f).writerows(results)
