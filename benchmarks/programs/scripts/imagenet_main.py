"""The shape of pytorch/examples/imagenet: workers, meters, a checkpoint each epoch and a copy of the best, then --resume."""

import os
import random
import shutil
from enum import Enum

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

EPOCHS = 2


class Pictures(Dataset):
    """Pictures made on the spot, augmented in the workers."""

    def __init__(self, size, train):
        generator = torch.Generator().manual_seed(size)
        self.images = torch.rand(size, 3, 12, 12, generator=generator)
        self.labels = (self.images[:, 0].mean((1, 2)) > self.images[:, 1].mean((1, 2))).long()
        self.train = train

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if self.train:
            if random.random() < 0.5:
                image = image.flip(-1)
            image = image + 0.05 * torch.randn(image.shape)
        return image, self.labels[index]


class Summary(Enum):
    NONE = 0
    AVERAGE = 1


class AverageMeter:
    def __init__(self, name, fmt=":f", summary_type=Summary.AVERAGE):
        self.name, self.fmt, self.summary_type = name, fmt, summary_type
        self.reset()

    def reset(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return ("{name} {val" + self.fmt + "} ({avg" + self.fmt + "})").format(**self.__dict__)


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


def build():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(64, 2),
    )


def train(loader, model, criterion, optimizer, epoch):
    losses, top1 = AverageMeter("Loss", ":.4e"), AverageMeter("Acc@1", ":6.2f")
    model.train()
    for i, (images, target) in enumerate(loader):
        output = model(images)
        loss = criterion(output, target)
        (acc1,) = accuracy(output, target)
        losses.update(loss.item(), images.size(0))
        top1.update(acc1[0].item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 2 == 0:
            print(f"Epoch: [{epoch}][{i}/{len(loader)}]\t{losses}\t{top1}")


def validate(loader, model, criterion):
    losses, top1 = AverageMeter("Loss", ":.4e"), AverageMeter("Acc@1", ":6.2f")
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            output = model(images)
            losses.update(criterion(output, target).item(), images.size(0))
            top1.update(accuracy(output, target)[0][0], images.size(0))
    print(f" * Acc@1 {top1.avg:.3f} Loss {losses.avg:.6f}")
    return top1.avg


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


def main_worker(epochs, resume=None):
    model = build()
    # farspan: model = farspan.distribute(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    start_epoch, best_acc1 = 0, 0.0
    if resume and os.path.isfile(resume):
        checkpoint = torch.load(resume)
        start_epoch, best_acc1 = checkpoint["epoch"], checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        print(f"=> loaded checkpoint '{resume}' (epoch {checkpoint['epoch']})")
    train_loader = DataLoader(Pictures(48, True), batch_size=12, shuffle=True, num_workers=2, drop_last=True)
    val_loader = DataLoader(Pictures(24, False), batch_size=12, num_workers=2)
    for epoch in range(start_epoch, epochs):
        train(train_loader, model, criterion, optimizer, epoch)
        acc1 = validate(val_loader, model, criterion)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        save_checkpoint(
            {
                "epoch": epoch + 1,
                "arch": "tiny",
                "state_dict": model.state_dict(),
                "best_acc1": best_acc1,
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            },
            is_best,
        )


def main():
    random.seed(1)
    torch.manual_seed(1)
    main_worker(EPOCHS)
    main_worker(EPOCHS + 1, resume="checkpoint.pth.tar")


if __name__ == "__main__":
    main()
