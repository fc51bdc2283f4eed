"""The shape of PyTorch-GAN/wgan: RMSprop, a generator step every few critic steps, weights clipped by .data.clamp_."""

import numpy as np
import torch
import torch.nn as nn

# the original sets no seed
img_shape = (1, 8, 8)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()

        def block(in_feat, out_feat, normalize=True):
            layers = [nn.Linear(in_feat, out_feat)]
            if normalize:
                layers.append(nn.BatchNorm1d(out_feat, 0.8))
            layers.append(nn.LeakyReLU(0.2, inplace=True))
            return layers

        self.model = nn.Sequential(
            *block(10, 24, normalize=False), *block(24, 32), nn.Linear(32, int(np.prod(img_shape))), nn.Tanh()
        )

    def forward(self, z):
        img = self.model(z)
        return img.view(img.shape[0], *img_shape)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(64, 32),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Dropout(0.1),
            nn.Linear(32, 16),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(16, 1),
        )

    def forward(self, img):
        return self.model(img.view(img.shape[0], -1))


generator = Generator()
discriminator = Discriminator()
# farspan: generator, discriminator = farspan.distribute(nn.ModuleList([generator, discriminator]))
optimizer_G = torch.optim.RMSprop(generator.parameters(), lr=5e-4)
optimizer_D = torch.optim.RMSprop(discriminator.parameters(), lr=5e-4)
data = torch.sin(torch.arange(64.0) / 5 + torch.rand(60, 1) * 6).view(60, *img_shape)
batches_done, n_critic, clip_value = 0, 3, 0.05
for epoch in range(2):
    for i, real_imgs in enumerate(data[torch.randperm(60)].split(10)):
        optimizer_D.zero_grad()
        z = torch.tensor(np.random.normal(0, 1, (real_imgs.shape[0], 10)), dtype=torch.float32)
        fake_imgs = generator(z).detach()
        loss_D = -torch.mean(discriminator(real_imgs)) + torch.mean(discriminator(fake_imgs))
        loss_D.backward()
        optimizer_D.step()
        for p in discriminator.parameters():
            p.data.clamp_(-clip_value, clip_value)
        if i % n_critic == 0:
            optimizer_G.zero_grad()
            gen_imgs = generator(z)
            loss_G = -torch.mean(discriminator(gen_imgs))
            loss_G.backward()
            optimizer_G.step()
            print("[Epoch %d] [Batch %d] [D loss: %.8f] [G loss: %.8f]" % (epoch, i, loss_D.item(), loss_G.item()))
            np.save("%d.npy" % batches_done, gen_imgs.data[:4].numpy())
        batches_done += 1
torch.save([generator.state_dict(), discriminator.state_dict()], "wgan.pt")
