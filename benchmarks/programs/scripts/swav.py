"""facebookresearch/swav in small: prototypes normalised in place before each batch, sinkhorn without gradient, a queue, frozen prototypes."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.projection_head = nn.Sequential(
            nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 6)
        )
        self.prototypes = nn.Linear(6, 5, bias=False)

    def forward_head(self, x):
        x = nn.functional.normalize(self.projection_head(x), dim=1, p=2)
        return x, self.prototypes(x)

    def forward(self, inputs):
        output = None
        for x in inputs:
            o = self.backbone(x)
            output = o if output is None else torch.cat((output, o))
        return self.forward_head(output)


@torch.no_grad()
def sinkhorn(out):
    Q = torch.exp(out / 0.05).t()
    B, K = Q.shape[1], Q.shape[0]
    Q /= torch.sum(Q)
    for _ in range(3):
        Q /= torch.sum(Q, dim=1, keepdim=True)
        Q /= K
        Q /= torch.sum(Q, dim=0, keepdim=True)
        Q /= B
    Q *= B
    return Q.t()


torch.manual_seed(31), np.random.seed(31)
model = Net()
# farspan: model = farspan.distribute(model)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-6)
queue, use_queue, bs = torch.zeros(2, 12, 6), False, 6
for it in range(9):
    if it == 3 and queue is None:
        queue = torch.zeros(2, 12, 6)
    with torch.no_grad():
        w = model.prototypes.weight.data.clone()
        w = F.normalize(w, dim=1, p=2)
        model.prototypes.weight.copy_(w)
    base = torch.randn(bs, 10)
    embedding, output = model([base + 0.1 * torch.randn(bs, 10) for _ in range(3)])
    embedding = embedding.detach()
    loss = 0
    for i, crop_id in enumerate([0, 1]):
        with torch.no_grad():
            out = output[bs * crop_id : bs * (crop_id + 1)].detach()
            if use_queue or not torch.all(queue[i, -1, :] == 0):
                use_queue = True
                out = torch.cat((torch.mm(queue[i], model.prototypes.weight.t()), out))
            queue[i, bs:] = queue[i, :-bs].clone()
            queue[i, :bs] = embedding[crop_id * bs : (crop_id + 1) * bs]
            q = sinkhorn(out)[-bs:]
        subloss = 0
        for v in np.delete(np.arange(3), crop_id):
            x = output[bs * v : bs * (v + 1)] / 0.1
            subloss -= torch.mean(torch.sum(q * F.log_softmax(x, dim=1), dim=1))
        loss += subloss / 2
    loss /= 2
    opt.zero_grad()
    loss.backward()
    if it < 2:
        for name, p in model.named_parameters():
            if "prototypes" in name:
                p.grad = None
    opt.step()
    print(it, use_queue, loss.item(), queue.abs().sum().item())
torch.save({"queue": queue}, "queue0.pth")
torch.save(model.state_dict(), "swav.pth")
