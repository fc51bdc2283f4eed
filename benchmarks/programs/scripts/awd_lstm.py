"""salesforce awd-lstm-lm: weight drop by raw parameters, locked dropout, tied weights, switch to ASGD, its ax averages."""

import math

import torch
import torch.nn as nn


class LockedDropout(nn.Module):
    def forward(self, x, dropout=0.5):
        if not self.training or not dropout:
            return x
        m = x.data.new(1, x.size(1), x.size(2)).bernoulli_(1 - dropout)
        return m.div_(1 - dropout).expand_as(x) * x


class WeightDropRNN(nn.Module):
    def __init__(self, i, h, p):
        super().__init__()
        self.i2h, self.p, self.h = nn.Linear(i, h), p, h
        self.weight_hh_raw = nn.Parameter(torch.randn(h, h) * 0.1)

    def forward(self, x, hidden):
        w = nn.functional.dropout(self.weight_hh_raw, p=self.p, training=self.training)
        outs = []
        for t in range(x.size(0)):
            hidden = torch.tanh(self.i2h(x[t]) + hidden @ w)
            outs.append(hidden)
        return torch.stack(outs), hidden


def embedded_dropout(embed, words, dropout=0.1):
    if dropout:
        mask = embed.weight.data.new().resize_((embed.weight.size(0), 1)).bernoulli_(1 - dropout).expand_as(
            embed.weight
        ) / (1 - dropout)
        w = mask * embed.weight
    else:
        w = embed.weight
    return nn.functional.embedding(words, w)


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid):
        super().__init__()
        self.lockdrop, self.encoder = LockedDropout(), nn.Embedding(ntoken, ninp)
        self.rnns = nn.ModuleList(
            [WeightDropRNN(ninp if l == 0 else nhid, nhid if l < 1 else ninp, 0.3) for l in range(2)]
        )
        self.decoder = nn.Linear(ninp, ntoken)
        self.decoder.weight = self.encoder.weight
        self.encoder.weight.data.uniform_(-0.1, 0.1)
        self.decoder.bias.data.fill_(0)

    def forward(self, inp, hidden, return_h=False):
        emb = self.lockdrop(embedded_dropout(self.encoder, inp, 0.1 if self.training else 0), 0.2)
        raw, new_hidden, raws, outs = emb, [], [], []
        for l, rnn in enumerate(self.rnns):
            raw, h = rnn(raw, hidden[l])
            new_hidden.append(h)
            raws.append(raw)
            if l != 1:
                raw = self.lockdrop(raw, 0.2)
                outs.append(raw)
        out = self.lockdrop(raw, 0.3)
        outs.append(out)
        result = out.view(out.size(0) * out.size(1), out.size(2))
        return (result, new_hidden, raws, outs) if return_h else (result, new_hidden)

    def init_hidden(self, bsz):
        weight = next(self.parameters()).data
        return [weight.new(bsz, r.h).zero_() for r in self.rnns]


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


torch.manual_seed(141)
data = torch.randint(20, (40, 4))
model = RNNModel(20, 8, 12)
# farspan: model = farspan.distribute(model)
params = list(model.parameters())
optimizer = torch.optim.SGD(params, lr=1.0, weight_decay=1.2e-6)
best_val, stored = [], 1e9
for epoch in range(1, 5):
    model.train()
    hidden, i, total = model.init_hidden(4), 0, 0
    while i < 30:
        seq = 5 + int(torch.randint(3, (1,)))
        lr2 = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = lr2 * seq / 6
        x, y = data[i : i + seq], data[i + 1 : i + 1 + seq].reshape(-1)
        hidden = repackage_hidden(hidden)
        optimizer.zero_grad()
        output, hidden, rnn_hs, dropped = model(x, hidden, return_h=True)
        raw_loss = nn.functional.cross_entropy(
            nn.functional.linear(output, model.decoder.weight, model.decoder.bias), y
        )
        loss = raw_loss + sum(2 * d.pow(2).mean() for d in dropped[-1:])
        loss = loss + sum((h[1:] - h[:-1]).pow(2).mean() for h in rnn_hs[-1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 0.25)
        optimizer.step()
        total += raw_loss.data
        optimizer.param_groups[0]["lr"] = lr2
        i += seq
    if "t0" in optimizer.param_groups[0]:
        tmp = {}
        for prm in model.parameters():
            tmp[prm] = prm.data.clone()
            prm.data = optimizer.state[prm]["ax"].clone()
    model.eval()
    with torch.no_grad():
        out, _ = model(data[:-1], model.init_hidden(4))
        val = nn.functional.cross_entropy(model.decoder(out), data[1:].reshape(-1)).item()
    if "t0" in optimizer.param_groups[0]:
        for prm in model.parameters():
            prm.data = tmp[prm].clone()
    elif epoch >= 2:
        print("Switching to ASGD")
        optimizer = torch.optim.ASGD(model.parameters(), lr=0.5, t0=0, lambd=0.0, weight_decay=1.2e-6)
    print(epoch, total.item(), val, math.exp(val))
