"""Feature extractors made of a distributed model's parts: Sequential slices, children() of it, an IntermediateLayerGetter, parts replaced and inserted."""

from collections import OrderedDict

import torch
import torch.nn as nn


class Getter(nn.ModuleDict):
    def __init__(self, model, return_layers):
        orig, layers, return_layers = dict(return_layers), OrderedDict(), dict(return_layers)
        for name, module in model.named_children():
            layers[name] = module
            return_layers.pop(name, None)
            if not return_layers:
                break
        super().__init__(layers)
        self.return_layers = orig

    def forward(self, x):
        out = OrderedDict()
        for name, module in self.items():
            x = module(x)
            if name in self.return_layers:
                out[self.return_layers[name]] = x
        return out


torch.manual_seed(0)
model = nn.Sequential(
    OrderedDict(
        c1=nn.Conv2d(1, 4, 3, padding=1),
        b1=nn.BatchNorm2d(4),
        r1=nn.ReLU(),
        c2=nn.Conv2d(4, 6, 3, padding=1),
        b2=nn.BatchNorm2d(6),
        r2=nn.ReLU(),
        pool=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
        fc=nn.Linear(6, 3),
    )
)
# farspan: model = farspan.distribute(model)
feature = model[:-1]
backbone = nn.Sequential(*list(model.children())[:3])
getter = Getter(model, {"r1": "low", "r2": "high"})
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x, y = torch.randn(8, 1, 6, 6), torch.arange(8) % 3
for i in range(5):
    if i == 3:
        model.fc = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        opt = torch.optim.SGD(
            [{"params": feature.parameters(), "lr": 0.01}, {"params": model.fc.parameters(), "lr": 0.1}],
            lr=0.1,
            momentum=0.9,
        )
    maps = getter(x)
    loss = nn.functional.cross_entropy(model(x), y) + 1e-2 * maps["high"].pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    feature.eval()
    with torch.no_grad():
        f = feature(x)
    feature.train()
    print(
        i,
        loss.item(),
        f.shape,
        f.sum().item(),
        backbone(x).detach().mean().item(),
        {k: tuple(v.shape) for k, v in maps.items()},
        model.b1.num_batches_tracked.item(),
    )
print(
    len(model),
    [type(m).__name__ for m in model],
    len(list(feature.parameters())),
    feature[0] is model[0],
    model.c1.weight is backbone[0].weight,
)
torch.save(feature.state_dict(), "features.pt")
