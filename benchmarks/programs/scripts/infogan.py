"""The shape of PyTorch-GAN/infogan: generated images shared by the generator's, discriminator's and information losses."""

import itertools

import numpy as np
import torch
import torch.nn as nn

latent_dim, n_classes, code_dim, img = 6, 3, 2, 8


def to_categorical(y):
    y_cat = np.zeros((y.shape[0], n_classes), dtype=np.float32)
    y_cat[range(y.shape[0]), y] = 1.0
    return torch.from_numpy(y_cat)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(latent_dim + n_classes + code_dim, 8 * 4)
        self.conv_blocks = nn.Sequential(
            nn.BatchNorm2d(8),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8, 0.8),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(8, 1, 3, padding=1),
            nn.Tanh(),
        )

    def forward(self, noise, labels, code):
        out = self.l1(torch.cat((noise, labels, code), -1))
        return self.conv_blocks(out.view(out.shape[0], 8, 2, 2))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_blocks = nn.Sequential(
            nn.Conv2d(1, 6, 3, 2, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Dropout2d(0.25),
            nn.Conv2d(6, 8, 3, 2, 1),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Dropout2d(0.25),
            nn.BatchNorm2d(8, 0.8),
        )
        self.adv_layer = nn.Linear(32, 1)
        self.aux_layer = nn.Sequential(nn.Linear(32, n_classes), nn.Softmax(dim=1))
        self.latent_layer = nn.Linear(32, code_dim)

    def forward(self, x):
        out = self.conv_blocks(x).view(x.shape[0], -1)
        return self.adv_layer(out), self.aux_layer(out), self.latent_layer(out)


torch.manual_seed(0)
np.random.seed(0)
generator, discriminator = Generator(), Discriminator()
# farspan: generator, discriminator = farspan.distribute(nn.ModuleList([generator, discriminator]))
adversarial_loss, categorical_loss, continuous_loss = nn.MSELoss(), nn.CrossEntropyLoss(), nn.MSELoss()
optimizer_G = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_D = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizer_info = torch.optim.Adam(
    itertools.chain(generator.parameters(), discriminator.parameters()), lr=2e-3, betas=(0.5, 0.999)
)
real = torch.rand(48, 1, img, img) * 2 - 1
for epoch in range(2):
    for i, imgs in enumerate(real.split(12)):
        n = imgs.shape[0]
        valid, fake = torch.ones(n, 1), torch.zeros(n, 1)
        optimizer_G.zero_grad()
        z = torch.from_numpy(np.random.normal(0, 1, (n, latent_dim)).astype(np.float32))
        label_input = to_categorical(np.random.randint(0, n_classes, n))
        code_input = torch.from_numpy(np.random.uniform(-1, 1, (n, code_dim)).astype(np.float32))
        gen_imgs = generator(z, label_input, code_input)
        validity, _, _ = discriminator(gen_imgs)
        g_loss = adversarial_loss(validity, valid)
        g_loss.backward()
        optimizer_G.step()

        optimizer_D.zero_grad()
        real_pred, _, _ = discriminator(imgs)
        d_real_loss = adversarial_loss(real_pred, valid)
        fake_pred, _, _ = discriminator(gen_imgs.detach())
        d_loss = (d_real_loss + adversarial_loss(fake_pred, fake)) / 2
        d_loss.backward()
        optimizer_D.step()

        optimizer_info.zero_grad()
        sampled_labels = np.random.randint(0, n_classes, n)
        gt_labels = torch.from_numpy(sampled_labels)
        z = torch.from_numpy(np.random.normal(0, 1, (n, latent_dim)).astype(np.float32))
        gen_imgs = generator(z, to_categorical(sampled_labels), code_input)
        _, pred_label, pred_code = discriminator(gen_imgs)
        info_loss = categorical_loss(pred_label, gt_labels) + 0.1 * continuous_loss(pred_code, code_input)
        info_loss.backward()
        optimizer_info.step()
        print(
            "[Epoch %d] [Batch %d] [D loss: %f] [G loss: %f] [info loss: %f]"
            % (epoch, i, d_loss.item(), g_loss.item(), info_loss.item())
        )
    np.save(f"images_{epoch}.npy", gen_imgs.data.numpy())
torch.save(generator.state_dict(), "generator.pt")
torch.save(discriminator.state_dict(), "discriminator.pt")
