"""The shape of kimiyoung/transformer-xl: memory of the last segment, kept for each layer, given to the next segment."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class RelLayer(nn.Module):
    def __init__(self, d_model, n_head, dropout):
        super().__init__()
        self.n_head = n_head
        self.q_net = nn.Linear(d_model, d_model, bias=False)
        self.kv_net = nn.Linear(d_model, 2 * d_model, bias=False)
        self.o_net = nn.Linear(d_model, d_model, bias=False)
        self.layer_norm = nn.LayerNorm(d_model)
        self.drop = nn.Dropout(dropout)
        self.ff = nn.Sequential(
            nn.Linear(d_model, 2 * d_model), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Linear(2 * d_model, d_model)
        )

    def forward(self, w, mem):
        b, q_len, d = w.shape
        cat = w if mem is None else torch.cat([mem, w], 1)
        k_len = cat.shape[1]
        q = self.q_net(w).view(b, q_len, self.n_head, -1).transpose(1, 2)
        k, v = (t.view(b, k_len, self.n_head, -1).transpose(1, 2) for t in self.kv_net(cat).chunk(2, -1))
        distance = torch.arange(q_len)[:, None] + (k_len - q_len) - torch.arange(k_len)[None]
        score = q @ k.transpose(-1, -2) / (d // self.n_head) ** 0.5 - 0.1 * distance.clamp(min=0)
        score = score.masked_fill(distance < 0, float("-inf"))
        attn = self.drop(F.softmax(score, -1)) @ v
        w = self.layer_norm(w + self.drop(self.o_net(attn.transpose(1, 2).reshape(b, q_len, d))))
        return w + self.ff(w)


class MemTransformerLM(nn.Module):
    def __init__(self, n_token, n_layer=3, d_model=20, n_head=2, mem_len=8, dropout=0.1):
        super().__init__()
        self.word_emb = nn.Embedding(n_token, d_model)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList([RelLayer(d_model, n_head, dropout) for _ in range(n_layer)])
        self.out = nn.Linear(d_model, n_token)
        self.out.weight = self.word_emb.weight
        self.mem_len = mem_len

    def init_mems(self):
        return [None] * len(self.layers)

    def _update_mems(self, hids, mems):
        with torch.no_grad():
            new = []
            for hid, mem in zip(hids, mems):
                cat = hid if mem is None else torch.cat([mem, hid], 1)
                new.append(cat[:, -self.mem_len :].detach())
        return new

    def forward(self, data, target, *mems):
        mems = list(mems) or self.init_mems()
        core = self.drop(self.word_emb(data))
        hids = []
        for layer, mem in zip(self.layers, mems):
            hids.append(core)
            core = layer(core, mem)
        loss = F.cross_entropy(self.out(self.drop(core)).transpose(1, 2), target, reduction="none")
        return [loss, *self._update_mems(hids, mems)]


torch.manual_seed(1111)
tokens = (torch.arange(4 * 73).view(4, 73) * 5 + torch.randint(0, 2, (4, 73))) % 30
model = MemTransformerLM(30)
# farspan: model = farspan.distribute(model)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 18, eta_min=0)
train_step, train_loss = 0, 0.0
for epoch in range(2):
    mems = ()
    for i in range(0, 72, 8):
        data, target = tokens[:, i : i + 8], tokens[:, i + 1 : i + 9]
        model.zero_grad()
        ret = model(data, target, *mems)
        loss, mems = ret[0], ret[1:]
        loss = loss.float().mean().type_as(loss)
        loss.backward()
        train_loss += loss.float().item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        train_step += 1
        scheduler.step()
        if train_step % 6 == 0:
            print(
                f"| epoch {epoch} step {train_step} | lr {scheduler.get_last_lr()[0]:.3g} | loss {train_loss / 6:.7f}"
            )
            train_loss = 0.0
model.eval()
with torch.no_grad():
    ret = model(tokens[:, :12], tokens[:, 1:13], *mems)
print("memory", [tuple(m.shape) for m in ret[1:]], "eval", ret[0].mean().item())
with open("model.pt", "wb") as f:
    torch.save(model.state_dict(), f)
with open("optimizer.pt", "wb") as f:
    torch.save(optimizer.state_dict(), f)
