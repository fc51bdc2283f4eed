"""Hooks of the optimizer and of parameters: clipped before each step, weights bounded after it, norms collected."""

import json

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(13)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 20)
        self.rnn = nn.GRU(20, 20, batch_first=True)
        self.drop = nn.Dropout(0.15)
        self.value = nn.Linear(20, 1)

    def forward(self, x):
        h, _ = self.rnn(F.relu(self.embed(x)))
        return self.value(self.drop(h[:, -1]))


model = Critic()
# farspan: model = farspan.distribute(model)
optimizer = torch.optim.RMSprop(model.parameters(), lr=3e-3, momentum=0.5)
norms, order = [], []


def clip(opt, args, kwargs):
    params = [p for group in opt.param_groups for p in group["params"]]
    norms.append(float(nn.utils.clip_grad_norm_(params, max_norm=0.5)))


def bound(opt, args, kwargs):
    with torch.no_grad():
        for group in opt.param_groups:
            for p in group["params"]:
                p.clamp_(-0.3, 0.3)


optimizer.register_step_pre_hook(clip)
optimizer.register_step_post_hook(bound)
for name, p in model.named_parameters():
    p.register_hook(lambda grad, name=name: order.append((name, grad.norm().item())))

x = torch.randn(48, 5, 6)
y = x[:, -1].sum(1, keepdim=True).tanh()
for step in range(8):
    i = torch.randperm(48)[:12]
    loss = F.smooth_l1_loss(model(x[i]), y[i])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    biggest = max(p.abs().max().item() for p in model.parameters())
    print(f"{step} loss {loss.item():.7f} norm {norms[-1]:.7f} biggest {biggest:.6f} hooks {len(order)}")
print("per parameter", {name: round(sum(v for n, v in order if n == name), 6) for name, _ in sorted(order[:3])})
json.dump({"norms": norms, "grads": sorted(order)}, open("norms.json", "w"))
torch.save(model.state_dict(), "critic.pt")
