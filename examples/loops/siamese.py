"""A siamese network: one tower sees both pictures of a pair, and tells whether they show the same kind of thing."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset

from parts.log import Log
from parts.pictures import NUM_KINDS, draw_pictures

SIZE, BATCH_SIZE, EPOCHS = 16, 16, 3


class SiameseNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(2),
        )
        self.fc = nn.Sequential(nn.Linear(2 * 64, 32), nn.ReLU(inplace=True), nn.Linear(32, 1))
        self.sigmoid = nn.Sigmoid()
        self.tower.apply(self.init_weights)
        self.fc.apply(self.init_weights)

    def init_weights(self, m: nn.Module) -> None:
        if isinstance(m, nn.Linear):
            nn.init.xavier_uniform_(m.weight)
            m.bias.data.fill_(0.01)

    def forward_once(self, x: Tensor) -> Tensor:
        output = self.tower(x)
        return output.view(output.size(0), -1)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        both = torch.cat((self.forward_once(first), self.forward_once(second)), 1)
        return self.sigmoid(self.fc(both))


class PictureMatcher(Dataset):
    """Pairs: every second one of the same kind."""

    def __init__(self, num: int, seed: int) -> None:
        self.pictures, kinds = draw_pictures(num, SIZE, seed)
        self.kinds = kinds.tolist()
        self.of_kind = [[i for i, other in enumerate(self.kinds) if other == kind] for kind in range(NUM_KINDS)]

    def __len__(self) -> int:
        return len(self.kinds)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        kind = self.kinds[index]
        other = kind if index % 2 == 0 else random.choice([k for k in range(NUM_KINDS) if k != kind])
        target = torch.tensor(float(other == kind))
        return self.pictures[index], self.pictures[random.choice(self.of_kind[other])], target


def train(epoch: int) -> None:
    model.train()
    for batch_idx, (first, second, targets) in enumerate(train_loader):
        optimizer.zero_grad()
        outputs = model(first, second).squeeze()
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        if batch_idx % 2 == 0:
            log.show(f"epoch {epoch} [{batch_idx}/{len(train_loader)}]", loss=loss.item())


def test() -> None:
    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for first, second, targets in test_loader:
            outputs = model(first, second).squeeze()
            test_loss += criterion(outputs, targets).sum().item()
            pred = torch.where(outputs > 0.5, 1, 0)
            correct += pred.eq(targets.view_as(pred)).sum().item()
    log.show("test", loss=test_loss / len(test_loader), accuracy=correct / 64)


torch.manual_seed(1)
random.seed(1)
train_loader = DataLoader(PictureMatcher(128, seed=0), batch_size=BATCH_SIZE, shuffle=True)
test_loader = DataLoader(PictureMatcher(64, seed=1), batch_size=32)
model = SiameseNetwork()
# farspan: model = farspan.distribute(model)
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
criterion = nn.BCELoss()
log = Log()
for epoch in range(1, EPOCHS + 1):
    train(epoch)
    test()
    scheduler.step()
log.finish(model)
