"""A small GPT on characters: tied embedding, mixed precision, scaled gradients, accumulation, clipping, sampling."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parts.log import Log
from parts.text import characters

BLOCK_SIZE, BATCH_SIZE, N_LAYER, N_HEAD, N_EMBD, VOCAB_SIZE = 32, 4, 4, 4, 32, 128
MAX_ITERS, EVAL_INTERVAL, EVAL_ITERS, ACCUMULATION_STEPS = 12, 6, 2, 4
LEARNING_RATE, MIN_LR, WARMUP_ITERS, WEIGHT_DECAY, GRAD_CLIP = 3e-3, 3e-4, 3, 0.1, 1.0


class CausalSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(N_EMBD, 3 * N_EMBD, bias=False)
        self.c_proj = nn.Linear(N_EMBD, N_EMBD, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (part.view(b, t, N_HEAD, c // N_HEAD).transpose(1, 2) for part in self.c_attn(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(N_EMBD, bias=False)
        self.attn = CausalSelfAttention()
        self.ln_2 = nn.LayerNorm(N_EMBD, bias=False)
        self.mlp = nn.Sequential(nn.Linear(N_EMBD, 4 * N_EMBD), nn.GELU(), nn.Linear(4 * N_EMBD, N_EMBD))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB_SIZE, N_EMBD),
                "wpe": nn.Embedding(BLOCK_SIZE, N_EMBD),
                "h": nn.ModuleList([Block() for _ in range(N_LAYER)]),
                "ln_f": nn.LayerNorm(N_EMBD, bias=False),
            }
        )
        self.lm_head = nn.Linear(N_EMBD, VOCAB_SIZE, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(2 * N_LAYER))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer["wte"](idx) + self.transformer["wpe"](pos)
        for block in self.transformer["h"]:  # pyright: ignore[reportGeneralTypeIssues]
            x = block(x)
        x = self.transformer["ln_f"](x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, top_k: int = 10) -> Tensor:
        for _ in range(max_new_tokens):
            logits = self(idx[:, -BLOCK_SIZE:])[0][:, -1, :]
            values, _ = torch.topk(logits, top_k)
            logits[logits < values[:, [-1]]] = -float("inf")
            idx = torch.cat((idx, torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)), dim=1)
        return idx


def get_batch(data: Tensor) -> tuple[Tensor, Tensor]:
    ix = torch.randint(len(data) - BLOCK_SIZE, (BATCH_SIZE,))
    x = torch.stack([data[i : i + BLOCK_SIZE] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + BLOCK_SIZE] for i in ix])
    return x, y


def get_lr(it: int) -> float:
    if it < WARMUP_ITERS:
        return LEARNING_RATE * (it + 1) / (WARMUP_ITERS + 1)
    ratio = (it - WARMUP_ITERS) / (MAX_ITERS - WARMUP_ITERS)
    return MIN_LR + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (LEARNING_RATE - MIN_LR)


torch.manual_seed(1337)
ctx = torch.autocast("cpu", dtype=torch.bfloat16) if torch.amp.is_autocast_available("cpu") else nullcontext()
text = characters()
splits = {"train": text[: int(0.9 * len(text))], "val": text[int(0.9 * len(text)) :]}

model = GPT()
# farspan: model = farspan.distribute(model)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))


@torch.no_grad()
def estimate_loss() -> dict[str, float]:
    out = {}
    model.eval()
    for split, data in splits.items():
        losses = torch.zeros(EVAL_ITERS)
        for k in range(EVAL_ITERS):
            x, y = get_batch(data)
            with ctx:
                _, loss = model(x, y)
            losses[k] = loss.item()
        out[split] = losses.mean().item()
    model.train()
    return out


log = Log()
x, y = get_batch(splits["train"])
for iter_num in range(MAX_ITERS):
    lr = get_lr(iter_num)
    for group in optimizer.param_groups:
        group["lr"] = lr
    if iter_num % EVAL_INTERVAL == 0:
        log.show(f"step {iter_num}", **estimate_loss())
    lossf = 0.0
    for _ in range(ACCUMULATION_STEPS):
        with ctx:
            _, loss = model(x, y)
            loss = loss / ACCUMULATION_STEPS
        x, y = get_batch(splits["train"])
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    lossf = loss.item() * ACCUMULATION_STEPS
    log.show(f"iter {iter_num}", loss=lossf, norm=norm.item())
model.eval()
print(repr(bytes(model.generate(x[:1], 12)[0].tolist()).decode()))
log.finish(model)
