"""A GAN with spectral norm in the critic and the old weight_norm in the generator, hinge losses, as in SN-GAN scripts."""

import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F

warnings.filterwarnings("ignore", category=FutureWarning)
weight_norm, spectral_norm = nn.utils.weight_norm, nn.utils.spectral_norm


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = weight_norm(nn.Linear(8, 32))
        self.conv = weight_norm(nn.ConvTranspose1d(8, 8, 4, 2, 1))
        self.out = weight_norm(nn.ConvTranspose1d(8, 1, 4, 2, 1))

    def forward(self, z):
        h = F.relu(self.fc(z)).view(-1, 8, 4)
        return torch.tanh(self.out(F.relu(self.conv(h))))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            spectral_norm(nn.Conv1d(1, 8, 4, 2, 1)),
            nn.LeakyReLU(0.1),
            nn.Dropout(0.1),
            spectral_norm(nn.Conv1d(8, 16, 4, 2, 1)),
            nn.LeakyReLU(0.1),
            nn.Flatten(),
            nn.utils.parametrizations.spectral_norm(nn.Linear(64, 1)),
        )

    def forward(self, x):
        return self.net(x)


torch.manual_seed(44)
real = torch.sin(torch.arange(16.0) / 2 + torch.rand(48, 1) * 6.28)[:, None]
G, D = Generator(), Critic()
# farspan: G, D = farspan.distribute(nn.ModuleList([G, D]))
opt_g = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.0, 0.9))
opt_d = torch.optim.Adam(filter(lambda p: p.requires_grad, D.parameters()), lr=4e-3, betas=(0.0, 0.9))
for step in range(8):
    for _ in range(2):
        x = real[torch.randint(0, 48, (12,))]
        d_loss = F.relu(1 - D(x)).mean() + F.relu(1 + D(G(torch.randn(12, 8)).detach())).mean()
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()
    g_loss = -D(G(torch.randn(12, 8))).mean()
    opt_g.zero_grad()
    g_loss.backward()
    opt_g.step()
    print(f"step {step} D {d_loss.item():.7f} G {g_loss.item():.7f}")
torch.save({"G": G.state_dict(), "D": D.state_dict()}, "sngan.pt")
for m in (G.fc, G.conv, G.out):
    nn.utils.remove_weight_norm(m)
G.eval()
with torch.no_grad():
    sample = G(torch.randn(2, 8))
print("sample", sample.mean().item(), [n for n, _ in G.named_parameters()])
torch.save(G.state_dict(), "generator_plain.pt")
