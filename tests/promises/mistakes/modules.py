"""Wrong modules: what their forward raises on fakes already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from tests.promises.mistakes.caught import Net, run_all, train
from torch import Tensor, nn


class Layer(nn.Module):
    """A layer with something to learn; wrong ones differ in their forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)


class Width(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, :4])  # here: width, in bad (Width)


class View(Layer):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(5, -1, 4)  # here: view, in bad (View)
        return self.linear(heads)


class Dtype(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.long())  # here: dtype, in bad (Dtype)


class Name(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.liner(x)  # type: ignore[operator] # here: name, in bad (Name)


class Index(Layer):
    def forward(self, x: Tensor) -> Tensor:
        parts = [self.linear(x)]
        return parts[1]  # here: index, in bad (Index)


class Key(Layer):
    def forward(self, x: Tensor) -> Tensor:
        scales: dict[str, float] = {"one": 1.0}
        return self.linear(x) * scales["two"]  # here: key, in bad (Key)


class OwnError(Exception):
    """One with an `__init__` of its own."""

    def __init__(self, layer: str, width: int) -> None:
        super().__init__(f"{layer} is {width} wide")
        self.width = width


class Own(Layer):
    def forward(self, x: Tensor) -> Tensor:
        raise OwnError("bad", x.shape[1])  # here: own, in bad (Own)


class Asserts(Layer):
    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == 16, "sixteen features"  # here: asserts, in bad (Asserts)
        return self.linear(x)


class Arguments(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x), 1, 2, 3)  # type: ignore[call-arg] # here: arguments, in bad (Arguments)


class Device(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.zeros(8, device="meta")  # here: device, in bad (Device)


class Helper(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.scaled(x))

    def scaled(self, x: Tensor) -> Tensor:
        return x @ torch.ones(3, 3)  # here: helper, in bad (Helper)


class Generated(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.cat(list(self.parts(x)), -1))

    def parts(self, x: Tensor) -> Iterator[Tensor]:
        yield x[:, :4]
        yield x[:, 4:].reshape(7, 4)  # here: generated, in bad (Generated)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bad, self.good = Width(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.good(self.bad(x))


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Sequential(nn.Linear(8, 8), View())

    def forward(self, x: Tensor) -> Tensor:
        return self.steps(x)


class Block(nn.Module):
    """Of a transformer, as in every tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(1, 6, 3, 2, 4).unbind(2)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k, v.transpose(1, 2))  # here: block, in bad (Block)
        return x + self.out(mixed.transpose(1, 2).reshape(6, 8))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.reshape(-1, 5)  # here: function, in bad (Applies)


class Applies(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(Doubled.apply(x))  # type: ignore[no-any-return]


class Checkpointed(Layer):
    def forward(self, x: Tensor) -> Tensor:
        import torch.utils.checkpoint as checkpoint

        return checkpoint.checkpoint(self.inside, x, use_reentrant=False)

    def inside(self, x: Tensor) -> Tensor:
        return self.linear(x.T)  # here: checkpointed, in bad (Checkpointed)


class Chained(Layer):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.linear(x.T)
        except RuntimeError as error:
            raise ValueError("not of this width") from error  # here: chained, in bad (Chained)


class Container(nn.Module):
    """What its parts give is wrong between them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        narrow = self.one(x)
        return self.two(narrow) + x  # here: container


class Glue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        narrow = self.one(x) + x  # here: glue
        return self.two(narrow)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x)
        return self.two(hidden.relu_me())  # type: ignore[operator] # here: broken


WRONG: dict[str, type[nn.Module]] = {
    "width": Width, "view": View, "dtype": Dtype, "name": Name, "index": Index, "key": Key, "own": Own,
    "asserts": Asserts, "arguments": Arguments, "device": Device, "helper": Helper, "generated": Generated,
    "block": Block, "function": Applies, "checkpointed": Checkpointed, "chained": Chained,
}  # fmt: skip
IN_PARTS: dict[str, type[nn.Module]] = {"container": Container, "glue": Glue, "broken": Broken}
PLACES = {"one": 0, "two": 1}

run_all(
    {
        **{name: lambda kind=kind: train(Net(kind())) for name, kind in WRONG.items()},
        "width, where it is first": lambda: train(Net(Width(), is_first=True)),
        "width, inside": lambda: train(Net(Inner())),
        "view, in a sequence": lambda: train(Net(Deep())),
        **{name: lambda kind=kind: train(kind(), plan=PLACES) for name, kind in IN_PARTS.items()},
    }
)
