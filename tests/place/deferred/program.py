"""One rank of a program that builds its model without data, or as ever: what it holds, and what training gives."""

import hashlib
import json
import sys

import numpy as np
import torch
from torch import nn

import farspan

WIDTH = 96


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, WIDTH)
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(3)]
        )
        self.head = nn.Linear(WIDTH, 300, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.triu(torch.ones(WIDTH, WIDTH)).bool())
        self.kept = self.blocks[0].get_parameter("linear1.weight").detach()
        self.apply(self.init)
        self.blocks.to(torch.float64).to(torch.float32)

    def init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) * 0.1
        for block in self.blocks:
            x = block(x)
        return self.head(x) * 0.1


def digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(item.detach().contiguous().numpy().tobytes() for item in tensors)).hexdigest()


if __name__ == "__main__":
    way, seed, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    seed += int(sys.argv[4]) * farspan.rank()
    torch.manual_seed(seed)
    np.random.seed(0)
    if way == "function":
        model = farspan.distribute(Net, **options)
        optimizer = torch.optim.AdamW(model.parameters())
    else:
        if way == "deferred":
            with farspan.deferred_init():
                model = Net()
        else:
            model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        model = farspan.distribute(model, **options)
    drawn = torch.rand(2).tolist()
    num_held = sum(item.numel() for item in model.parameters() if type(item) is nn.Parameter)
    begun = digest(*model.state_dict().values())
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(4):
            x = torch.randint(0, 300, (2, 8))
            nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        optimizer.step()
    ended = digest(*model.state_dict().values())
    print(json.dumps({"drawn": drawn, "held": num_held, "begun": begun, "ended": ended}))
