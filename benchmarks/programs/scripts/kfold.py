"""Cross-validation: a fresh model and optimizer for each fold, weights reset, one file for each, a table at the end."""

import csv
import statistics

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset


def reset_weights(m):
    for layer in m.children():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()


class SimpleNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1 = nn.Linear(9, 24)
        self.bn = nn.BatchNorm1d(24)
        self.drop = nn.Dropout(0.2)
        self.l2 = nn.Linear(24, 12)
        self.l3 = nn.Linear(12, 3)

    def forward(self, x):
        x = self.drop(F.relu(self.bn(self.l1(x))))
        return self.l3(F.relu(self.l2(x)))


torch.manual_seed(42)
np.random.seed(42)
x = torch.randn(72, 9)
y = x[:, :3].abs().argmax(1)
dataset = TensorDataset(x, y)
results = {}
folds = np.array_split(np.random.permutation(72), 3)
for fold, test_ids in enumerate(folds):
    print(f"FOLD {fold}\n--------------------------------")
    train_ids = np.concatenate([f for i, f in enumerate(folds) if i != fold])
    trainloader = DataLoader(dataset, batch_size=12, sampler=SubsetRandomSampler(train_ids.tolist()))
    testloader = DataLoader(dataset, batch_size=12, sampler=SubsetRandomSampler(test_ids.tolist()))
    network = SimpleNet()
    network.apply(reset_weights)
    # farspan: network = farspan.distribute(network)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for epoch in range(2):
        current_loss = 0.0
        for inputs, targets in trainloader:
            optimizer.zero_grad()
            loss = F.cross_entropy(network(inputs), targets)
            loss.backward()
            optimizer.step()
            current_loss += loss.item()
        print(f"epoch {epoch + 1} loss {current_loss / len(trainloader):.6f}")
    torch.save(network.state_dict(), f"./model-fold-{fold}.pth")
    network.eval()
    correct, total = 0, 0
    with torch.no_grad():
        for inputs, targets in testloader:
            _, predicted = torch.max(network(inputs).data, 1)
            total += targets.size(0)
            correct += (predicted == targets).sum().item()
    results[fold] = 100.0 * (correct / total)
    print("Accuracy for fold %d: %.3f %%" % (fold, results[fold]))
print(f"Average: {statistics.mean(results.values())} %")
with open("folds.csv", "w", newline="") as f:
    csv.writer(f).writerows(results.items())
