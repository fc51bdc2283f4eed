"""The Annotated Transformer: clones by deepcopy, Noam by LambdaLR, label smoothing by KLDiv with in-place scatter, greedy decoding, TrainState."""

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.optim.lr_scheduler import LambdaLR


def clones(m, n):
    return nn.ModuleList([copy.deepcopy(m) for _ in range(n)])


class LayerNorm(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.a_2, self.b_2, self.eps = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d)), eps

    def forward(self, x):
        return self.a_2 * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + self.eps) + self.b_2


class Sublayer(nn.Module):
    def __init__(self, d, p):
        super().__init__()
        self.norm, self.dropout = LayerNorm(d), nn.Dropout(p)

    def forward(self, x, sublayer):
        return x + self.dropout(sublayer(self.norm(x)))


class MHA(nn.Module):
    def __init__(self, h, d, p=0.1):
        super().__init__()
        self.d_k, self.h, self.linears, self.attn, self.dropout = (
            d // h,
            h,
            clones(nn.Linear(d, d), 4),
            None,
            nn.Dropout(p),
        )

    def forward(self, q, k, v, mask=None):
        n = q.size(0)
        q, k, v = [lin(x).view(n, -1, self.h, self.d_k).transpose(1, 2) for lin, x in zip(self.linears, (q, k, v))]
        s = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            s = s.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        self.attn = self.dropout(s.softmax(dim=-1))
        x = torch.matmul(self.attn, v).transpose(1, 2).contiguous().view(n, -1, self.h * self.d_k)
        del q, k, v
        return self.linears[-1](x)


class Layer(nn.Module):
    def __init__(self, d, attn, src, ff, p, n):
        super().__init__()
        self.self_attn, self.src_attn, self.ff, self.sub = attn, src, ff, clones(Sublayer(d, p), n)

    def forward(self, x, mask, memory=None, src_mask=None):
        x = self.sub[0](x, lambda x: self.self_attn(x, x, x, mask))
        if self.src_attn is not None:
            x = self.sub[1](x, lambda x: self.src_attn(x, memory, memory, src_mask))
        return self.sub[-1](x, self.ff)


class PE(nn.Module):
    def __init__(self, d, p, n=50):
        super().__init__()
        self.dropout, pe = nn.Dropout(p=p), torch.zeros(n, d)
        pos, div = torch.arange(0, n).unsqueeze(1), torch.exp(torch.arange(0, d, 2) * -(math.log(10000.0) / d))
        pe[:, 0::2], pe[:, 1::2] = torch.sin(pos * div), torch.cos(pos * div)
        self.register_buffer("pe", pe.unsqueeze(0))

    def forward(self, x):
        return self.dropout(x + self.pe[:, : x.size(1)].requires_grad_(False))


class EncDec(nn.Module):
    def __init__(self, V, d=8, h=2, N=2, p=0.1):
        super().__init__()
        c, attn, ff = (
            copy.deepcopy,
            MHA(h, d),
            nn.Sequential(nn.Linear(d, 16), nn.ReLU(), nn.Dropout(p), nn.Linear(16, d)),
        )
        self.encoder, self.decoder = (
            clones(Layer(d, c(attn), None, c(ff), p, 2), N),
            clones(Layer(d, c(attn), c(attn), c(ff), p, 3), N),
        )
        self.enorm, self.dnorm = LayerNorm(d), LayerNorm(d)
        self.src_embed, self.tgt_embed = (
            nn.Sequential(nn.Embedding(V, d), PE(d, p)),
            nn.Sequential(nn.Embedding(V, d), PE(d, p)),
        )
        self.generator = nn.Linear(d, V)
        for q in self.parameters():
            if q.dim() > 1:
                nn.init.xavier_uniform_(q)

    def encode(self, src, mask):
        x = self.src_embed(src)
        for l in self.encoder:
            x = l(x, mask)
        return self.enorm(x)

    def decode(self, memory, src_mask, tgt, tgt_mask):
        x = self.tgt_embed(tgt)
        for l in self.decoder:
            x = l(x, tgt_mask, memory, src_mask)
        return self.dnorm(x)

    def forward(self, src, tgt, src_mask, tgt_mask):
        return self.decode(self.encode(src, src_mask), src_mask, tgt, tgt_mask)


def subsequent_mask(n):
    return torch.triu(torch.ones((1, n, n)), diagonal=1).type(torch.uint8) == 0


class LabelSmoothing(nn.Module):
    def __init__(self, size, pad, smoothing):
        super().__init__()
        self.criterion, self.pad, self.smoothing, self.size, self.true_dist = (
            nn.KLDivLoss(reduction="sum"),
            pad,
            smoothing,
            size,
            None,
        )

    def forward(self, x, target):
        true_dist = x.data.clone()
        true_dist.fill_(self.smoothing / (self.size - 2))
        true_dist.scatter_(1, target.data.unsqueeze(1), 1.0 - self.smoothing)
        true_dist[:, self.pad] = 0
        mask = torch.nonzero(target.data == self.pad)
        if mask.dim() > 0:
            true_dist.index_fill_(0, mask.squeeze(), 0.0)
        self.true_dist = true_dist
        return self.criterion(x, true_dist.clone().detach())


@dataclass
class TrainState:
    step: int = 0
    tokens: int = 0


V = 11
torch.manual_seed(0)
model = EncDec(V)
# farspan: model = farspan.distribute(model)
criterion = LabelSmoothing(V, 0, 0.1)
opt = torch.optim.Adam(model.parameters(), lr=0.5, betas=(0.9, 0.98), eps=1e-9)
sched = LambdaLR(opt, lambda step: 8**-0.5 * min(max(step, 1) ** -0.5, max(step, 1) * 4**-1.5))
state = TrainState()
for epoch in range(3):
    model.train()
    total = 0
    for i in range(2):
        data = torch.randint(1, V, (4, 6))
        data[:, 0] = 1
        src, tgt, tgt_y = data, data[:, :-1], data[:, 1:]
        out = model(src, tgt, (src != 0).unsqueeze(-2), (tgt != 0).unsqueeze(-2) & subsequent_mask(5))
        norm = (tgt_y != 0).data.sum()
        sloss = (
            criterion(torch.log_softmax(model.generator(out), -1).contiguous().view(-1, V), tgt_y.contiguous().view(-1))
            / norm
        )
        loss, loss_node = sloss.data * norm, sloss
        loss_node.backward()
        state.step, state.tokens = state.step + 1, state.tokens + int(norm)
        if i % 2 == 1:
            opt.step()
            opt.zero_grad(set_to_none=True)
        sched.step()
        total += loss
        del loss
        del loss_node
    print(epoch, (total / state.tokens).item(), state, opt.param_groups[0]["lr"])
model.eval()
src, mask = torch.arange(1, 7).unsqueeze(0), torch.ones(1, 1, 6)
memory, ys = model.encode(src, mask), torch.zeros(1, 1).fill_(1).type_as(src.data)
for i in range(5):
    out = model.decode(memory, mask, ys, subsequent_mask(ys.size(1)).type_as(src.data))
    _, nxt = torch.max(torch.log_softmax(model.generator(out[:, -1]), -1), dim=1)
    ys = torch.cat([ys, torch.zeros(1, 1).type_as(src.data).fill_(nxt.data[0])], dim=1)
print(ys.tolist(), model.decoder[0].self_attn.attn.shape, model.decoder[0].self_attn.attn.sum().item())
