"""Trains a small model in an accumulation loop, plainly or with farspan, and saves its losses and its weights.

python train.py --device cuda:0 --save plain.pt            the program that the others are compared with
farspan run -n 2 train.py --plan '{"": ...}' --save far.pt
"""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn


class Mlp(nn.Module):
    def __init__(self, width: int = 16, depth: int = 4, *, has_norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width) if has_norm else nn.Identity()
        self.register_buffer("scale", torch.full((width,), 1.25))
        self.head = nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(self.norm(x) * self.scale)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (each.view(batch, length, self.heads, -1).transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Gpt(nn.Module):
    """A GPT whose head is tied to its embedding."""

    def __init__(self, vocab: int = 31, width: int = 16, heads: int = 2, depth: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batches(kind: str, steps: int, micro_batches: int):
    """Yields the micro-batches of each step, on the CPU."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        step = []
        for _ in range(micro_batches):
            if kind == "mlp":
                x = torch.randn(4, 16, generator=generator, device="cpu")
                y = torch.randint(8, (4,), generator=generator, device="cpu")
            else:
                ids = torch.randint(31, (2, 9), generator=generator, device="cpu")
                x, y = ids[:, :-1], ids[:, 1:]
            step.append((x, y))
        yield step


def reload(by: str, model: nn.Module, optimizer: torch.optim.Optimizer, path: str, farspan: Any) -> None:
    """Save all, spoil it, and load it again."""
    if by == "farspan" and farspan is not None:
        farspan.save(path, model=model, optimizer=optimizer, wait=True)
    else:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    if by == "farspan" and farspan is not None:
        farspan.load(path, model=model, optimizer=optimizer)
        return
    saved = torch.load(path, map_location="cpu")  # the emulation has no storages without a tensor
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=("mlp", "gpt"), default="mlp")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="adamw")
    parser.add_argument("--foreach", choices=("yes", "no", "default"), default="default")
    parser.add_argument("--autocast", choices=("bfloat16", "float16"))
    parser.add_argument("--clip", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--pinned", action="store_true")
    parser.add_argument("--set-device", action="store_true", help="each rank makes the device of its number current")
    parser.add_argument("--farspan", action="store_true")
    parser.add_argument("--plan", type=json.loads, default=None, help="which module goes where")
    parser.add_argument("--more", type=json.loads, default={}, help="more arguments of distribute")
    parser.add_argument("--to", choices=("before", "after", "default"), default="before")
    parser.add_argument("--measure", choices=("yes", "no"), default="yes")
    parser.add_argument("--deferred", action="store_true", help="farspan's ranks build what they own alone")
    parser.add_argument("--from-rank", choices=("host", "device"), help="rank 0 alone reads the batches, to where")
    parser.add_argument("--reload", choices=("torch", "farspan"), help="what saves and loads all, after the first step")
    parser.add_argument("--evaluate", action="store_true", help="a forward without gradients after each step")
    parser.add_argument("--buffers", action="store_true", help="a BatchNorm between the layers of the MLP")
    parser.add_argument("--print", choices=("step", "never", "last"), default="step")
    parser.add_argument("--pretrained", help="a file of weights to begin with")
    parser.add_argument("--save")
    options = parser.parse_args()

    farspan: Any = None
    if options.farspan:
        import farspan
    # a CPU has a kernel for attention of its own, which rounds in another order
    torch.backends.cuda.enable_flash_sdp(False)
    torch.manual_seed(0)
    if options.set_device:
        torch.cuda.set_device(farspan.rank() % torch.cuda.device_count())
        options.device = f"cuda:{torch.cuda.current_device()}"

    def build() -> nn.Module:
        return Mlp(has_norm=options.buffers) if options.model == "mlp" else Gpt(dropout=options.dropout)

    if options.to == "default":
        torch.set_default_device(options.device)
    with farspan.deferred_init() if options.deferred and options.farspan else contextlib.nullcontext():
        model = build()
    if options.pretrained and options.farspan:
        farspan.load_pretrained(model, options.pretrained)
    elif options.pretrained:
        model.load_state_dict(load_file(options.pretrained))
    if options.to == "before" or (options.to == "after" and not options.farspan):
        model.to(options.device)
    if options.farspan:
        measure = {} if options.measure == "yes" else {"measure": False}
        model = farspan.distribute(model, plan=options.plan or "auto", **measure, **options.more)
        if options.to == "after":
            model.to(options.device)
    foreach = {"yes": True, "no": False, "default": None}[options.foreach]
    if options.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=foreach)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach)
    kind = torch.device(options.device).type
    dtype = getattr(torch, options.autocast) if options.autocast else torch.bfloat16
    scaler = torch.amp.GradScaler(kind, enabled=options.autocast == "float16")
    losses = []
    for step in batches(options.model, options.steps, options.micro_batches):
        optimizer.zero_grad()
        total = 0.0
        for x, y in step:
            if options.pinned:
                x, y = x.pin_memory(), y.pin_memory()
            if options.from_rank and options.farspan:
                if options.from_rank == "device":
                    x, y = x.to(options.device), y.to(options.device)
                x, y = farspan.from_rank(0, (x, y))
            x, y = x.to(options.device, non_blocking=options.pinned), y.to(options.device, non_blocking=options.pinned)
            with torch.autocast(kind, dtype=dtype, enabled=options.autocast is not None):
                out = model(x)
                loss = F.cross_entropy(out.flatten(0, -2).float(), y.flatten()) / len(step)
            scaler.scale(loss).backward()
            total = total + loss.detach()
        if options.clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(total) if options.print == "step" else total)
        if options.evaluate:
            model.eval()
            with torch.no_grad():
                losses.append(float(model(x).float().square().mean()))
            model.train()
        if options.reload and len(losses) == 1:
            reload(options.reload, model, optimizer, f"{options.save}.saved", farspan)
    losses = [float(loss) for loss in (losses[-1:] if options.print == "last" else losses)]
    print(losses)
    if options.save:
        state = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        torch.save({"losses": losses, "state": state}, options.save)


if __name__ == "__main__":
    main()
