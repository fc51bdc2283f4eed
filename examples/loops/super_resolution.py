"""Super-resolution by sub-pixel convolution: orthogonal weights, pixel shuffle, PSNR on held-out pictures."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.nn import init
from torch.utils.data import DataLoader, TensorDataset

from parts.log import Log
from parts.pictures import draw_pictures

UPSCALE, SIZE, BATCH_SIZE, EPOCHS = 2, 16, 8, 2


class Net(nn.Module):
    def __init__(self, upscale_factor: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(1, 16, (5, 5), (1, 1), (2, 2))
        self.conv2 = nn.Conv2d(16, 16, (3, 3), (1, 1), (1, 1))
        self.conv3 = nn.Conv2d(16, 8, (3, 3), (1, 1), (1, 1))
        self.conv4 = nn.Conv2d(8, upscale_factor**2, (3, 3), (1, 1), (1, 1))
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)
        self._initialize_weights()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv1(x))
        x = self.relu(self.conv2(x))
        x = self.relu(self.conv3(x))
        return self.pixel_shuffle(self.conv4(x))

    def _initialize_weights(self) -> None:
        for conv in (self.conv1, self.conv2, self.conv3):
            init.orthogonal_(conv.weight, init.calculate_gain("relu"))
        init.orthogonal_(self.conv4.weight)


def pairs(num: int, seed: int) -> TensorDataset:
    sharp, _ = draw_pictures(num, SIZE, seed)
    return TensorDataset(F.avg_pool2d(sharp, UPSCALE), sharp)


def train(epoch: int) -> None:
    epoch_loss = 0.0
    for iteration, batch in enumerate(training_data_loader, 1):
        input, target = batch[0].to("cpu"), batch[1].to("cpu")
        optimizer.zero_grad()
        loss = criterion(model(input), target)
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()
        log.show(f"epoch {epoch} ({iteration}/{len(training_data_loader)})", loss=loss.item())
    log.show(f"epoch {epoch}", average=epoch_loss / len(training_data_loader))


def test() -> None:
    avg_psnr = 0.0
    with torch.no_grad():
        for input, target in testing_data_loader:
            mse = criterion(model(input), target)
            avg_psnr += 10 * math.log10(1 / mse.item())
    log.show("test", psnr=avg_psnr / len(testing_data_loader))


torch.manual_seed(123)
training_data_loader = DataLoader(pairs(64, 0), batch_size=BATCH_SIZE, shuffle=True)
testing_data_loader = DataLoader(pairs(16, 1), batch_size=BATCH_SIZE)
model = Net(UPSCALE).to("cpu")
# farspan: model = farspan.distribute(model)
criterion = nn.MSELoss()
optimizer = optim.Adam(model.parameters(), lr=1e-2)
log = Log()
for epoch in range(1, EPOCHS + 1):
    train(epoch)
    test()
log.finish(model)
