"""DCGAN: a generator and a discriminator, each with its own optimizer, that train against each other."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from parts.log import Log
from parts.pictures import draw_pictures

NZ, NGF, NDF, BATCH_SIZE, EPOCHS = 16, 8, 8, 16, 2
REAL_LABEL, FAKE_LABEL = 1.0, 0.0


def weights_init(m: nn.Module) -> None:
    name = m.__class__.__name__
    if "Conv" in name:
        nn.init.normal_(m.weight, 0.0, 0.02)  # pyright: ignore[reportArgumentType]
    elif "BatchNorm" in name:
        nn.init.normal_(m.weight, 1.0, 0.02)  # pyright: ignore[reportArgumentType]
        nn.init.zeros_(m.bias)  # pyright: ignore[reportArgumentType]


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(NZ, NGF * 4, 4, 1, 0, bias=False),
            nn.BatchNorm2d(NGF * 4),
            nn.ReLU(True),
            nn.ConvTranspose2d(NGF * 4, NGF * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(NGF * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(NGF * 2, NGF, 4, 2, 1, bias=False),
            nn.BatchNorm2d(NGF),
            nn.ReLU(True),
            nn.ConvTranspose2d(NGF, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, NDF, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(NDF, NDF * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(NDF * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(NDF * 2, NDF * 4, 4, 2, 1, bias=False),
            nn.BatchNorm2d(NDF * 4),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(NDF * 4, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x)


torch.manual_seed(999)
pictures, _ = draw_pictures(128, 32)
loader = DataLoader(TensorDataset(2 * pictures - 1), batch_size=BATCH_SIZE, shuffle=True)
net_g = Generator()
net_g.apply(weights_init)
net_d = Discriminator()
net_d.apply(weights_init)
# farspan: net_g, net_d = farspan.distribute(nn.ModuleList([net_g, net_d]))
criterion = nn.BCELoss()
fixed_noise = torch.randn(4, NZ, 1, 1)
optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))

log = Log()
for epoch in range(EPOCHS):
    for i, (real,) in enumerate(loader):
        # Update the discriminator: maximize log(D(x)) + log(1 - D(G(z)))
        net_d.zero_grad()
        label = torch.full((real.size(0),), REAL_LABEL)
        output = net_d(real).view(-1)
        err_d_real = criterion(output, label)
        err_d_real.backward()
        d_x = output.mean().item()

        fake = net_g(torch.randn(real.size(0), NZ, 1, 1))
        label.fill_(FAKE_LABEL)
        output = net_d(fake.detach()).view(-1)
        err_d_fake = criterion(output, label)
        err_d_fake.backward()
        d_g_z1 = output.mean().item()
        err_d = err_d_real + err_d_fake
        optimizer_d.step()

        # Update the generator: maximize log(D(G(z)))
        net_g.zero_grad()
        label.fill_(REAL_LABEL)
        output = net_d(fake).view(-1)
        err_g = criterion(output, label)
        err_g.backward()
        d_g_z2 = output.mean().item()
        optimizer_g.step()
        log.show(
            f"[{epoch}/{EPOCHS}][{i}/{len(loader)}]",
            loss_d=err_d.item(),
            loss_g=err_g.item(),
            d_x=d_x,
            d_g_z1=d_g_z1,
            d_g_z2=d_g_z2,
        )
with torch.no_grad():
    log.show("fixed noise", mean=net_g(fixed_noise).detach().cpu().mean().item())
log.finish(net_g, net_d)
