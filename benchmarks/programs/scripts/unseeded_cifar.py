"""The shape of kuangliu/pytorch-cifar, which sets no seed: workers, augmentation by random and numpy, the best kept."""

import os
import random

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class Cifar(Dataset):
    def __init__(self, n, augment):
        rng = np.random.RandomState(n)
        self.x = rng.rand(n, 3, 10, 10).astype(np.float32)
        self.y = (self.x.mean((2, 3)).argmax(1)).astype(np.int64)
        self.augment = augment

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i]
        if self.augment:
            if random.random() < 0.5:
                x = x[:, :, ::-1].copy()
            dx = np.random.randint(-1, 2)
            x = np.roll(x, dx, axis=2)
        return torch.from_numpy(x), self.y[i]


cfg = [8, "M", 16, "M"]


class VGG(nn.Module):
    def __init__(self):
        super().__init__()
        layers, cin = [], 3
        for v in cfg:
            if v == "M":
                layers += [nn.MaxPool2d(2, 2)]
            else:
                layers += [nn.Conv2d(cin, v, 3, padding=1), nn.BatchNorm2d(v), nn.ReLU(inplace=True)]
                cin = v
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.3), nn.Linear(64, 3))

    def forward(self, x):
        out = self.features(x)
        return self.classifier(out.view(out.size(0), -1))


trainloader = DataLoader(Cifar(48, True), batch_size=12, shuffle=True, num_workers=2)
testloader = DataLoader(Cifar(20, False), batch_size=10, shuffle=False, num_workers=2)
best_acc = 0
print("==> Building model..")
net = VGG()
# farspan: net = farspan.distribute(net)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)


def train(epoch):
    print(f"\nEpoch: {epoch}")
    net.train()
    train_loss, correct, total = 0, 0, 0
    for batch_idx, (inputs, targets) in enumerate(trainloader):
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        train_loss += loss.item()
        _, predicted = outputs.max(1)
        total += targets.size(0)
        correct += predicted.eq(targets).sum().item()
        print(
            batch_idx,
            len(trainloader),
            "Loss: %.5f | Acc: %.3f%% (%d/%d)"
            % (train_loss / (batch_idx + 1), 100.0 * correct / total, correct, total),
        )


def test(epoch):
    global best_acc
    net.eval()
    correct, total = 0, 0
    with torch.no_grad():
        for inputs, targets in testloader:
            _, predicted = net(inputs).max(1)
            total += targets.size(0)
            correct += predicted.eq(targets).sum().item()
    acc = 100.0 * correct / total
    if acc > best_acc:
        print("Saving..")
        if not os.path.isdir("checkpoint"):
            os.mkdir("checkpoint")
        torch.save({"net": net.state_dict(), "acc": acc, "epoch": epoch}, "./checkpoint/ckpt.pth")
        best_acc = acc


for epoch in range(3):
    train(epoch)
    test(epoch)
    scheduler.step()
print("best", best_acc)
torch.save(net.state_dict(), "last.pth")
