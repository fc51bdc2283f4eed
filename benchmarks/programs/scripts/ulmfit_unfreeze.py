"""ULMFiT: layer groups unfrozen one by one, discriminative rates, add_param_group, slanted triangle, BatchNorm kept in eval while frozen."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(30, 10, padding_idx=0)
        self.rnns = nn.ModuleList([nn.LSTM(10, 10, batch_first=True) for _ in range(2)])
        self.bn = nn.BatchNorm1d(10)

    def forward(self, x):
        h = self.emb(x)
        for r in self.rnns:
            h = h + r(h)[0]
        return self.bn(h.transpose(1, 2)).transpose(1, 2)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Sequential(nn.Linear(30, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))

    def forward(self, x):
        h = self.encoder(x)
        return self.head(torch.cat([h[:, -1], h.max(1)[0], h.mean(1)], 1))

    def train(self, mode=True):
        super().train(mode)
        if not next(self.encoder.bn.parameters()).requires_grad:
            self.encoder.bn.eval()
        return self


torch.manual_seed(21), np.random.seed(21)
model = Classifier()
for p in model.encoder.parameters():
    p.requires_grad_(False)
# farspan: model = farspan.distribute(model)
groups = [[model.encoder.bn], [model.encoder.rnns[1]], [model.encoder.rnns[0]], [model.encoder.emb]]
optimizer = torch.optim.Adam([{"params": model.head.parameters(), "name": "head"}], lr=1e-2, betas=(0.7, 0.99))
it = 0
for stage in range(4):
    if stage:
        new = [p for m in groups[stage - 1] for p in m.parameters()]
        for p in new:
            p.requires_grad_(True)
        optimizer.add_param_group({"params": new, "lr": 1e-2 / 2.6**stage, "name": f"g{stage}"})
    model.train()
    for _ in range(3):
        x = torch.randint(0, 30, (6, 7))
        y = (x.sum(1) % 2).long()
        cut = 0.3
        p = it / 12 / cut if it < 12 * cut else 1 - (it / 12 - cut) / (1 - cut)
        for i, g in enumerate(optimizer.param_groups):
            g["lr"] = 1e-2 / 2.6**i * (1 + p * 31) / 32
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        it += 1
    frozen = [n for n, q in model.named_parameters() if not q.requires_grad]
    print(
        stage,
        loss.item(),
        len(frozen),
        model.encoder.bn.training,
        model.encoder.bn.num_batches_tracked.item(),
        [round(g["lr"], 8) for g in optimizer.param_groups],
        model.encoder.emb.weight.grad is None,
    )
sd = optimizer.state_dict()
print(len(sd["state"]), [g["name"] for g in sd["param_groups"]])
torch.save(sd, "opt.pt")
