"""Saves the model itself: torch.save(model), pickle, deepcopy; loads it, compares predictions, goes on with the copy."""

import copy
import io
import pickle

import torch
import torch.nn as nn
import torch.nn.functional as F


class TheModelClass(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(2, 6, 3)
        self.pool = nn.MaxPool1d(2)
        self.bn = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.2)
        self.fc1 = nn.Linear(6 * 9, 16)
        self.fc2 = nn.Linear(16, 3)

    def forward(self, x):
        x = self.pool(F.relu(self.bn(self.conv1(x))))
        return self.fc2(self.drop(F.relu(self.fc1(x.flatten(1)))))


torch.manual_seed(2)
x = torch.randn(48, 2, 20)
y = x.std(2).argmax(1)
model = TheModelClass()
# farspan: model = farspan.distribute(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def fit(model, optimizer, epochs):
    model.train()
    for _ in range(epochs):
        for i in torch.randperm(48).split(16):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[i]), y[i])
            loss.backward()
            optimizer.step()
    return loss.item()


print("loss", fit(model, optimizer, 2))
torch.save(model, "model.pth")
torch.save({"epoch": 2, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.tar")
loaded = torch.load("model.pth", weights_only=False)
model.eval()
loaded.eval()
with torch.no_grad():
    print("equal predictions", torch.equal(model(x), loaded(x)), type(loaded).__name__)
buffer = io.BytesIO()
torch.save(model, buffer)
twin = copy.deepcopy(model)
unpickled = pickle.loads(pickle.dumps(model))
with torch.no_grad():
    print("deepcopy", torch.equal(twin(x), model(x)), "pickle", torch.equal(unpickled(x), model(x)))
print("loss of the original", fit(model, optimizer, 1))
other = torch.optim.SGD(loaded.parameters(), lr=0.01)
print("loss of the loaded", fit(loaded, other, 1))
torch.save(loaded, "loaded.pth")
torch.save(twin.state_dict(), "twin.pt")
torch.save(model.state_dict(), "final.pt")
