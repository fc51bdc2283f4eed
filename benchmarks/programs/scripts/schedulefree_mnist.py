"""The shape of facebookresearch/schedule_free/examples/mnist: train() and eval() of the optimizer, batch norm recalibrated."""

import argparse
from itertools import islice

import schedulefree
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 12, 3, 1)
        self.bn2 = nn.BatchNorm2d(12)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(300, 32)
        self.fc2 = nn.Linear(32, 4)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def train(args, model, train_loader, optimizer, epoch):
    model.train()
    optimizer.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0:
            print(
                f"Train Epoch: {epoch} [{batch_idx * len(data)}/{len(train_loader.dataset)}]\tLoss: {loss.item():.6f}"
            )


def test(model, train_loader, test_loader, optimizer):
    # the averaged weights need their own running statistics
    model.train()
    optimizer.eval()
    with torch.no_grad():
        for data, _ in islice(train_loader, 3):
            model(data)
    model.eval()
    test_loss, correct = 0.0, 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            correct += output.argmax(dim=1, keepdim=True).eq(target.view_as(output.argmax(dim=1))[:, None]).sum().item()
    n = len(test_loader.dataset)
    print(f"Test set: Average loss: {test_loss / n:.6f}, Accuracy: {correct}/{n}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=2)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    images = torch.rand(96, 1, 14, 14)
    target = (images[:, 0, :7, :7].mean((1, 2)) * 40).long() % 4
    train_loader = DataLoader(TensorDataset(images[:72], target[:72]), batch_size=12, shuffle=True)
    test_loader = DataLoader(TensorDataset(images[72:], target[72:]), batch_size=12)
    model = Net()
    # farspan: model = farspan.distribute(model)
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=args.lr, betas=(0.9, 0.999), warmup_steps=4)
    for epoch in range(1, args.epochs + 1):
        train(args, model, train_loader, optimizer, epoch)
        test(model, train_loader, test_loader, optimizer)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "mnist_cnn.pt")


if __name__ == "__main__":
    main()
