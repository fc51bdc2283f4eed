"""The shape of Bjarten/early-stopping-pytorch: a class that saves checkpoint.pt; ReduceLROnPlateau; the best loaded back."""

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class EarlyStopping:
    def __init__(self, patience=7, verbose=False, delta=0.0, path="checkpoint.pt", trace_func=print):
        self.patience, self.verbose, self.delta, self.path, self.trace_func = patience, verbose, delta, path, trace_func
        self.counter = 0
        self.best_val_loss = None
        self.early_stop = False
        self.val_loss_min = np.inf

    def __call__(self, val_loss, model):
        if np.isnan(val_loss):
            self.trace_func("Validation loss is NaN. Ignoring this epoch.")
            return
        if self.best_val_loss is None:
            self.best_val_loss = val_loss
            self.save_checkpoint(val_loss, model)
        elif val_loss < self.best_val_loss - self.delta:
            self.best_val_loss = val_loss
            self.save_checkpoint(val_loss, model)
            self.counter = 0
        else:
            self.counter += 1
            self.trace_func(f"EarlyStopping counter: {self.counter} out of {self.patience}")
            if self.counter >= self.patience:
                self.early_stop = True

    def save_checkpoint(self, val_loss, model):
        if self.verbose:
            self.trace_func(
                f"Validation loss decreased ({self.val_loss_min:.6f} --> {val_loss:.6f}).  Saving model ..."
            )
        torch.save(model.state_dict(), self.path)
        self.val_loss_min = val_loss


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(20, 48)
        self.fc2 = nn.Linear(48, 48)
        self.fc3 = nn.Linear(48, 4)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        x = self.dropout(torch.relu(self.fc1(x)))
        x = self.dropout(torch.relu(self.fc2(x)))
        return self.fc3(x)


torch.manual_seed(4)
x = torch.randn(120, 20)
y = torch.randint(0, 4, (120,))
train_loader = DataLoader(TensorDataset(x[:60], y[:60]), batch_size=20, shuffle=True)
valid_loader = DataLoader(TensorDataset(x[60:90], y[60:90]), batch_size=15)
model = Net()
# farspan: model = farspan.distribute(model)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
early_stopping = EarlyStopping(patience=2, verbose=True)
avg_train_losses, avg_valid_losses = [], []
for epoch in range(1, 13):
    train_losses, valid_losses = [], []
    model.train()
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(data), target)
        loss.backward()
        optimizer.step()
        train_losses.append(loss.item())
    model.eval()
    for data, target in valid_loader:
        loss = criterion(model(data), target)
        valid_losses.append(loss.item())
    avg_train_losses.append(np.average(train_losses))
    avg_valid_losses.append(np.average(valid_losses))
    print(
        f"[{epoch:>3}] train_loss: {avg_train_losses[-1]:.5f} valid_loss: {avg_valid_losses[-1]:.5f} "
        f"lr: {optimizer.param_groups[0]['lr']:.4f}"
    )
    scheduler.step(avg_valid_losses[-1])
    early_stopping(avg_valid_losses[-1], model)
    if early_stopping.early_stop:
        print("Early stopping")
        break
model.load_state_dict(torch.load("checkpoint.pt", weights_only=True))
model.eval()
with torch.no_grad():
    print("test loss", criterion(model(x[90:]), y[90:]).item())
np.savez("curves.npz", train=np.array(avg_train_losses), valid=np.array(avg_valid_losses))
