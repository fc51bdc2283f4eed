"""The shape of facebookresearch/mixup-cifar10 and clovaai/CutMix: Beta draws by numpy, mixed losses, warm restarts."""

import numpy as np
import torch
import torch.nn as nn

# no seed: as in the original without --seed


def mixup_data(x, y, alpha=1.0):
    lam = np.random.beta(alpha, alpha) if alpha > 0 else 1
    index = torch.randperm(x.size(0))
    return lam * x + (1 - lam) * x[index, :], y, y[index], lam


def rand_bbox(size, lam):
    W, H = size[2], size[3]
    cut_rat = np.sqrt(1.0 - lam)
    cut_w, cut_h = int(W * cut_rat), int(H * cut_rat)
    cx, cy = np.random.randint(W), np.random.randint(H)
    x1, x2 = np.clip([cx - cut_w // 2, cx + cut_w // 2], 0, W)
    y1, y2 = np.clip([cy - cut_h // 2, cy + cut_h // 2], 0, H)
    return x1, y1, x2, y2


def cutmix_data(x, y):
    lam = np.random.beta(1.0, 1.0)
    index = torch.randperm(x.size(0))
    x1, y1, x2, y2 = rand_bbox(x.size(), lam)
    x = x.clone()
    x[:, :, x1:x2, y1:y2] = x[index, :, x1:x2, y1:y2]
    return x, y, y[index], 1 - (x2 - x1) * (y2 - y1) / (x.size(-1) * x.size(-2))


def mixup_criterion(criterion, pred, y_a, y_b, lam):
    return lam * criterion(pred, y_a) + (1 - lam) * criterion(pred, y_b)


class DenseLayer(nn.Module):
    def __init__(self, cin, growth):
        super().__init__()
        self.bn = nn.BatchNorm2d(cin)
        self.conv = nn.Conv2d(cin, growth, 3, padding=1, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return torch.cat([x, self.drop(self.conv(torch.relu(self.bn(x))))], 1)


net = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1),
    DenseLayer(8, 4),
    DenseLayer(12, 4),
    nn.AvgPool2d(2),
    DenseLayer(16, 4),
    nn.BatchNorm2d(20),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(20, 4),
)
# farspan: net = farspan.distribute(net)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=4)
images = torch.randn(64, 3, 8, 8)
labels = torch.randint(0, 4, (64,))
images[:, 0] += labels[:, None, None] * 0.5
for epoch in range(3):
    net.train()
    train_loss, correct, total = 0.0, 0.0, 0
    for b, i in enumerate(torch.randperm(64).split(16)):
        if np.random.rand() < 0.5:
            inputs, targets_a, targets_b, lam = cutmix_data(images[i], labels[i])
        else:
            inputs, targets_a, targets_b, lam = mixup_data(images[i], labels[i])
        outputs = net(inputs)
        loss = mixup_criterion(criterion, outputs, targets_a, targets_b, lam)
        train_loss += loss.item()
        _, predicted = torch.max(outputs.data, 1)
        total += len(i)
        correct += (
            lam * predicted.eq(targets_a).cpu().sum().float() + (1 - lam) * predicted.eq(targets_b).cpu().sum().float()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(epoch + b / 4)
    print(f"epoch {epoch} loss {train_loss / 4:.6f} acc {100.0 * correct / total:.3f} lam {lam:.6f}")
torch.save({"net": net.state_dict(), "rng_state": torch.get_rng_state()}, "ckpt.t7")
