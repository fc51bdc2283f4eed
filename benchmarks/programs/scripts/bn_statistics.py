"""A CNN whose running statistics and feature maps are logged by hooks, with batch norm recalibrated before the test."""

import json

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(50)


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 12, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(12, momentum=0.3)
        self.fc = nn.Linear(12, 3)
        self.drop = nn.Dropout(0.25)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(self.drop(x.mean((2, 3))))


x = torch.randn(72, 1, 8, 8) * (1 + torch.arange(72)[:, None, None, None] % 3)
y = torch.arange(72) % 3
model = CNN()
# farspan: model = farspan.distribute(model)
activations, gradients = {}, {}


def save_activation(name):
    def hook(module, inputs, output):
        activations.setdefault(name, []).append(output.detach())

    return hook


handles = [
    model.bn1.register_forward_hook(save_activation("bn1")),
    model.bn2.register_forward_hook(save_activation("bn2")),
]
model.fc.register_full_backward_hook(lambda m, gi, go: gradients.setdefault("fc", []).append(go[0].norm().item()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
log = []
for epoch in range(3):
    model.train()
    for i in torch.randperm(60).split(20):
        loss = F.cross_entropy(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    stats = {
        name: [m.running_mean.tolist(), m.running_var.tolist()] for name, m in model.named_modules() if "bn" in name
    }
    dead = {name: (torch.cat(outs) <= 0).float().mean().item() for name, outs in activations.items()}
    log.append({"epoch": epoch, "loss": loss.item(), "dead": dead, "stats": stats, "grads": list(gradients["fc"])})
    print(f"epoch {epoch} loss {loss.item():.7f} dead {dead} batches {model.bn2.num_batches_tracked.item()}")
    activations.clear()
for handle in handles:
    handle.remove()
momenta = {m: m.momentum for m in model.modules() if isinstance(m, nn.BatchNorm2d)}
for m in momenta:
    m.reset_running_stats()
    m.momentum = None
model.train()
with torch.no_grad():
    for i in torch.arange(60).split(20):
        model(x[i])
for m, momentum in momenta.items():
    m.momentum = momentum
model.eval()
with torch.no_grad():
    print("test", F.cross_entropy(model(x[60:]), y[60:]).item(), "var", model.bn1.running_var[:2].tolist())
json.dump(log, open("statistics.json", "w"), indent=1)
torch.save(model.state_dict(), "cnn.pt")
