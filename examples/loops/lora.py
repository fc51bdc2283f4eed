"""LoRA: a frozen base whose linear layers get small trained additions, which are saved alone and merged at the end."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parts.log import Log
from parts.text import characters

WIDTH, NUM_HEADS, NUM_BLOCKS, CONTEXT, BATCH_SIZE, VOCABULARY = 32, 4, 3, 24, 8, 128
PRETRAINING_STEPS, STEPS, RANK, ALPHA = 4, 10, 4, 8.0


class LoRALinear(nn.Module):
    """A linear layer that stays as it is, and an addition of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.empty(RANK, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, RANK))
        self.scaling = ALPHA / RANK
        self.merged = False
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return self.base(x)
        return self.base(x) + (x @ self.lora_a.T @ self.lora_b.T) * self.scaling

    @torch.no_grad()
    def merge(self) -> None:
        self.base.weight += self.lora_b @ self.lora_a * self.scaling
        self.merged = True


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.project = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def add_lora(module: nn.Module, names: tuple[str, ...]) -> None:
    """Freezes `module`, and replaces the linear layers of these names."""
    module.requires_grad_(False)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if name in names and isinstance(child, nn.Linear):
                setattr(parent, name, LoRALinear(child))


def lora_state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in module.state_dict().items() if "lora_" in name}


def loss_of(module: nn.Module, text: Tensor) -> Tensor:
    starts = torch.randint(len(text) - CONTEXT, (BATCH_SIZE, 1))
    windows = text[starts + torch.arange(CONTEXT + 1)]
    return F.cross_entropy(module(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


torch.manual_seed(0)
text = characters()
old, new = text[: len(text) // 2], text[len(text) // 2 :]
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(PRETRAINING_STEPS):
    optimizer.zero_grad()
    loss_of(model, old).backward()
    optimizer.step()
add_lora(model, ("query", "value", "up"))
# farspan: model = farspan.distribute(model)
trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=1e-2)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=STEPS)
print(f"{sum(p.numel() for p in trainable)} of {sum(p.numel() for p in model.parameters())} parameters are trained")

log = Log()
for step in range(STEPS):
    optimizer.zero_grad()
    losses = [loss_of(model, new) / 2 for _ in range(2)]
    for loss in losses:
        loss.backward()
    torch.nn.utils.clip_grad_norm_(trainable, 1.0)
    optimizer.step()
    scheduler.step()
    log.show(f"step {step}", loss=sum(loss.item() for loss in losses), lr=float(scheduler.get_last_lr()[0]))

adapter = lora_state(model)
print(len(adapter), "tensors in the adapter")
model.eval()
with torch.no_grad():
    window = new[:CONTEXT].unsqueeze(0)
    before = model(window)
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.merge()
    after = model(window)
    log.show("merged", mean=after.mean().item(), difference=(after - before).abs().max().item())
missing = model.load_state_dict(adapter, strict=False).missing_keys
print(len(missing), "tensors are not in the adapter")
log.finish(model)
