"""The shape of the transfer learning tutorial: a new head, best weights kept in a temporary folder, then all unfrozen."""

import os
from tempfile import TemporaryDirectory

import torch
import torch.nn as nn
import torch.optim as optim
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 12, 3, padding=1),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.dropout = nn.Dropout(0.3)
        self.fc = nn.Linear(48, 10)

    def forward(self, x):
        return self.fc(self.dropout(self.features(x)))


torch.manual_seed(0)
x = torch.randn(72, 3, 8, 8)
y = (x[:, 0].mean((1, 2)) > x[:, 2].mean((1, 2))).long()
dataloaders = {
    "train": DataLoader(TensorDataset(x[:48], y[:48]), batch_size=12, shuffle=True),
    "val": DataLoader(TensorDataset(x[48:], y[48:]), batch_size=12),
}
dataset_sizes = {"train": 48, "val": 24}


def train_model(model, criterion, optimizer, scheduler, num_epochs):
    with TemporaryDirectory() as tempdir:
        best_model_params_path = os.path.join(tempdir, "best_model_params.pt")
        torch.save(model.state_dict(), best_model_params_path)
        best_acc = 0.0
        for epoch in range(num_epochs):
            print(f"Epoch {epoch}/{num_epochs - 1}")
            for phase in ["train", "val"]:
                model.train() if phase == "train" else model.eval()
                running_loss, running_corrects = 0.0, 0
                for inputs, labels in dataloaders[phase]:
                    optimizer.zero_grad()
                    with torch.set_grad_enabled(phase == "train"):
                        outputs = model(inputs)
                        _, preds = torch.max(outputs, 1)
                        loss = criterion(outputs, labels)
                        if phase == "train":
                            loss.backward()
                            optimizer.step()
                    running_loss += loss.item() * inputs.size(0)
                    running_corrects += torch.sum(preds == labels.data)
                if phase == "train":
                    scheduler.step()
                epoch_loss = running_loss / dataset_sizes[phase]
                epoch_acc = running_corrects.double() / dataset_sizes[phase]
                print(f"{phase} Loss: {epoch_loss:.4f} Acc: {epoch_acc:.4f}")
                if phase == "val" and epoch_acc > best_acc:
                    best_acc = epoch_acc
                    torch.save(model.state_dict(), best_model_params_path)
        print(f"Best val Acc: {best_acc:4f}")
        model.load_state_dict(torch.load(best_model_params_path, weights_only=True))
    return model


model_conv = Backbone()
for param in model_conv.parameters():
    param.requires_grad = False
num_ftrs = model_conv.fc.in_features
model_conv.fc = nn.Linear(num_ftrs, 2)
# farspan: model_conv = farspan.distribute(model_conv)
criterion = nn.CrossEntropyLoss()
optimizer_conv = optim.SGD(model_conv.fc.parameters(), lr=0.05, momentum=0.9)
exp_lr_scheduler = lr_scheduler.StepLR(optimizer_conv, step_size=2, gamma=0.1)
model_conv = train_model(model_conv, criterion, optimizer_conv, exp_lr_scheduler, num_epochs=3)

print("-" * 10, "fine-tuning all")
for param in model_conv.parameters():
    param.requires_grad = True
optimizer_ft = optim.Adam(
    [
        {"params": model_conv.features.parameters(), "lr": 1e-3},
        {"params": model_conv.fc.parameters(), "lr": 5e-3},
    ]
)
model_ft = train_model(model_conv, criterion, optimizer_ft, lr_scheduler.StepLR(optimizer_ft, 2), num_epochs=2)
torch.save(model_ft.state_dict(), "fine_tuned.pt")
