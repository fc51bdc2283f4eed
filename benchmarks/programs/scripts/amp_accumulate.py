"""A residual network with bfloat16 autocast, GradScaler, accumulated and clipped gradients, OneCycleLR."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class BasicBlock(nn.Module):
    def __init__(self, cin, cout, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.shortcut = nn.Sequential()
        if stride != 1 or cin != cout:
            self.shortcut = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet(nn.Module):
    def __init__(self, num_classes=4):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.layer1 = BasicBlock(8, 8)
        self.layer2 = BasicBlock(8, 16, 2)
        self.layer3 = BasicBlock(16, 16, 2)
        self.drop = nn.Dropout(0.2)
        self.fc = nn.Linear(16, num_classes)

    def forward(self, x):
        x = self.layer3(self.layer2(self.layer1(self.stem(x))))
        return self.fc(self.drop(x.mean((2, 3))))


torch.manual_seed(0)
images = torch.randn(96, 3, 8, 8)
labels = (images[:, 0].mean((1, 2)) > 0).long() + 2 * (images[:, 1].mean((1, 2)) > 0).long()
train_loader = DataLoader(TensorDataset(images, labels), batch_size=8, shuffle=True, drop_last=True)
model = ResNet()
# farspan: model = farspan.distribute(model)
accumulation_steps, epochs = 3, 3
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=0.1, total_steps=epochs * (len(train_loader) // accumulation_steps)
)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
for epoch in range(epochs):
    model.train()
    running = 0.0
    for i, (inputs, targets) in enumerate(train_loader):
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(inputs), targets) / accumulation_steps
        scaler.scale(loss).backward()
        running += loss.item() * accumulation_steps
        if (i + 1) % accumulation_steps == 0:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            print(f"  norm {norm.item():.6f} scale {scaler.get_scale()} lr {scheduler.get_last_lr()[0]:.6f}")
    print(f"Epoch {epoch + 1}: loss {running / len(train_loader):.6f}")
torch.save({"model": model.state_dict(), "scaler": scaler.state_dict(), "opt": optimizer.state_dict()}, "amp.pt")
