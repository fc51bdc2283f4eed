"""The shape of torch's SWA example: AveragedModel, SWALR, update_bn; an exponential average with get_ema_multi_avg_fn too."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(15)
x = torch.randn(80, 3, 6, 6)
y = x.flatten(2).max(2).values.argmax(1)
loader = DataLoader(TensorDataset(x[:64], y[:64]), batch_size=16, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(3, 10, 3, padding=1),
    nn.BatchNorm2d(10),
    nn.ReLU(),
    nn.Dropout2d(0.1),
    nn.Conv2d(10, 10, 3),
    nn.BatchNorm2d(10),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(160, 3),
)
# farspan: model = farspan.distribute(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
swa_model = AveragedModel(model)
ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
swa_start = 3
swa_scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)


def evaluate(net):
    net.eval()
    with torch.no_grad():
        return F.cross_entropy(net(x[64:]), y[64:]).item()


for epoch in range(6):
    model.train()
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(xb), yb)
        loss.backward()
        optimizer.step()
        ema_model.update_parameters(model)
    if epoch > swa_start:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
    print(f"{epoch} loss {loss.item():.6f} lr {optimizer.param_groups[0]['lr']:.6f} val {evaluate(model):.6f}")
update_bn(loader, swa_model)
update_bn(loader, ema_model)
print("swa", evaluate(swa_model), "ema", evaluate(ema_model), "averaged", int(swa_model.n_averaged))
torch.save(swa_model.state_dict(), "swa.pt")
torch.save(ema_model.module.state_dict(), "ema.pt")
torch.save(model.state_dict(), "model.pt")
