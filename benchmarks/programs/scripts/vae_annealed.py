"""A convolutional VAE with dropout, batch norm and an annealed KL weight; samples and reconstructions written to files."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(28)


class ConvVAE(nn.Module):
    def __init__(self, latent=4):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 4, 2, 1),
            nn.BatchNorm2d(8),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.1),
            nn.Conv2d(8, 16, 4, 2, 1),
            nn.BatchNorm2d(16),
            nn.LeakyReLU(0.2),
            nn.Flatten(),
        )
        self.mu, self.logvar = nn.Linear(64, latent), nn.Linear(64, latent)
        self.fc = nn.Linear(latent, 64)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 4, 2, 1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout2d(0.1),
            nn.ConvTranspose2d(8, 1, 4, 2, 1),
        )

    def decode(self, z):
        return self.decoder(self.fc(z).view(-1, 16, 2, 2))

    def forward(self, x):
        h = self.encoder(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu) if self.training else mu
        return self.decode(z), mu, logvar


rows, cols = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
centres = torch.rand(64, 2) * 8
x = torch.exp(-((rows - centres[:, :1, None]) ** 2 + (cols - centres[:, 1:, None]) ** 2) / 6)[:, None]
vae = ConvVAE()
# farspan: vae = farspan.distribute(vae)
optimizer = torch.optim.AdamW(vae.parameters(), lr=3e-3)
step = 0
for epoch in range(4):
    vae.train()
    sums = torch.zeros(3)
    for i in torch.randperm(64).split(16):
        recon, mu, logvar = vae(x[i])
        bce = F.binary_cross_entropy_with_logits(recon, x[i], reduction="sum") / len(i)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
        beta = min(1.0, step / 10)
        loss = bce + beta * kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sums += torch.tensor([loss.item(), bce.item(), kl.item()])
        step += 1
    print(f"epoch {epoch} loss {sums[0] / 4:.6f} bce {sums[1] / 4:.6f} kl {sums[2] / 4:.6f} beta {beta}")
vae.eval()
with torch.no_grad():
    samples = torch.sigmoid(vae.decode(torch.randn(5, 4)))
    recon, mu, _ = vae(x[:5])
np.savez("samples.npz", samples=samples.numpy(), recon=recon.sigmoid().numpy(), mu=mu.numpy())
print("running mean", vae.encoder[1].running_mean[:3].tolist(), int(vae.encoder[1].num_batches_tracked))
torch.save(vae.state_dict(), "vae.pt")
