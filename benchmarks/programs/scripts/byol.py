"""The shape of lucidrains/byol-pytorch: an online and a target encoder, deep-copied at the first use, old weights mixed."""

import copy
import random

import torch
import torch.nn.functional as F
from torch import nn


class EMA:
    def __init__(self, beta):
        self.beta = beta

    def update_average(self, old, new):
        if old is None:
            return new
        return old * self.beta + (1 - self.beta) * new


def update_moving_average(ema_updater, ma_model, current_model):
    for current_params, ma_params in zip(current_model.parameters(), ma_model.parameters()):
        old_weight, up_weight = ma_params.data, current_params.data
        ma_params.data = ema_updater.update_average(old_weight, up_weight)


def loss_fn(x, y):
    x = F.normalize(x, dim=-1, p=2)
    y = F.normalize(y, dim=-1, p=2)
    return 2 - 2 * (x * y).sum(dim=-1)


def mlp(dim, projection_size, hidden=24):
    return nn.Sequential(
        nn.Linear(dim, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, projection_size)
    )


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        encoder = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1))
        self.online_encoder = nn.Sequential(encoder, mlp(72, 16))
        self.target_encoder = copy.deepcopy(self.online_encoder)
        for p in self.target_encoder.parameters():
            p.requires_grad = False
        self.online_predictor = mlp(16, 16)
        self.target_ema_updater = EMA(0.95)

    def update_moving_average(self):
        update_moving_average(self.target_ema_updater, self.target_encoder, self.online_encoder)

    def forward(self, one, two):
        predictions = self.online_predictor(self.online_encoder(torch.cat((one, two))))
        pred_one, pred_two = predictions.chunk(2, dim=0)
        with torch.no_grad():
            target_one, target_two = self.target_encoder(torch.cat((one, two))).detach().chunk(2, dim=0)
        return (loss_fn(pred_one, target_two) + loss_fn(pred_two, target_one)).mean()


def augment(images):
    if random.random() < 0.5:
        images = images.flip(-1)
    return images + 0.1 * torch.randn_like(images)


random.seed(20)
torch.manual_seed(20)
images = torch.rand(64, 1, 8, 8)
learner = BYOL()
# farspan: learner = farspan.distribute(learner)
opt = torch.optim.Adam(learner.parameters(), lr=3e-3)
for step in range(12):
    batch = images[torch.randperm(64)[:16]]
    loss = learner(augment(batch), augment(batch))
    opt.zero_grad()
    loss.backward()
    opt.step()
    learner.update_moving_average()
    if step % 3 == 0:
        with torch.no_grad():
            gap = sum(
                F.mse_loss(a, b).item()
                for a, b in zip(learner.online_encoder.parameters(), learner.target_encoder.parameters())
            )
        print(f"step {step} loss {loss.item():.7f} gap {gap:.9f}")
torch.save(learner.online_encoder.state_dict(), "improved-net.pt")
torch.save(learner.target_encoder.state_dict(), "target.pt")
