"""VQ-VAE with an EMA codebook: cluster sizes and sums in buffers written in the forward, straight-through, perplexity."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class VectorQuantizerEMA(nn.Module):
    def __init__(self, n, d, cost=0.25, decay=0.9):
        super().__init__()
        self.n, self.d, self.cost, self.decay = n, d, cost, decay
        self.embedding = nn.Embedding(n, d)
        self.embedding.weight.data.normal_()
        self.register_buffer("_ema_cluster_size", torch.zeros(n))
        self._ema_w = nn.Parameter(torch.Tensor(n, d))
        self._ema_w.data.normal_()

    def forward(self, inputs):
        inputs = inputs.permute(0, 2, 3, 1).contiguous()
        flat = inputs.view(-1, self.d)
        dist = (flat**2).sum(1, keepdim=True) + (self.embedding.weight**2).sum(1) - 2 * flat @ self.embedding.weight.t()
        idx = torch.argmin(dist, dim=1).unsqueeze(1)
        enc = torch.zeros(idx.shape[0], self.n)
        enc.scatter_(1, idx, 1)
        quantized = torch.matmul(enc, self.embedding.weight).view(inputs.shape)
        if self.training:
            self._ema_cluster_size = self._ema_cluster_size * self.decay + (1 - self.decay) * torch.sum(enc, 0)
            n = torch.sum(self._ema_cluster_size.data)
            self._ema_cluster_size = (self._ema_cluster_size + 1e-5) / (n + self.n * 1e-5) * n
            dw = torch.matmul(enc.t(), flat)
            self._ema_w = nn.Parameter(self._ema_w * self.decay + (1 - self.decay) * dw)
            self.embedding.weight = nn.Parameter(self._ema_w / self._ema_cluster_size.unsqueeze(1))
        loss = self.cost * F.mse_loss(quantized.detach(), inputs)
        quantized = inputs + (quantized - inputs).detach()
        probs = torch.mean(enc, dim=0)
        return (
            loss,
            quantized.permute(0, 3, 1, 2).contiguous(),
            torch.exp(-torch.sum(probs * torch.log(probs + 1e-10))),
            enc,
        )


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self._encoder = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self._pre = nn.Conv2d(8, 4, 1)
        self._vq = VectorQuantizerEMA(8, 4)
        self._decoder = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1))

    def forward(self, x):
        loss, q, perplexity, _ = self._vq(self._pre(self._encoder(x)))
        return loss, self._decoder(q), perplexity


torch.manual_seed(11)
model = Model()
# farspan: model = farspan.distribute(model)
opt = torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=False)
data = torch.rand(40, 1, 8, 8)
var = data.var()
model.train()
rec_hist, perp_hist = [], []
for i in range(6):
    x = data[torch.randint(40, (8,))]
    opt.zero_grad()
    vq_loss, rec, perp = model(x)
    rec_err = F.mse_loss(rec, x) / var
    (rec_err + vq_loss).backward()
    opt.step()
    rec_hist.append(rec_err.item())
    perp_hist.append(perp.item())
    print("%d recon_error: %.9f perplexity: %.9f" % (i + 1, sum(rec_hist[-100:]) / len(rec_hist), perp_hist[-1]))
model.eval()
with torch.no_grad():
    _, rec, perp = model(data[:4])
print(rec.sum().item(), perp.item())
torch.save(model.state_dict(), "vqvae.pt")
