"""A neural Turing machine: memory and read vectors as module state reset for each batch, controller, circular shifts, copy task."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Memory(nn.Module):
    def __init__(self, N, M):
        super().__init__()
        self.N, self.M = N, M
        self.register_buffer("mem_bias", torch.Tensor(N, M).uniform_(-0.3, 0.3))

    def reset(self, b):
        self.batch_size = b
        self.memory = self.mem_bias.clone().repeat(b, 1, 1)

    def read(self, w):
        return torch.matmul(w.unsqueeze(1), self.memory).squeeze(1)

    def write(self, w, e, a):
        self.prev_mem = self.memory
        erase, add = torch.matmul(w.unsqueeze(-1), e.unsqueeze(1)), torch.matmul(w.unsqueeze(-1), a.unsqueeze(1))
        self.memory = self.prev_mem * (1 - erase) + add

    def address(self, k, beta, g, s, gamma, w_prev):
        k = k.view(self.batch_size, 1, -1)
        wc = F.softmax(beta * F.cosine_similarity(self.memory + 1e-16, k + 1e-16, dim=-1), dim=1)
        wg = g * wc + (1 - g) * w_prev
        result = torch.zeros(wg.size())
        for b in range(self.batch_size):
            t = torch.cat([wg[b][-1:], wg[b], wg[b][:1]])
            result[b] = F.conv1d(t.view(1, 1, -1), s[b].view(1, 1, -1)).view(-1)
        w = result**gamma
        return w / (w.sum(1, keepdim=True) + 1e-16)


class NTM(nn.Module):
    def __init__(self, i, o, c, N, M):
        super().__init__()
        self.controller, self.memory = nn.LSTMCell(i + M, c), Memory(N, M)
        self.read_head, self.write_head, self.out = nn.Linear(c, M + 6), nn.Linear(c, 3 * M + 6), nn.Linear(c + M, o)
        self.h0, self.c0, self.r0 = (
            nn.Parameter(torch.randn(1, c) * 0.05),
            nn.Parameter(torch.randn(1, c) * 0.05),
            torch.randn(1, M) * 0.01,
        )
        self.sizes = (N, M)

    def init_sequence(self, b):
        self.memory.reset(b)
        self.state = [self.h0.repeat(b, 1), self.c0.repeat(b, 1)]
        self.prev_read, self.w = self.r0.repeat(b, 1), [torch.zeros(b, self.sizes[0]) for _ in range(2)]

    def split(self, v, sizes):
        return torch.split(v, sizes, dim=1)

    def forward(self, x=None, b=None):
        if x is None:
            x = torch.zeros(self.memory.batch_size, 4)
        h, c = self.controller(torch.cat([x, self.prev_read], 1), tuple(self.state))
        M = self.sizes[1]
        for i, head in enumerate([self.read_head, self.write_head]):
            parts = self.split(head(h), [M, 1, 1, 3, 1] + ([M, M] if i else []))
            w = self.memory.address(
                parts[0],
                F.softplus(parts[1]),
                torch.sigmoid(parts[2]),
                F.softmax(parts[3], 1),
                1 + F.softplus(parts[4]),
                self.w[i],
            )
            self.w[i] = w
            if i:
                self.memory.write(w, torch.sigmoid(parts[5]), parts[6])
            else:
                self.prev_read = self.memory.read(w)
        self.state = [h, c]
        return torch.sigmoid(self.out(torch.cat([h, self.prev_read], 1)))


torch.manual_seed(10)
net = NTM(4, 3, 12, 6, 5)
# farspan: net = farspan.distribute(net)
opt = torch.optim.RMSprop(net.parameters(), momentum=0.9, alpha=0.95, lr=1e-3)
for it in range(4):
    T = 2 + it % 2
    seq = torch.bernoulli(torch.full((T, 3, 3), 0.5))
    inp = torch.zeros(T + 1, 3, 4)
    inp[:T, :, :3] = seq
    inp[T, :, 3] = 1.0
    opt.zero_grad()
    net.init_sequence(3)
    for t in range(T + 1):
        net(inp[t])
    y_out = torch.zeros(seq.size())
    for t in range(T):
        y_out[t] = net()
    loss = F.binary_cross_entropy(y_out, seq)
    loss.backward()
    nn.utils.clip_grad_value_(net.parameters(), 10)
    opt.step()
    binar = y_out.clone().data
    binar.apply_(lambda x: 0 if x < 0.5 else 1)
    print(it, loss.item(), torch.sum(torch.abs(binar - seq.data)).item() / 3, net.memory.memory.abs().sum().item())
