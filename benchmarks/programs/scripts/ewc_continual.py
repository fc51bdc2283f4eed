"""Continual learning: Fisher from squared gradients in dictionaries by name, quadratic penalties over parameters, LwF with a frozen copy, SI's path integrals."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4))
# farspan: model = farspan.distribute(model)


def task(k, n=48):
    g = torch.Generator().manual_seed(k)
    x = torch.randn(n, 8, generator=g)
    return x, (x.roll(k, 1)[:, :4]).argmax(1)


fisher, star, old = {}, {}, None
W, p_old, omega = {}, {}, {}
for n, p in model.named_parameters():
    n = n.replace(".", "__")
    W[n], p_old[n] = p.data.clone().zero_(), p.data.clone()
accs = torch.zeros(3, 3)
for k in range(3):
    x, y = task(k)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.train()
    for i in range(0, 48, 12):
        opt.zero_grad()
        logits = model(x[i : i + 12])
        ce = F.cross_entropy(logits, y[i : i + 12])
        pen = (
            sum((fisher[n] * (p - star[n]) ** 2).sum() for n, p in model.named_parameters())
            if fisher
            else torch.tensor(0.0)
        )
        kd = (
            F.kl_div(F.log_softmax(logits / 2, 1), F.softmax(old(x[i : i + 12]) / 2, 1), reduction="batchmean") * 4
            if old
            else torch.tensor(0.0)
        )
        si = 0
        for n, p in model.named_parameters():
            key = n.replace(".", "__")
            if key in omega:
                si = si + (omega[key] * (p - star[n]) ** 2).sum()
        (ce + 10 * pen + 0.5 * kd + 0.01 * si).backward()
        opt.step()
        for n, p in model.named_parameters():
            key = n.replace(".", "__")
            if p.grad is not None:
                W[key].add_(-p.grad * (p.detach() - p_old[key]))
            p_old[key] = p.detach().clone()
    model.eval()
    new = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for i in range(6):
        model.zero_grad()
        out = F.log_softmax(model(x[i : i + 1]), 1)
        F.nll_loss(out, out.max(1)[1].view(-1)).backward()
        for n, p in model.named_parameters():
            new[n].data += p.grad.data**2 / 6
    for n, p in model.named_parameters():
        prev = star.get(n, p.detach() * 0)
        omega[n.replace(".", "__")] = W[n.replace(".", "__")] / ((p.detach() - prev) ** 2 + 0.1)
        fisher[n] = fisher.get(n, 0) + new[n]
        star[n] = p.data.clone()
    old = copy.deepcopy(model).eval()
    for p in old.parameters():
        p.requires_grad_(False)
    with torch.no_grad():
        for j in range(k + 1):
            accs[k, j] = (model(task(j)[0]).argmax(1) == task(j)[1]).float().mean()
    print(
        k, ce.item(), pen.item(), kd.item(), float(si), accs[k].tolist(), sum(f.sum().item() for f in fisher.values())
    )
print("forgetting", (accs.max(0)[0] - accs[-1])[:2].mean().item())
torch.save({"fisher": fisher, "star": star}, "ewc.pt")
