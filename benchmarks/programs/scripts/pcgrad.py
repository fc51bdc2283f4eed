"""The shape of WeiChengTseng/Pytorch-PCGrad: conflicting gradients of three tasks are projected, then set by hand."""

import copy
import random

import torch
import torch.nn.functional as F
from torch import nn


class PCGrad:
    def __init__(self, optimizer):
        self._optim = optimizer

    def zero_grad(self):
        return self._optim.zero_grad(set_to_none=True)

    def step(self):
        return self._optim.step()

    def pc_backward(self, objectives):
        grads, shapes, has_grads = self._pack_grad(objectives)
        pc_grad = self._project_conflicting(grads, has_grads)
        pc_grad = self._unflatten_grad(pc_grad, shapes[0])
        self._set_grad(pc_grad)

    def _project_conflicting(self, grads, has_grads):
        shared = torch.stack(has_grads).prod(0).bool()
        pc_grad = copy.deepcopy(grads)
        for g_i in pc_grad:
            random.shuffle(grads)
            for g_j in grads:
                g_i_g_j = torch.dot(g_i, g_j)
                if g_i_g_j < 0:
                    g_i -= g_i_g_j * g_j / (g_j.norm() ** 2)
        merged_grad = torch.zeros_like(grads[0])
        merged_grad[shared] = torch.stack([g[shared] for g in pc_grad]).mean(dim=0)
        merged_grad[~shared] = torch.stack([g[~shared] for g in pc_grad]).sum(dim=0)
        return merged_grad

    def _set_grad(self, grads):
        idx = 0
        for group in self._optim.param_groups:
            for p in group["params"]:
                p.grad = grads[idx]
                idx += 1

    def _pack_grad(self, objectives):
        grads, shapes, has_grads = [], [], []
        for obj in objectives:
            self._optim.zero_grad(set_to_none=True)
            obj.backward(retain_graph=True)
            grad, shape, has_grad = self._retrieve_grad()
            grads.append(torch.cat([g.flatten() for g in grad]))
            has_grads.append(torch.cat([g.flatten() for g in has_grad]))
            shapes.append(shape)
        return grads, shapes, has_grads

    def _unflatten_grad(self, grads, shapes):
        unflatten_grad, idx = [], 0
        for shape in shapes:
            length = shape.numel()
            unflatten_grad.append(grads[idx : idx + length].view(shape).clone())
            idx += length
        return unflatten_grad

    def _retrieve_grad(self):
        grad, shape, has_grad = [], [], []
        for group in self._optim.param_groups:
            for p in group["params"]:
                shape.append(p.shape)
                if p.grad is None:
                    grad.append(torch.zeros_like(p))
                    has_grad.append(torch.zeros_like(p))
                    continue
                grad.append(p.grad.clone())
                has_grad.append(torch.ones_like(p))
        return grad, shape, has_grad


class MultiHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 24), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(24, n) for n in (1, 1, 3))

    def forward(self, x):
        h = self.trunk(x)
        return [head(h) for head in self.heads]


torch.manual_seed(17)
random.seed(17)
x = torch.randn(64, 6)
targets = (x.sum(1, keepdim=True), -x[:, :1] * 2, x[:, :3].argmax(1))
model = MultiHead()
# farspan: model = farspan.distribute(model)
optimizer = PCGrad(torch.optim.Adam(model.parameters(), lr=5e-3))
for step in range(8):
    i = torch.randperm(64)[:16]
    a, b, c = model(x[i])
    losses = [F.mse_loss(a, targets[0][i]), F.l1_loss(b, targets[1][i]), F.cross_entropy(c, targets[2][i])]
    optimizer.zero_grad()
    optimizer.pc_backward(losses)
    optimizer.step()
    print(step, " ".join(f"{loss.item():.7f}" for loss in losses))
torch.save(model.state_dict(), "pcgrad.pt")
