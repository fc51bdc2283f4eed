"""The shape of milesial/Pytorch-UNet: dice and cross entropy, mean IoU from a bincount, checkpoints each epoch, bf16 autocast."""

from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split


class DoubleConv(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(cin, cout, 3, padding=1, bias=False),
            nn.BatchNorm2d(cout),
            nn.ReLU(inplace=True),
            nn.Conv2d(cout, cout, 3, padding=1, bias=False),
            nn.BatchNorm2d(cout),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class UNet(nn.Module):
    def __init__(self, n_classes=3, ch=6):
        super().__init__()
        self.inc = DoubleConv(1, ch)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(ch, 2 * ch))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(2 * ch, 2 * ch), nn.Dropout2d(0.1))
        self.up1, self.conv1 = nn.ConvTranspose2d(2 * ch, 2 * ch, 2, 2), DoubleConv(4 * ch, ch)
        self.up2, self.conv2 = nn.ConvTranspose2d(ch, ch, 2, 2), DoubleConv(2 * ch, ch)
        self.outc = nn.Conv2d(ch, n_classes, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x = self.conv1(torch.cat([x2, self.up1(x3)], dim=1))
        x = self.conv2(torch.cat([x1, self.up2(x)], dim=1))
        return self.outc(x)


def dice_loss(probs, onehot, eps=1e-6):
    inter = 2 * (probs * onehot).sum((0, 2, 3))
    sets = probs.sum((0, 2, 3)) + onehot.sum((0, 2, 3))
    return 1 - ((inter + eps) / (sets + eps)).mean()


def main():
    torch.manual_seed(3)
    images = torch.zeros(40, 1, 12, 12)
    masks = torch.zeros(40, 12, 12, dtype=torch.long)
    for n in range(40):
        r, c, k = *torch.randint(0, 8, (2,)).tolist(), 1 + n % 2
        masks[n, r : r + 4, c : c + 4] = k
    images[:, 0] = masks * 0.5 + 0.2 * torch.randn(40, 12, 12)
    train_set, val_set = random_split(
        TensorDataset(images, masks), [28, 12], generator=torch.Generator().manual_seed(0)
    )
    train_loader = DataLoader(train_set, shuffle=True, batch_size=7)
    val_loader = DataLoader(val_set, shuffle=False, drop_last=True, batch_size=6)
    model = UNet()
    # farspan: model = farspan.distribute(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3, weight_decay=1e-8, momentum=0.9, foreach=True)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=1)
    for epoch in range(1, 4):
        model.train()
        epoch_loss = 0
        for image, true_masks in train_loader:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=epoch == 2):
                masks_pred = model(image)
                loss = F.cross_entropy(masks_pred, true_masks)
                loss += dice_loss(
                    F.softmax(masks_pred, dim=1).float(), F.one_hot(true_masks, 3).permute(0, 3, 1, 2).float()
                )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            epoch_loss += loss.item()
        model.eval()
        hist = torch.zeros(3, 3)
        with torch.no_grad():
            for image, true_masks in val_loader:
                pred = model(image).argmax(1)
                hist += torch.bincount(3 * true_masks.flatten() + pred.flatten(), minlength=9).view(3, 3)
        iou = hist.diag() / (hist.sum(0) + hist.sum(1) - hist.diag())
        scheduler.step(iou.mean())
        print(f"Epoch {epoch} loss {epoch_loss / len(train_loader):.6f} IoU {iou.tolist()} mean {iou.mean():.6f}")
        Path("checkpoints").mkdir(parents=True, exist_ok=True)
        state_dict = model.state_dict()
        state_dict["mask_values"] = [0, 1, 2]
        torch.save(state_dict, f"checkpoints/checkpoint_epoch{epoch}.pth")
    np.save("prediction.npy", pred.numpy())


if __name__ == "__main__":
    main()
