"""Trains a byte-level GPT on the source of Python's standard library, then lets it write some Python."""

from __future__ import annotations

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus import load_corpus, sample_windows
from gpt import GPT, NUM_BYTES
from progress import Progress, save_losses


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    training, held_out = load_corpus(args.corpus_bytes)

    model = GPT(width=args.width, num_heads=args.heads, num_blocks=args.blocks, context=args.context)
    optimizer = torch.optim.AdamW(parameter_groups(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: cosine(step, args.warmup, args.steps))
    tokens_per_step = args.micro_batches * args.batch * args.context
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(training):,} bytes to learn from")

    progress = Progress(args.steps, tokens_per_step, args.print_every)
    history: list[float] = []
    for step in range(1, args.stop_after + 1):
        optimizer.zero_grad()
        losses: list[Tensor] = []
        for _ in range(args.micro_batches):
            x, y = sample_windows(training, args.batch, args.context, generator)
            loss = loss_of(model, x, y) / args.micro_batches
            loss.backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        schedule.step()
        history.append(sum(loss.item() for loss in losses))
        progress.show(step, history[-1], float(schedule.get_last_lr()[0]))
        if args.evaluate_every and step % args.evaluate_every == 0:
            print(f"held-out loss {evaluate(model, held_out, args):.4f} nats per byte", flush=True)

    if args.losses:
        save_losses(args.losses, history)
    if args.sample_bytes:
        prompt = held_out[-args.context :]
        text = sample(model, prompt, args.sample_bytes, args.temperature)
        print(f"--- it has read: ...\n{as_text(prompt)}\n--- and goes on:\n{as_text(text)}\n---")


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean cross entropy of the next byte, in nats; `x` and `y` are [batch, sequence]."""
    return F.cross_entropy(model(x).view(-1, NUM_BYTES), y.reshape(-1))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Decays matrices only, not norms and biases."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def cosine(step: int, warmup: int, num_steps: int) -> float:
    """The factor on the learning rate: a linear warm-up, then half a cosine down to a tenth."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, args: argparse.Namespace) -> float:
    """The loss on a fixed draw from `text`, in one batch four times as large as those of training."""
    model.eval()
    x, y = sample_windows(text, 4 * args.batch, args.context, torch.Generator().manual_seed(0))
    loss = loss_of(model, x, y).item()
    model.train()
    return loss


@torch.no_grad()
def sample(model: nn.Module, prompt: Tensor, num_bytes: int, temperature: float) -> Tensor:
    """Goes on after `prompt`, one byte at a time; the model sees a window as long as the prompt."""
    model.eval()
    text = prompt
    for _ in range(num_bytes):
        logits = model(text[-len(prompt) :].unsqueeze(0))[0, -1]
        byte = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1).item()
        text = torch.cat([text, torch.tensor([byte])])
    model.train()
    return text[len(prompt) :]


def as_text(text: Tensor) -> str:
    return bytes(text.tolist()).decode("utf-8", errors="replace")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=140, help="length of the schedule")
    parser.add_argument("--stop-after", type=int, help="stop after this many steps of the same schedule")
    parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches per step")
    parser.add_argument("--batch", type=int, default=4, help="sequences per micro-batch")
    parser.add_argument("--context", type=int, default=64, help="bytes per sequence")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--warmup", type=int, default=10, help="steps of warm-up")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients")
    parser.add_argument("--evaluate-every", type=int, default=70, help="in steps; 0: never")
    parser.add_argument("--print-every", type=int, default=10, help="in steps")
    parser.add_argument("--sample-bytes", type=int, default=200, help="bytes to write at the end; 0: none")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--corpus-bytes", type=int, default=8_000_000, help="most bytes to read")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads of this process")
    parser.add_argument("--losses", metavar="FILE", help="write the loss of every step as JSON, to the last bit")
    args = parser.parse_args()
    args.stop_after = min(args.steps, args.stop_after or args.steps)
    return args


if __name__ == "__main__":
    main()
