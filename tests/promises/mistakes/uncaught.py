"""A wrong width in the head, in a loop that does not catch it: what anybody gets wrong first."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import farspan


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, :4])  # here: head, in head (Head)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), Head()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return self.head(hidden)


torch.manual_seed(0)
if "file" in sys.argv:
    open("no such file").read()  # noqa: SIM115 # here: file
model = farspan.distribute(Net(), plan={"body": 0, "head": 1}, measure=False)
if "loop" in sys.argv:
    model.body(torch.ones(6, 8)).view(7, 7)  # here: loop
if "item" in sys.argv:
    model.body(torch.ones(6, 8)).item()  # here: item
if "gradient" in sys.argv:
    model.head.linear.weight.grad = torch.zeros(3, 3)  # here: gradient
if "name" in sys.argv:
    model.body(torch.ones(6, 8)).squeze()
model(torch.ones(6, 8)).sum().backward()
