"""Wrong loops: data, optimizers, what is read; and modules that are wrong for some data only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from tests.promises.mistakes.caught import Net, X, Y, distributed, run_all
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset


def trained(bad: nn.Module | None = None, *, num_good: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a distributed model that has had a step, and its optimizer."""
    net = distributed(Net(bad or nn.Linear(8, 8)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(num_good):
        nn.functional.cross_entropy(net(X), Y).backward()
        optimizer.step()
    return net, optimizer


class Checks(nn.Module):
    """Runs as it should until its data are large."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        result = self.linear(x)
        assert result.abs().max() < 1000.0, "too large"  # here: checks, in bad (Checks)
        return result


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, 0] * 100).long().abs()
        return x + self.table(rows)  # here: looks, in bad (Looks)


class Loops(nn.Module):
    """Its shapes come from its data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[x[:, 0] > 0]
        return self.linear(chosen).view(1, 1)  # here: loops, in bad (Loops)


def too_large() -> None:
    net, _ = trained(Checks())
    net(X * 1e6).sum().item()


def looked_up() -> None:
    net = distributed(Net(Looks()))
    net(X * 1e3).sum().item()


def looped() -> None:
    net = distributed(Net(Loops()))
    net(X).sum().item()


def wrong_target() -> None:
    net, optimizer = trained()
    loss = nn.functional.cross_entropy(net(X), Y + 5)  # here: target
    loss.backward()
    optimizer.step()


def wrong_loss() -> None:
    net, _ = trained()
    nn.functional.mse_loss(net(X), torch.zeros(6, 5))  # here: loss


def wrong_criterion() -> None:
    net, _ = trained()
    nn.CrossEntropyLoss()(net(X), Y[:4])  # here: criterion


def wrong_input() -> None:
    net, _ = trained()
    net(X[:, :3])  # here: input


def wrong_dtype() -> None:
    net, _ = trained()
    net(X.double()).sum().item()  # here: input dtype


def wrong_arguments() -> None:
    net, _ = trained()
    net(X, X)  # here: arguments


def wrong_result() -> None:
    net, _ = trained()
    net(X).loss.backward()  # here: result


class Rows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return X[index] if index < 4 else X[index + 100]  # here: dataset


class TensorRows(Dataset[Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return X[index]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield X[0]
        yield X[0] / {}["scale"]  # here: stream


def collate(rows: list[Tensor]) -> Tensor:
    return torch.stack([rows[0], rows[1][:3]])  # here: collate


def batches() -> Iterator[Tensor]:
    yield X
    raise OSError("disk is gone")  # here: generator


def over(data: Any) -> Callable[[], None]:
    def run() -> None:
        net, _ = trained()
        for batch in data:
            net(batch).sum().backward()

    return run


class Own(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data += torch.ones(77)  # here: own optimizer
        return None


def own_optimizer() -> None:
    net, _ = trained()
    nn.functional.cross_entropy(net(X), Y).backward()
    Own(net.parameters(), lr=0.1).step()


class Products(torch.optim.SGD):
    """Multiplies matrices, as Muon does, which do not fit; a rank that has not got them runs it on fakes only."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() == 2:
                    parameter.add_((parameter.grad[:, :4] @ parameter.grad) @ parameter)  # here: own product
        return None


def own_product() -> None:
    net, _ = trained()
    nn.functional.cross_entropy(net(X), Y).backward()
    Products(net.parameters(), lr=0.1).step()


def step_hook() -> None:
    net, optimizer = trained()

    def hook(*_: Any) -> None:
        raise LookupError("in a hook")  # here: step hook

    optimizer.register_step_pre_hook(hook)
    nn.functional.cross_entropy(net(X), Y).backward()
    optimizer.step()


def closure() -> None:
    net, _ = trained()

    def evaluate() -> Any:
        return nn.functional.cross_entropy(net(X), Y, reduction="some")  # here: closure

    torch.optim.LBFGS(net.parameters()).step(evaluate)


def scheduler() -> None:
    _, optimizer = trained()
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / epoch)  # here: scheduler


def read_item() -> None:
    net, _ = trained()
    net(X).item()  # here: item


def read_numpy() -> None:
    net, _ = trained()
    net(X).numpy()  # here: numpy


def read_bool() -> None:
    net, _ = trained()
    if net(X) > 0:  # here: bool
        pass


run_all(
    {
        "checks": too_large, "looks": looked_up, "loops": looped, "target": wrong_target, "loss": wrong_loss,
        "criterion": wrong_criterion, "input": wrong_input, "input dtype": wrong_dtype, "arguments": wrong_arguments,
        "result": wrong_result, "dataset": over(DataLoader(Rows(), batch_size=2)),
        "dataset, in a worker": over(DataLoader(Rows(), batch_size=2, num_workers=1, multiprocessing_context="fork")),
        "stream": over(DataLoader(Stream(), batch_size=1)), "generator": over(batches()),
        "collate": over(DataLoader(TensorRows(), batch_size=2, collate_fn=collate)), "own optimizer": own_optimizer,
        "own product": own_product,
        "step hook": step_hook, "closure": closure, "scheduler": scheduler, "item": read_item, "numpy": read_numpy,
        "bool": read_bool,
    }
)  # fmt: skip
