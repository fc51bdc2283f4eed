"""microsoft/LoRA's loralib in small: train() that merges and unmerges the weights, MergedLinear, only lora parameters marked and saved."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class LoRALayer:
    def __init__(self, r, alpha, dropout, merge):
        self.r, self.lora_alpha = r, alpha
        self.lora_dropout = nn.Dropout(p=dropout) if dropout > 0.0 else lambda x: x
        self.merged, self.merge_weights = False, merge


class Linear(nn.Linear, LoRALayer):
    def __init__(self, i, o, r=0, alpha=1, dropout=0.0, merge=True, **kw):
        nn.Linear.__init__(self, i, o, **kw)
        LoRALayer.__init__(self, r, alpha, dropout, merge)
        if r > 0:
            self.lora_A, self.lora_B = (
                nn.Parameter(self.weight.new_zeros((r, i))),
                nn.Parameter(self.weight.new_zeros((o, r))),
            )
            self.scaling = alpha / r
            self.weight.requires_grad = False
        self.reset_parameters()

    def reset_parameters(self):
        nn.Linear.reset_parameters(self)
        if hasattr(self, "lora_A"):
            nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
            nn.init.zeros_(self.lora_B)

    def train(self, mode=True):
        nn.Linear.train(self, mode)
        if mode:
            if self.merge_weights and self.merged:
                if self.r > 0:
                    self.weight.data -= (self.lora_B @ self.lora_A) * self.scaling
                self.merged = False
        elif self.merge_weights and not self.merged:
            if self.r > 0:
                self.weight.data += (self.lora_B @ self.lora_A) * self.scaling
            self.merged = True
        return self

    def forward(self, x):
        if self.r > 0 and not self.merged:
            result = F.linear(x, self.weight, bias=self.bias)
            result += (self.lora_dropout(x) @ self.lora_A.transpose(0, 1) @ self.lora_B.transpose(0, 1)) * self.scaling
            return result
        return F.linear(x, self.weight, bias=self.bias)


def mark_only_lora_as_trainable(model, bias="lora_only"):
    for n, p in model.named_parameters():
        if "lora_" not in n:
            p.requires_grad = False
    for m in model.modules():
        if isinstance(m, LoRALayer) and hasattr(m, "bias") and m.bias is not None:
            m.bias.requires_grad = True


def lora_state_dict(model):
    return {k: v for k, v in model.state_dict().items() if "lora_" in k}


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.k, self.v = Linear(d, d, r=2, dropout=0.1), nn.Linear(d, d), Linear(d, d, r=2, dropout=0.1)
        self.o = nn.Linear(d, d)

    def forward(self, x):
        a = torch.softmax(self.q(x) @ self.k(x).transpose(1, 2) / 3, -1)
        return x + self.o(a @ self.v(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.blocks, self.head = nn.Embedding(12, 8), nn.Sequential(Block(8), Block(8)), Linear(8, 12, r=1)

    def forward(self, x):
        return self.head(self.blocks(self.emb(x)))


torch.manual_seed(2)
model = Net()
mark_only_lora_as_trainable(model)
# farspan: model = farspan.distribute(model)
opt = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
print(sum(p.requires_grad for p in model.parameters()), len(list(model.parameters())))
for epoch in range(3):
    model.train()
    for _ in range(2):
        x = torch.randint(12, (4, 6))
        loss = F.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
    w_train = model.blocks[0].q.weight.detach().clone()
    model.eval()
    with torch.no_grad():
        val = F.cross_entropy(model(x).flatten(0, 1), x.roll(-1, 1).flatten())
    print(epoch, loss.item(), val.item(), (model.blocks[0].q.weight - w_train).abs().max().item())
torch.save(lora_state_dict(model), "lora.pt")
model.load_state_dict(torch.load("lora.pt"), strict=False)
torch.save(model.state_dict(), "merged.pt")
