"""A variational auto-encoder, which draws its noise inside the model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from parts.log import Log
from parts.pictures import draw_pictures

SIZE, BATCH_SIZE, EPOCHS = 16, 16, 3


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(SIZE * SIZE, 64)
        self.fc21 = nn.Linear(64, 8)
        self.fc22 = nn.Linear(64, 8)
        self.fc3 = nn.Linear(8, 64)
        self.fc4 = nn.Linear(64, SIZE * SIZE)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        std = torch.exp(0.5 * logvar)
        eps = torch.randn_like(std)
        return mu + eps * std

    def decode(self, z: Tensor) -> Tensor:
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mu, logvar = self.encode(x.view(-1, SIZE * SIZE))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def loss_function(recon_x: Tensor, x: Tensor, mu: Tensor, logvar: Tensor) -> Tensor:
    """Reconstruction and Kullback-Leibler divergence, summed over all elements and the batch."""
    bce = F.binary_cross_entropy(recon_x, x.view(-1, SIZE * SIZE), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


torch.manual_seed(1)
train_loader = DataLoader(TensorDataset(*draw_pictures(160, SIZE)), batch_size=BATCH_SIZE, shuffle=True)
test_loader = DataLoader(TensorDataset(*draw_pictures(32, SIZE, seed=1)), batch_size=BATCH_SIZE)
model = VAE()
# farspan: model = farspan.distribute(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)


def train(epoch: int) -> None:
    model.train()
    train_loss = 0.0
    for batch_idx, (data, _) in enumerate(train_loader):
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        if batch_idx % 4 == 0:
            log.show(f"epoch {epoch} [{batch_idx}/{len(train_loader)}]", loss=loss.item() / len(data))
    log.show(f"epoch {epoch}", average=train_loss / 160)


def test(epoch: int) -> None:
    model.eval()
    test_loss = 0.0
    with torch.no_grad():
        for data, _ in test_loader:
            recon_batch, mu, logvar = model(data)
            test_loss += loss_function(recon_batch, data, mu, logvar).item()
    log.show(f"test after epoch {epoch}", loss=test_loss / 32)


log = Log()
for epoch in range(1, EPOCHS + 1):
    train(epoch)
    test(epoch)
    with torch.no_grad():
        sample = model.decode(torch.randn(4, 8)).cpu()
        log.show("sample", brightness=sample.view(4, 1, SIZE, SIZE).mean().item())
log.finish(model)
