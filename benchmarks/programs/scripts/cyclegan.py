"""CycleGAN: chained parameters, set_requires_grad, image pools with random, identity losses, InstanceNorm, LambdaLR, one backward for both generators."""

import itertools
import random

import torch
import torch.nn as nn


class ImagePool:
    def __init__(self, n):
        self.n, self.images = n, []

    def query(self, images):
        out = []
        for image in images:
            image = torch.unsqueeze(image.data, 0)
            if len(self.images) < self.n:
                self.images.append(image)
                out.append(image)
            elif random.uniform(0, 1) > 0.5:
                i = random.randint(0, self.n - 1)
                tmp = self.images[i].clone()
                self.images[i] = image
                out.append(tmp)
            else:
                out.append(image)
        return torch.cat(out, 0)


class ResBlock(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.conv_block = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(d, d, 3), nn.InstanceNorm2d(d), nn.ReLU(True))

    def forward(self, x):
        return x + self.conv_block(x)


def G():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.InstanceNorm2d(6),
        nn.ReLU(True),
        ResBlock(6),
        nn.Conv2d(6, 1, 3, padding=1),
        nn.Tanh(),
    )


def D():
    return nn.Sequential(nn.Conv2d(1, 6, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(6, 1, 4, 1, 1))


class GANLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("real_label", torch.tensor(1.0))
        self.register_buffer("fake_label", torch.tensor(0.0))
        self.loss = nn.MSELoss()

    def __call__(self, pred, real):
        return self.loss(pred, (self.real_label if real else self.fake_label).expand_as(pred))


def init_weights(net):
    def f(m):
        if hasattr(m, "weight") and m.__class__.__name__.find("Conv") != -1:
            nn.init.normal_(m.weight.data, 0.0, 0.02)
            nn.init.constant_(m.bias.data, 0.0)

    net.apply(f)


def set_requires_grad(nets, flag):
    for net in nets:
        for p in net.parameters():
            p.requires_grad = flag


random.seed(0), torch.manual_seed(0)
G_A, G_B, D_A, D_B = G(), G(), D(), D()
# farspan: G_A, G_B, D_A, D_B = farspan.distribute(nn.ModuleList([G_A, G_B, D_A, D_B]))
for n in (G_A, G_B, D_A, D_B):
    init_weights(n)
crit, cyc, idt = GANLoss(), nn.L1Loss(), nn.L1Loss()
opt_G = torch.optim.Adam(itertools.chain(G_A.parameters(), G_B.parameters()), lr=2e-3, betas=(0.5, 0.999))
opt_D = torch.optim.Adam(itertools.chain(D_A.parameters(), D_B.parameters()), lr=2e-3, betas=(0.5, 0.999))
scheds = [torch.optim.lr_scheduler.LambdaLR(o, lr_lambda=lambda e: 1.0 - max(0, e - 1) / 4) for o in (opt_G, opt_D)]
pool_A, pool_B = ImagePool(4), ImagePool(4)
for epoch in range(4):
    real_A, real_B = torch.rand(2, 1, 12, 12) * 2 - 1, torch.rand(2, 1, 12, 12).round() * 2 - 1
    fake_B, fake_A = G_A(real_A), G_B(real_B)
    rec_A, rec_B = G_B(fake_B), G_A(fake_A)
    set_requires_grad([D_A, D_B], False)
    opt_G.zero_grad()
    loss_idt = (idt(G_A(real_B), real_B) + idt(G_B(real_A), real_A)) * 5
    loss_G = (
        crit(D_A(fake_B), True) + crit(D_B(fake_A), True) + 10 * (cyc(rec_A, real_A) + cyc(rec_B, real_B)) + loss_idt
    )
    loss_G.backward()
    opt_G.step()
    set_requires_grad([D_A, D_B], True)
    opt_D.zero_grad()
    ds = []
    for net, real, fake in ((D_A, real_B, pool_B.query(fake_B)), (D_B, real_A, pool_A.query(fake_A))):
        loss_D = (crit(net(real), True) + crit(net(fake.detach()), False)) * 0.5
        loss_D.backward()
        ds.append(loss_D.item())
    opt_D.step()
    for s in scheds:
        s.step()
    print(epoch, loss_G.item(), ds, loss_idt.item(), scheds[0].get_last_lr(), len(pool_A.images))
for name, net in zip("AB", (G_A, G_B)):
    torch.save(net.cpu().state_dict(), f"latest_net_G_{name}.pth")
