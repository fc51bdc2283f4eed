"""KFAC: forward-pre hooks and full backward hooks that collect statistics, running factors in dictionaries keyed by module, eigh in step."""

import torch
import torch.nn as nn
import torch.optim as optim


class KFAC(optim.Optimizer):
    def __init__(self, model, lr=0.01, momentum=0.9, stat_decay=0.95, damping=0.01, TCov=1, TInv=2):
        super().__init__(model.parameters(), dict(lr=lr, momentum=momentum, damping=damping))
        self.modules, self.m_aa, self.m_gg, self.Q_a, self.Q_g, self.d_a, self.d_g = [], {}, {}, {}, {}, {}, {}
        self.stat_decay, self.TCov, self.TInv, self.steps = stat_decay, TCov, TInv, 0
        for m in model.modules():
            if isinstance(m, nn.Linear):
                self.modules.append(m)
                m.register_forward_pre_hook(self._save_input)
                m.register_full_backward_hook(self._save_grad)

    def _save_input(self, module, inp):
        if torch.is_grad_enabled() and self.steps % self.TCov == 0:
            a = torch.cat([inp[0].data, inp[0].data.new_ones(inp[0].size(0), 1)], 1)
            aa = a.t() @ (a / a.size(0))
            if self.steps == 0:
                self.m_aa[module] = torch.diag(aa.new_ones(aa.size(0)))
            self.m_aa[module].mul_(self.stat_decay).add_(aa, alpha=1 - self.stat_decay)

    def _save_grad(self, module, grad_input, grad_output):
        g = grad_output[0].data * grad_output[0].size(0)
        gg = g.t() @ (g / g.size(0))
        if self.steps == 0:
            self.m_gg[module] = torch.diag(gg.new_ones(gg.size(0)))
        self.m_gg[module].mul_(self.stat_decay).add_(gg, alpha=1 - self.stat_decay)

    def step(self, closure=None):
        group = self.param_groups[0]
        updates, vg = {}, 0
        for m in self.modules:
            if self.steps % self.TInv == 0:
                self.d_a[m], self.Q_a[m] = torch.linalg.eigh(self.m_aa[m])
                self.d_g[m], self.Q_g[m] = torch.linalg.eigh(self.m_gg[m])
                self.d_a[m].mul_((self.d_a[m] > 1e-10).float())
                self.d_g[m].mul_((self.d_g[m] > 1e-10).float())
            grad = torch.cat([m.weight.grad.data, m.bias.grad.data.view(-1, 1)], 1)
            v1 = self.Q_g[m].t() @ grad @ self.Q_a[m]
            v2 = v1 / (self.d_g[m].unsqueeze(1) * self.d_a[m].unsqueeze(0) + group["damping"])
            v = self.Q_g[m] @ v2 @ self.Q_a[m].t()
            updates[m] = [v[:, :-1].view(m.weight.grad.size()), v[:, -1:].view(m.bias.grad.size())]
            vg += (updates[m][0] * m.weight.grad.data * group["lr"] ** 2).sum().item()
            vg += (updates[m][1] * m.bias.grad.data * group["lr"] ** 2).sum().item()
        nu = min(1.0, (0.001 / max(vg, 1e-12)) ** 0.5)
        for m in self.modules:
            m.weight.grad.data.copy_(updates[m][0]).mul_(nu)
            m.bias.grad.data.copy_(updates[m][1]).mul_(nu)
        for p in group["params"]:
            if p.grad is None:
                continue
            st = self.state[p]
            if "momentum_buffer" not in st:
                st["momentum_buffer"] = torch.zeros_like(p.data).add_(p.grad.data)
            else:
                st["momentum_buffer"].mul_(group["momentum"]).add_(p.grad.data)
            p.data.add_(st["momentum_buffer"], alpha=-group["lr"])
        self.steps += 1


torch.manual_seed(6)
model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 3))
# farspan: model = farspan.distribute(model)
optimizer = KFAC(model)
for i in range(6):
    x, y = torch.randn(16, 6), torch.randint(3, (16,))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(
        i,
        loss.item(),
        sum(v.trace().item() for v in optimizer.m_aa.values()),
        sum(v.trace().item() for v in optimizer.m_gg.values()),
    )
