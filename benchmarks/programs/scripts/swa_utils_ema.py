"""torch.optim.swa_utils: EMA by get_ema_multi_avg_fn with buffers, SWALR after some epochs, update_bn over a loader, averaged module saved."""

import torch
import torch.nn as nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 4, 3, padding=1),
    nn.BatchNorm2d(4),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(64, 16),
    nn.BatchNorm1d(16),
    nn.ReLU(),
    nn.Linear(16, 2),
)
# farspan: model = farspan.distribute(model)
ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
swa_model = AveragedModel(model)
own_avg = AveragedModel(model, avg_fn=lambda avg, cur, n: 0.8 * avg + 0.2 * cur)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=4)
swa_sched = SWALR(opt, anneal_strategy="linear", anneal_epochs=2, swa_lr=0.02)
x, y = torch.randn(32, 1, 4, 4), torch.randint(2, (32,))
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
for epoch in range(5):
    for bx, by in loader:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(bx), by)
        loss.backward()
        opt.step()
        ema_model.update_parameters(model)
        own_avg.update_parameters(model)
    if epoch > 2:
        swa_model.update_parameters(model)
        swa_sched.step()
    else:
        sched.step()
    ema_model.eval()
    with torch.no_grad():
        e = nn.functional.cross_entropy(ema_model(x), y)
    print(
        epoch,
        loss.item(),
        e.item(),
        opt.param_groups[0]["lr"],
        ema_model.n_averaged.item(),
        swa_model.n_averaged.item(),
    )
update_bn(loader, swa_model)
update_bn(loader, own_avg)
swa_model.eval()
with torch.no_grad():
    print(
        nn.functional.cross_entropy(swa_model(x), y).item(),
        own_avg(x).sum().item(),
        next(own_avg.parameters()).sum().item(),
    )
torch.save(swa_model.state_dict(), "swa.pt")
torch.save(ema_model.module.state_dict(), "ema.pt")
torch.save(swa_model, "whole.pt")
