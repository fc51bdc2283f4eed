"""lucidrains' way of training a character model: Lion, gradients accumulated, the validation loss every few steps."""

import torch
import torch.nn.functional as F
from lion_pytorch import Lion
from torch import nn

torch.manual_seed(3)
text = "the quick brown fox jumps over the lazy dog. pack my box with five dozen liquor jugs. " * 6
chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text])


class Attention(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(0.1))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.to_qkv(self.norm(x)).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        return self.to_out(out.transpose(1, 2).reshape(b, n, d))


class CharLM(nn.Module):
    def __init__(self, dim=24, depth=2):
        super().__init__()
        self.token_emb = nn.Embedding(len(chars), dim)
        self.pos_emb = nn.Embedding(32, dim)
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            ff = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            self.layers.append(nn.ModuleList([Attention(dim), ff]))
        self.to_logits = nn.Linear(dim, len(chars), bias=False)

    def forward(self, x, return_loss=False):
        if return_loss:
            x, target = x[:, :-1], x[:, 1:]
        h = self.token_emb(x) + self.pos_emb(torch.arange(x.shape[1]))
        for attn, ff in self.layers:
            h = h + attn(h)
            h = h + ff(h)
        logits = self.to_logits(h)
        return F.cross_entropy(logits.transpose(1, 2), target) if return_loss else logits


def batch(split):
    starts = torch.randint(*((0, 400) if split == "train" else (420, len(data) - 20)), (8,))
    return torch.stack([data[s : s + 17] for s in starts])


model = CharLM()
# farspan: model = farspan.distribute(model)
optim = Lion(model.parameters(), lr=3e-3, weight_decay=1e-2)
for step in range(10):
    model.train()
    for _ in range(2):
        loss = model(batch("train"), return_loss=True)
        (loss / 2).backward()
    print(f"training loss: {loss.item():.6f}")
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optim.step()
    optim.zero_grad()
    if step % 4 == 0:
        model.eval()
        with torch.no_grad():
            print(f"validation loss: {model(batch('val'), return_loss=True).item():.6f}")
model.eval()
prime = data[:6][None]
with torch.no_grad():
    for _ in range(8):
        probs = F.softmax(model(prime)[:, -1] / 0.8, dim=-1)
        prime = torch.cat([prime, torch.multinomial(probs, 1)], dim=1)
print("".join(chars[i] for i in prime[0].tolist()))
torch.save(model.state_dict(), "charlm.pt")
