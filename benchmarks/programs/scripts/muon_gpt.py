"""The shape of KellerJordan/modded-nanogpt: Muon for the matrices, AdamW for the rest, warm-down by hand, a log file."""

import torch
import torch.nn.functional as F
from torch import nn


def zeropower_via_newtonschulz5(G, steps=5):
    a, b, c = (3.4445, -4.7750, 2.0315)
    X = G.bfloat16()
    X = X / (X.norm() + 1e-7)
    if G.size(0) > G.size(1):
        X = X.T
    for _ in range(steps):
        A = X @ X.T
        B = b * A + c * A @ A
        X = a * X + B @ X
    if G.size(0) > G.size(1):
        X = X.T
    return X.to(G.dtype)


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad
                if g is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(g)
                buf = state["momentum_buffer"]
                buf.mul_(group["momentum"]).add_(g)
                g = g.add(buf, alpha=group["momentum"])
                g = zeropower_via_newtonschulz5(g) * max(1, g.size(0) / g.size(1)) ** 0.5
                p.data.add_(g, alpha=-group["lr"])


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.c_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.c_proj = nn.Linear(dim, dim, bias=False)
        self.c_fc = nn.Linear(dim, 2 * dim, bias=False)
        self.c_out = nn.Linear(2 * dim, dim, bias=False)
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x, x0):
        x = self.lambdas[0] * x + self.lambdas[1] * x0
        B, T, C = x.size()
        h = F.rms_norm(x, (C,))
        q, k, v = self.c_qkv(h).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = F.rms_norm(q, (q.size(-1),)), F.rms_norm(k, (k.size(-1),))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.c_out(F.relu(self.c_fc(F.rms_norm(x, (C,)))).square())


class GPT(nn.Module):
    def __init__(self, vocab=32, dim=24, depth=3):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.h = nn.ModuleList([Block(dim, 2) for _ in range(depth)])
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self.lm_head.weight.data.zero_()

    def forward(self, idx, target):
        x = x0 = F.rms_norm(self.wte(idx), (24,))
        for block in self.h:
            x = block(x, x0)
        logits = 30 * torch.tanh(self.lm_head(F.rms_norm(x, (24,))) / 30)
        return F.cross_entropy(logits.float().view(-1, logits.size(-1)), target.view(-1))


torch.manual_seed(2024)
stream = (torch.arange(1200) * 7 + torch.randint(0, 3, (1200,))) % 32
model = GPT()
# farspan: model = farspan.distribute(model)
matrices = [p for n, p in model.h.named_parameters() if p.ndim == 2]
scalars = [p for n, p in model.h.named_parameters() if p.ndim < 2]
optimizers = [
    torch.optim.Adam([{"params": [model.wte.weight], "lr": 0.1}, {"params": [model.lm_head.weight], "lr": 0.01}]),
    torch.optim.Adam(scalars, lr=0.02, betas=(0.8, 0.95)),
    Muon(matrices, lr=0.02, momentum=0.95),
]
steps = 12
schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda it: min(1.0, (steps - it) / 5)) for o in optimizers]
logfile = open("train.log", "w")
for step in range(steps):
    for micro in range(2):
        ix = torch.randint(0, 1200 - 17, (4,))
        loss = model(torch.stack([stream[i : i + 16] for i in ix]), torch.stack([stream[i + 1 : i + 17] for i in ix]))
        (loss / 2).backward()
    for p in model.parameters():
        assert p.grad is not None
    optimizers[2].param_groups[0]["momentum"] = 0.85 + 0.1 * min(step / 6, 1)
    for opt, sched in zip(optimizers, schedulers):
        opt.step()
        sched.step()
    model.zero_grad(set_to_none=True)
    line = f"step:{step + 1}/{steps} train_loss:{loss.item():.6f}"
    print(line)
    print(line, file=logfile, flush=True)
torch.save(dict(step=steps, model=model.state_dict(), optimizers=[o.state_dict() for o in optimizers]), "state.pt")
