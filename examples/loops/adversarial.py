"""Adversarial training: a perturbation of each batch is found by its gradient (PGD), and a test against FGSM."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from parts.log import Log
from parts.pictures import draw_pictures

SIZE, BATCH_SIZE, EPOCHS = 16, 16, 2
EPSILON, ALPHA, ATTACK_ITERS = 0.1, 0.04, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(16 * (SIZE // 2) ** 2, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))


def clamp(x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    return torch.max(torch.min(x, upper), lower)


def attack_pgd(x: Tensor, y: Tensor) -> Tensor:
    delta = torch.zeros_like(x).uniform_(-EPSILON, EPSILON)
    delta.data = clamp(delta, 0 - x, 1 - x)
    delta.requires_grad = True
    for _ in range(ATTACK_ITERS):
        loss = F.cross_entropy(model(x + delta), y)
        loss.backward()
        assert delta.grad is not None
        grad = delta.grad.detach()
        stepped = torch.clamp(delta + ALPHA * torch.sign(grad), min=-EPSILON, max=EPSILON)
        delta.data = clamp(stepped, 0 - x, 1 - x)
        delta.grad.zero_()
    return delta.detach()


def train(epoch: int) -> None:
    model.train()
    for index, (x, y) in enumerate(train_loader):
        delta = attack_pgd(x, y)
        output = model(torch.clamp(x + delta, 0, 1))
        loss = criterion(output, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        log.show(f"epoch {epoch} batch {index}", loss=loss.item(), distance=delta.abs().mean().item())


def test(epsilon: float) -> None:
    """Fast gradient sign: the gradient of the loss by the data themselves."""
    correct = total = 0
    for data, target in test_loader:
        data.requires_grad = True
        output = model(data)
        loss = F.nll_loss(F.log_softmax(output, dim=1), target)
        model.zero_grad()
        loss.backward()
        assert data.grad is not None
        perturbed = torch.clamp(data + epsilon * data.grad.data.sign(), 0, 1)
        total += len(target)
        correct += (model(perturbed).argmax(dim=1) == target).sum().item()
    log.show(f"epsilon {epsilon}", accuracy=correct / total)


torch.manual_seed(0)
images, _ = draw_pictures(80, SIZE, 0)
labels = (images.flatten(2)[:, 0, ::2].sum(1) * 7).long() % 4
pairs = list(zip(images, labels, strict=True))
train_loader = DataLoader(pairs[:64], batch_size=BATCH_SIZE, shuffle=True)  # pyright: ignore[reportArgumentType]
test_loader = DataLoader(pairs[64:], batch_size=8)  # pyright: ignore[reportArgumentType]
model = Net()
# farspan: model = farspan.distribute(model)
opt = optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
criterion = nn.CrossEntropyLoss()
log = Log()
for epoch in range(EPOCHS):
    train(epoch)
for epsilon in (0.0, 0.1):
    test(epsilon)
log.finish(model)
