"""The shape of a LoRA fine-tune with Prodigy: its estimate d is logged as the effective learning rate."""

import math

import torch
import torch.nn.functional as F
from prodigyopt import Prodigy
from torch import nn


class LoRALinear(nn.Module):
    def __init__(self, base, rank=2, alpha=4):
        super().__init__()
        self.base = base
        self.base.weight.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_a.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_b.weight)
        self.dropout = nn.Dropout(0.1)
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * self.lora_b(self.lora_a(self.dropout(x)))


class MLP(nn.Module):
    def __init__(self, width=24, depth=4):
        super().__init__()
        self.inp = nn.Linear(6, width)
        self.layers = nn.ModuleList(LoRALinear(nn.Linear(width, width)) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.out(x)


torch.manual_seed(0)
model = MLP()
# farspan: model = farspan.distribute(model)
trainable = [p for n, p in model.named_parameters() if "lora" in n or n.startswith("out")]
print(f"trainable {sum(p.numel() for p in trainable)} of {sum(p.numel() for p in model.parameters())}")
opt = Prodigy(trainable, lr=1.0, weight_decay=0.01, safeguard_warmup=True, use_bias_correction=True)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=20)
x = torch.randn(64, 6)
y = torch.sin(x.sum(1, keepdim=True))
with open("log.txt", "w") as log:
    for step in range(20):
        idx = torch.randperm(64)[:16]
        loss = F.mse_loss(model(x[idx]), y[idx])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        sched.step()
        d, lr = opt.param_groups[0]["d"], opt.param_groups[0]["lr"]
        log.write(f"{step},{loss.item()!r},{float(d) * lr!r}\n")
        if step % 5 == 4:
            print(f"step {step} loss {loss.item():.6f} d*lr {float(d) * lr:.8e}")
torch.save({n: p.detach() for n, p in model.named_parameters() if p.requires_grad}, "lora.pt")
