"""The shape of lucidrains/denoising-diffusion and timm's ModelEma: a deep copy made at the start, followed by lerp and copy_."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


class EMA(nn.Module):
    def __init__(self, model, beta=0.9, update_after_step=2, update_every=1):
        super().__init__()
        self.beta, self.update_after_step, self.update_every = beta, update_after_step, update_every
        self.online_model = [model]
        self.ema_model = copy.deepcopy(model)
        self.ema_model.requires_grad_(False)
        self.register_buffer("initted", torch.tensor(False))
        self.register_buffer("step", torch.tensor(0))

    def copy_params(self):
        for ma, cur in zip(self.ema_model.parameters(), self.online_model[0].parameters()):
            ma.data.copy_(cur.data)
        for ma, cur in zip(self.ema_model.buffers(), self.online_model[0].buffers()):
            ma.data.copy_(cur.data)

    @torch.no_grad()
    def update(self):
        step = self.step.item()
        self.step += 1
        if step % self.update_every != 0:
            return
        if step <= self.update_after_step:
            self.copy_params()
            return
        if not self.initted.item():
            self.copy_params()
            self.initted.data.copy_(torch.tensor(True))
        for ma, cur in zip(self.ema_model.parameters(), self.online_model[0].parameters()):
            ma.lerp_(cur, 1 - self.beta)
        for ma, cur in zip(self.ema_model.buffers(), self.online_model[0].buffers()):
            ma.copy_(cur)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(1, 8, 5, padding=2), nn.BatchNorm1d(8), nn.SiLU(), nn.Dropout(0.1))
        self.mid = nn.Sequential(nn.Conv1d(8, 8, 5, padding=2), nn.BatchNorm1d(8), nn.SiLU())
        self.out = nn.Conv1d(8, 1, 1)

    def forward(self, x):
        return self.out(self.mid(self.body(x)))


torch.manual_seed(9)
model = ConvNet()
ema = EMA(model)
# farspan: model = farspan.distribute(model)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
t = torch.linspace(0, 6.28, 24)
clean = torch.stack([torch.sin((k % 5 + 1) * t) for k in range(40)])[:, None]
for step in range(14):
    model.train()
    target = clean[torch.randint(0, 40, (8,))]
    noisy = target + 0.3 * torch.randn_like(target)
    loss = F.mse_loss(model(noisy), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update()
    if step % 4 == 3:
        model.eval()
        ema.ema_model.eval()
        with torch.no_grad():
            a, b = F.mse_loss(model(noisy), target).item(), F.mse_loss(ema.ema_model(noisy), target).item()
        print(f"step {step} loss {loss.item():.6f} model {a:.6f} ema {b:.6f} initted {ema.initted.item()}")
torch.save({"model": model.state_dict(), "ema": ema.ema_model.state_dict(), "step": ema.step}, "model-1.pt")
