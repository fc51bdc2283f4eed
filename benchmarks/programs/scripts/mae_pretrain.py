"""The shape of facebookresearch/mae: misc helpers that ask for the world size, masks drawn inside, a log of JSON lines."""

import json
import math
import os
from collections import defaultdict, deque
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn


class SmoothedValue:
    def __init__(self, window_size=20):
        self.deque = deque(maxlen=window_size)
        self.total, self.count = 0.0, 0

    def update(self, value, n=1):
        self.deque.append(value)
        self.count += n
        self.total += value * n

    @property
    def global_avg(self):
        return self.total / self.count


def is_dist_avail_and_initialized():
    return dist.is_available() and dist.is_initialized()


def get_world_size():
    return dist.get_world_size() if is_dist_avail_and_initialized() else 1


def get_rank():
    return dist.get_rank() if is_dist_avail_and_initialized() else 0


def adjust_learning_rate(optimizer, epoch, lr, warmup, epochs):
    if epoch < warmup:
        lr = lr * epoch / warmup
    else:
        lr = lr * 0.5 * (1.0 + math.cos(math.pi * (epoch - warmup) / (epochs - warmup)))
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    return lr


class MaskedAutoencoder(nn.Module):
    def __init__(self, dim=16, patches=16, patch_dim=12):
        super().__init__()
        self.patch_embed = nn.Linear(patch_dim, dim)
        self.pos_embed = nn.Parameter(torch.randn(1, patches, dim) * 0.02)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        make = lambda: nn.TransformerEncoderLayer(dim, 2, 32, 0.0, "gelu", batch_first=True, norm_first=True)  # noqa: E731
        self.blocks = nn.ModuleList([make() for _ in range(2)])
        self.decoder_blocks = nn.ModuleList([make()])
        self.decoder_pred = nn.Linear(dim, patch_dim)

    def random_masking(self, x, mask_ratio):
        n, length, d = x.shape
        keep = int(length * (1 - mask_ratio))
        noise = torch.rand(n, length, device=x.device)
        ids_shuffle = torch.argsort(noise, dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        x_masked = torch.gather(x, 1, ids_shuffle[:, :keep].unsqueeze(-1).repeat(1, 1, d))
        mask = torch.ones([n, length], device=x.device)
        mask[:, :keep] = 0
        return x_masked, torch.gather(mask, 1, ids_restore), ids_restore

    def forward(self, patches, mask_ratio=0.75):
        x, mask, ids_restore = self.random_masking(self.patch_embed(patches) + self.pos_embed, mask_ratio)
        for blk in self.blocks:
            x = blk(x)
        tokens = self.mask_token.repeat(x.shape[0], ids_restore.shape[1] - x.shape[1], 1)
        x = torch.cat([x, tokens], dim=1)
        x = torch.gather(x, 1, ids_restore.unsqueeze(-1).repeat(1, 1, x.shape[2])) + self.pos_embed
        for blk in self.decoder_blocks:
            x = blk(x)
        pred = self.decoder_pred(x)
        return (((pred - patches) ** 2).mean(-1) * mask).sum() / mask.sum(), pred, mask


def main():
    ddp = int(os.environ.get("RANK", -1)) != -1
    print("distributed run:", ddp, "world size", get_world_size())
    torch.manual_seed(0 + get_rank())
    data = torch.randn(48, 16, 12).cumsum(1) / 4
    eff_batch_size = 12 * get_world_size()
    lr = 0.05 * eff_batch_size / 256
    print("base lr: 5.00e-02, actual lr: %.2e, effective batch size: %d" % (lr, eff_batch_size))
    model = MaskedAutoencoder()
    # farspan: model = farspan.distribute(model)
    decay = [p for p in model.parameters() if p.ndim > 1]
    no_decay = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.05}, {"params": no_decay, "weight_decay": 0.0}], lr=lr, betas=(0.9, 0.95)
    )
    Path("output").mkdir(parents=True, exist_ok=True)
    for epoch in range(3):
        meters = defaultdict(SmoothedValue)
        order = torch.randperm(48)[get_rank() :: get_world_size()]
        for step, i in enumerate(order.split(12)):
            rate = adjust_learning_rate(optimizer, step / 4 + epoch, lr, 1, 3)
            loss, _, _ = model(data[i])
            loss_value = loss.item()
            if not math.isfinite(loss_value):
                raise SystemExit(f"Loss is {loss_value}, stopping training")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            meters["loss"].update(loss_value)
            meters["lr"].update(rate)
        log_stats = {**{f"train_{k}": m.global_avg for k, m in meters.items()}, "epoch": epoch}
        print(log_stats)
        if get_rank() == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch},
                f"output/checkpoint-{epoch}.pth",
            )
            with open("output/log.txt", mode="a", encoding="utf-8") as f:
                f.write(json.dumps(log_stats) + "\n")


if __name__ == "__main__":
    main()
