"""The shape of lottery-ticket scripts: initial state kept, magnitude masks, gradients masked, rewound, trained again."""

import copy

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class Fc(nn.Module):
    def __init__(self):
        super().__init__()
        self.classifier = nn.Sequential(
            nn.Linear(20, 32),
            nn.ReLU(inplace=True),
            nn.Dropout(0.1),
            nn.Linear(32, 16),
            nn.ReLU(inplace=True),
            nn.Linear(16, 3),
        )

    def forward(self, x):
        return self.classifier(x)


def weight_init(m):
    if isinstance(m, nn.Linear):
        nn.init.xavier_normal_(m.weight.data)
        nn.init.normal_(m.bias.data)


def prune_by_percentile(model, mask, percent):
    for name, param in model.named_parameters():
        if "weight" in name:
            tensor = param.data.cpu().numpy()
            alive = tensor[np.nonzero(tensor * mask[name])]
            threshold = np.percentile(abs(alive), percent)
            mask[name] = np.where(abs(tensor) < threshold, 0, mask[name]).astype(np.float32)
            param.data = torch.from_numpy(tensor * mask[name])


def original_initialization(model, mask, initial_state_dict):
    for name, param in model.named_parameters():
        if "weight" in name:
            param.data = torch.from_numpy(mask[name] * initial_state_dict[name].cpu().numpy())
        if "bias" in name:
            param.data = initial_state_dict[name].clone()


torch.manual_seed(66)
x = torch.randn(90, 20)
y = x[:, :3].argmax(1)
model = Fc()
model.apply(weight_init)
# farspan: model = farspan.distribute(model)
initial_state_dict = copy.deepcopy(model.state_dict())
alive_alias = model.state_dict()  # not a copy: follows the training
torch.save(model, "initial_state_dict.pth.tar")
mask = {name: np.ones_like(p.data.cpu().numpy()) for name, p in model.named_parameters() if "weight" in name}
compression = []
for ite in range(3):
    if ite > 0:
        prune_by_percentile(model, mask, 30)
        original_initialization(model, mask, initial_state_dict)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-4)
    for epoch in range(3):
        for i in torch.randperm(90).split(30):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[i]), y[i])
            loss.backward()
            for name, p in model.named_parameters():
                if "weight" in name:
                    tensor = p.data.cpu().numpy()
                    grad_tensor = p.grad.data.cpu().numpy()
                    grad_tensor = np.where(abs(tensor) < 1e-6, 0, grad_tensor)
                    p.grad.data = torch.from_numpy(grad_tensor)
            optimizer.step()
    nonzero = sum(int(np.count_nonzero(p.data.cpu().numpy())) for p in model.parameters())
    moved = sum((alive_alias[n] - initial_state_dict[n]).abs().sum().item() for n in initial_state_dict)
    compression.append(nonzero)
    print(f"ite {ite} loss {loss.item():.7f} alive {nonzero} moved {moved:.6f}")
np.array(compression).dump("compression.dat")
torch.save(model.state_dict(), "lt_model.pth.tar")
