"""The shape of Liuhong99/Sophia: every few steps the curvature is updated from labels that the model itself draws."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.optimizer import Optimizer


class SophiaG(Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.965, 0.99), rho=0.04, weight_decay=1e-1):
        super().__init__(params, dict(lr=lr, betas=betas, rho=rho, weight_decay=weight_decay))

    @torch.no_grad()
    def update_hessian(self):
        for group in self.param_groups:
            _, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(p)
                    state["hessian"] = torch.zeros_like(p)
                state["hessian"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)

    @torch.no_grad()
    def step(self, closure=None, bs=5120):
        for group in self.param_groups:
            beta1, _ = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(p)
                    state["hessian"] = torch.zeros_like(p)
                state["step"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                ratio = (state["exp_avg"].abs() / (group["rho"] * bs * state["hessian"] + 1e-15)).clamp(None, 1)
                p.addcmul_(state["exp_avg"].sign(), ratio, value=-group["lr"])


class LM(nn.Module):
    def __init__(self, vocab=24, dim=20):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        layer = nn.TransformerEncoderLayer(dim, 2, 40, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocab)

    def forward(self, idx):
        mask = nn.Transformer.generate_square_subsequent_mask(idx.shape[1])
        return self.head(self.blocks(self.emb(idx), mask=mask, is_causal=True))


torch.manual_seed(1337)
data = torch.cumsum(torch.randint(0, 3, (900,)), 0) % 24
model = LM()
# farspan: model = farspan.distribute(model)
optimizer = SophiaG(model.parameters(), lr=3e-3, rho=0.03)


def get_batch():
    ix = torch.randint(len(data) - 13, (6,))
    return torch.stack([data[i : i + 12] for i in ix]), torch.stack([data[i + 1 : i + 13] for i in ix])


for it in range(10):
    X, Y = get_batch()
    logits = model(X)
    loss = F.cross_entropy(logits.view(-1, 24), Y.view(-1))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(bs=72)
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {it}: loss {loss.item():.6f}")
    if it % 3 == 2:
        X, Y = get_batch()
        logits = model(X)
        y_sample = torch.distributions.Categorical(logits=logits).sample()
        loss_sampled = F.cross_entropy(logits.view(-1, 24), y_sample.view(-1))
        loss_sampled.backward()
        optimizer.update_hessian()
        optimizer.zero_grad(set_to_none=True)
        h = torch.stack([s["hessian"].mean() for s in optimizer.state.values()])
        print(f"  sampled loss {loss_sampled.item():.6f} curvature {h.mean().item():.4e} of {len(optimizer.state)}")
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "ckpt.pt")
