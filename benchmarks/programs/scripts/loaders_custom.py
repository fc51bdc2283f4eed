"""Loaders: a length-bucketing batch sampler, collate with padding, workers with worker_init_fn, an IterableDataset that splits by worker, persistent."""

import math
import random

import numpy as np
import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
    random_split,
)


class Texts(Dataset):
    def __init__(self, n):
        rng = np.random.RandomState(0)
        self.rows = [rng.randint(1, 20, size=rng.randint(3, 9)) for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i].copy()
        if np.random.rand() < 0.5:
            row[np.random.randint(len(row))] = 0
        return torch.from_numpy(row), int(self.rows[i].sum() % 3)


class BucketSampler(Sampler):
    def __init__(self, data, batch):
        self.data, self.batch, self.epoch = data, batch, 0

    def set_epoch(self, e):
        self.epoch = e

    def __len__(self):
        return math.ceil(len(self.data) / self.batch)

    def __iter__(self):
        order = sorted(range(len(self.data)), key=lambda i: (len(self.data[i][0]), i))
        batches = [order[i : i + self.batch] for i in range(0, len(order), self.batch)]
        random.Random(self.epoch).shuffle(batches)
        yield from batches


class Stream(IterableDataset):
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        info = get_worker_info()
        start, step = (0, 1) if info is None else (info.id, info.num_workers)
        for i in range(start, self.n, step):
            yield torch.full((4,), float(i)) + torch.rand(4) * 0.1, float(i % 2)


def collate(batch):
    xs, ys = zip(*batch)
    return {"x": pad_sequence(xs, batch_first=True), "len": torch.tensor([len(x) for x in xs]), "y": torch.tensor(ys)}


def seed_worker(worker_id):
    s = torch.initial_seed() % 2**32
    np.random.seed(s)
    random.seed(s)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.lin, self.out, self.extra = (
            nn.EmbeddingBag(20, 8, mode="mean", padding_idx=0),
            nn.Linear(8, 8),
            nn.Linear(8, 3),
            nn.Linear(4, 1),
        )

    def forward(self, x):
        if x.is_floating_point():
            return self.extra(x).squeeze(-1)
        return self.out(torch.tanh(self.lin(self.emb(x))))


def main():
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    model = Net()
    # farspan: model = farspan.distribute(model)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    train, val = random_split(Texts(24), [18, 6])
    sampler = BucketSampler(train, 4)
    g = torch.Generator()
    g.manual_seed(5)
    dl = DataLoader(
        train,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=2,
        worker_init_fn=seed_worker,
        generator=g,
        persistent_workers=True,
    )
    stream = DataLoader(Stream(12), batch_size=3, num_workers=2)
    weights = [1.0 + (train[i][1] == 0) for i in range(len(train))]
    balanced = DataLoader(train, batch_size=6, sampler=WeightedRandomSampler(weights, 12), collate_fn=collate)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for b in dl:
            loss = nn.functional.cross_entropy(model(b["x"]), b["y"])
            opt.zero_grad()
            loss.backward()
            opt.step()
            print(epoch, list(b["x"].shape), b["x"].sum().item(), loss.item())
        for (x, y), b in zip(stream, balanced):
            loss = nn.functional.binary_cross_entropy_with_logits(model(x), y.float()) + nn.functional.cross_entropy(
                model(b["x"]), b["y"]
            )
            opt.zero_grad()
            loss.backward()
            opt.step()
        print("stream", loss.item())
    with torch.no_grad():
        print("val", [model(b["x"]).argmax(1).tolist() for b in DataLoader(val, batch_size=3, collate_fn=collate)])


if __name__ == "__main__":
    main()
