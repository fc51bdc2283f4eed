"""Asynchronous data parallelism: workers push gradients to a server and pull its parameters; nobody waits for others.

    farspan run --role worker=4 --role server=1 examples/gradient_server.py

A worker's gradient may be of parameters that are some updates old. The server then trains the same model again with as
many gradients, synchronously: the mean of one from each worker for each step. Both losses are printed side by side.
A worker may be killed, or come later: the server goes on with the gradients that it gets.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import farspan

BATCH_SIZE = 32
LEARNING_RATE = 0.02


def make_model(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))


def batches(worker: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields batches of a worker's own, labelled by a network that the model is to find."""
    teacher, generator = make_model(seed=0), torch.Generator().manual_seed(worker)
    while True:
        inputs = torch.randn(BATCH_SIZE, 16, generator=generator)
        yield inputs, teacher(inputs).argmax(dim=1)


class GradientServer:
    """The parameters and their optimizer; each push is an update."""

    def __init__(self, num_updates: int, every: int) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE, momentum=0.9)
        self.num_updates, self.every = num_updates, every
        self.num_done, self.total_age = 0, 0
        self.losses: list[float] = []
        self.is_over = threading.Event()
        self.held_out = [next(batches(10_000 + number)) for number in range(16)]

    def pull(self) -> tuple[int, list[Tensor]]:
        return self.num_done, [parameter.detach() for parameter in self.model.parameters()]

    def push(self, pulled_at: int, gradients: list[Tensor]) -> bool:
        """Makes an update; returns whether more are wanted."""
        if not self.is_over.is_set():
            self.total_age += self.num_done - pulled_at
            self.step(gradients)
        return not self.is_over.is_set()

    def step(self, gradients: list[Tensor], weight: int = 1) -> None:
        """Makes the update of a gradient that is the mean of `weight` gradients."""
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.num_done += weight
        if self.num_done % self.every == 0:
            with torch.no_grad():
                losses = [F.cross_entropy(self.model(inputs), labels) for inputs, labels in self.held_out]
            self.losses.append(torch.stack(losses).mean().item())
        if self.num_done >= self.num_updates:
            self.is_over.set()


def work() -> None:
    server, model, wants_more = farspan.service("gradients"), make_model(), True
    data = batches(1 + farspan.rank())
    while wants_more:
        pulled_at, values = server.pull()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.copy_(value)
        inputs, labels = next(data)
        gradients = torch.autograd.grad(F.cross_entropy(model(inputs), labels), list(model.parameters()))
        wants_more = server.push(pulled_at, list(gradients))


def train_synchronously(num_workers: int, num_updates: int, every: int) -> list[float]:
    """Returns the losses of the plain loop with the mean of a gradient of each worker in each step."""
    server = GradientServer(num_updates, every)
    for group in server.optimizer.param_groups:
        group["lr"] *= num_workers  # as much for each gradient
        group["momentum"] = 0.9**num_workers
    data = [batches(1 + worker) for worker in range(num_workers)]
    while not server.is_over.is_set():
        inputs, labels = map(torch.cat, zip(*map(next, data), strict=True))
        loss = F.cross_entropy(server.model(inputs), labels)
        server.step(list(torch.autograd.grad(loss, list(server.model.parameters()))), weight=num_workers)
    return server.losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=2000, help="gradients in all")
    parser.add_argument("--workers", type=int, default=4, help="those of the synchronous training")
    args = parser.parse_args()
    if farspan.role() == "worker":
        work()
        return
    every = args.updates // 10 // args.workers * args.workers
    server = GradientServer(args.updates, every)
    farspan.expose("gradients", server, methods=["pull", "push"])
    if not server.is_over.wait(timeout=600):
        raise SystemExit(f"{server.num_done} of {args.updates} gradients have come in ten minutes")
    plain = train_synchronously(args.workers, args.updates, every)
    print("gradients   asynchronous   synchronous    loss on held-out data")
    for number, pair in enumerate(zip(server.losses, plain, strict=True), 1):
        print(f"{number * every:9d}{pair[0]:15.4f}{pair[1]:14.4f}")
    print(f"mean age of a gradient: {server.total_age / server.num_done:.2f} updates")


if __name__ == "__main__":
    main()
