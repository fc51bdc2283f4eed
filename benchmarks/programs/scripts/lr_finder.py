"""The shape of davidtvs/pytorch-lr-finder: the learning rate grows, the state is kept in memory and restored, then training."""

import copy

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class LRFinder:
    def __init__(self, model, optimizer, criterion):
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self.history = {"lr": [], "loss": []}
        self.best_loss = None
        self.model_state = copy.deepcopy(model.state_dict())
        self.optimizer_state = copy.deepcopy(optimizer.state_dict())

    def reset(self):
        self.model.load_state_dict(self.model_state)
        self.optimizer.load_state_dict(self.optimizer_state)

    def range_test(self, loader, start_lr=1e-4, end_lr=1.0, num_iter=12, smooth_f=0.05, diverge_th=5):
        for group in self.optimizer.param_groups:
            group["lr"] = start_lr
        gamma = (end_lr / start_lr) ** (1 / num_iter)
        schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma)
        iterator = iter(loader)
        for iteration in range(num_iter):
            try:
                inputs, labels = next(iterator)
            except StopIteration:
                iterator = iter(loader)
                inputs, labels = next(iterator)
            self.model.train()
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(inputs), labels)
            loss.backward()
            loss = loss.item()
            self.optimizer.step()
            self.history["lr"].append(schedule.get_last_lr()[0])
            schedule.step()
            if iteration == 0:
                self.best_loss = loss
            else:
                loss = smooth_f * loss + (1 - smooth_f) * self.history["loss"][-1]
                self.best_loss = min(self.best_loss, loss)
            self.history["loss"].append(loss)
            if loss > diverge_th * self.best_loss:
                print("Stopping early, the loss has diverged")
                break

    def suggestion(self):
        losses = torch.tensor(self.history["loss"])
        return self.history["lr"][int((losses[1:] - losses[:-1]).argmin())]


torch.manual_seed(6)
x = torch.randn(64, 10)
y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
# farspan: model = farspan.distribute(model)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, weight_decay=1e-2)
finder = LRFinder(model, optimizer, criterion)
finder.range_test(loader)
for lr, loss in zip(finder.history["lr"], finder.history["loss"]):
    print(f"{lr:.6f} {loss:.7f}")
finder.reset()
lr = finder.suggestion()
print("suggested", lr, "restored", optimizer.param_groups[0]["lr"])
for group in optimizer.param_groups:
    group["lr"] = lr
for epoch in range(3):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
    print("epoch", epoch, loss.item())
torch.save(model.state_dict(), "model.pt")
