"""Hooks on recorded tensors and on modules: every rank calls them, with the gradients and in the order of one process.

Each program says everything that its hooks have seen, in one list, and what training has come to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.plainly import X, Y, assert_same_as_plainly, train
from torch import Tensor, nn


class Net(nn.Module):
    """Blocks with a way around them, and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(3)])
        self.norm = nn.LayerNorm(8)
        self.head, self.value = nn.Linear(8, 5), nn.Linear(8, 1)

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.norm(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        return self.head(x) + self.value(x)


class Cell(nn.Module):
    """A recurrent network: `hooked` is called with each of its states."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.cell, self.out = nn.Linear(8, 8), nn.Linear(16, 8), nn.Linear(8, 5)
        self.hooked: Callable[[Tensor], Any] = lambda state: None

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros_like(x)
        for number in range(4):
            state = torch.tanh(self.cell(torch.cat((self.into(x + number), state), 1)))
            if state.requires_grad:
                self.hooked(state)
        return self.out(state)


def gradients_of(model: Any) -> Any:
    return [None if p.grad is None else p.grad.tolist() for p in model.parameters()]


# Hooks on recorded tensors.


class GradCam:
    """As in pytorch-grad-cam: a forward hook that registers a hook on its output."""

    def __init__(self, layers: list[Any]) -> None:
        self.activations: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.handles = [
            layer.register_forward_hook(hook) for layer in layers for hook in (self.save, self.save_gradient)
        ]

    def save(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.activations.append(output.cpu().detach())

    def save_gradient(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: self.gradients.insert(0, gradient.cpu().detach()))

    def weighted(self) -> list[Any]:
        pairs = zip(self.activations, self.gradients, strict=True)
        return [(activation * gradient.mean(0)).sum(1).tolist() for activation, gradient in pairs]


def grad_cam(model: Any) -> Any:
    cam = GradCam([model.blocks[1], model.norm])
    out = model(X)
    model.zero_grad()
    out[0, out[0].argmax().item()].backward(retain_graph=True)
    first, seen = cam.weighted(), [item.numpy().tolist() for item in cam.gradients]
    for handle in cam.handles:
        handle.remove()
    cam.gradients.clear()
    return first, seen, train(model), cam.gradients


def in_the_order_of_autograd(model: Any) -> Any:
    """Hooks on values, parameters, the loss; several on one tensor, one removed, one that never gets a gradient."""
    seen: list[Any] = []

    def see(name: str) -> Callable[[Any], None]:
        return lambda gradient: seen.append((name, gradient.sum().item()))

    for name, parameter in model.named_parameters():
        parameter.register_hook(see(name))
    for shift in range(3):
        x = torch.tanh(model.blocks[0](X + shift))
        x.register_hook(see("x, first"))
        x.register_hook(lambda gradient: gradient * 2)
        x.register_hook(see("x, third"))
        handle = x.register_hook(see("removed"))
        y = model.blocks[1](x) + x
        y.register_hook(see("y"))
        z = model.blocks[2](x)
        z.register_hook(see("z"))
        z.detach().requires_grad_()
        unused = model.value(y)
        unused.register_hook(see("never"))
        loss = F.cross_entropy(model.head(y) + model.head(z), Y)
        loss.register_hook(see("loss"))
        y.register_hook(see("y, late"))
        handle.remove()
        loss.backward()
        loss.register_hook(see("too late"))
    return seen, gradients_of(model)


def clamped_in_each_step(model: Any) -> Any:
    model.hooked = lambda state: state.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return train(model)


def changed_in_place(model: Any) -> Any:
    norms: list[float] = []

    def hook(gradient: Tensor) -> None:
        norms.append(gradient.norm().item())
        gradient.mul_(0.5)

    model.hooked = lambda state: state.register_hook(hook)
    return train(model), norms


def retained(model: Any) -> Any:
    """Saliency of activations and of losses, over two backwards and on the input."""
    x = X.clone().requires_grad_()
    hidden = model.blocks[0](x)
    hidden.retain_grad()
    out = model.head(model.blocks[1](hidden))
    losses = [F.cross_entropy(out, Y), out.square().mean()]
    for loss in losses:
        loss.retain_grad()
    (losses[0] * 2 + losses[1]).backward(retain_graph=True)
    first = [item.grad.tolist() for item in (hidden, x, *losses) if item.grad is not None]
    out.sum().backward()
    assert hidden.retains_grad
    assert not out.retains_grad
    assert x.grad is not None
    return first, hidden.grad.tolist(), x.grad.tolist(), gradients_of(model)


def hook_on_an_input(model: Any) -> Any:
    seen: list[float] = []
    x = X.clone().requires_grad_()
    x.register_hook(lambda gradient: seen.append(gradient.abs().max().item()))
    hidden = model.blocks[0](x)
    hidden.register_hook(lambda gradient: gradient.sign())
    model.head(hidden).logsumexp(1).sum().backward()
    assert x.grad is not None
    return seen, x.grad.tolist(), gradients_of(model)


def of_autograd_grad(model: Any) -> Any:
    seen: list[Any] = []
    hidden = model.blocks[0](X)
    hidden.register_hook(lambda gradient: seen.append(gradient.tolist()) or gradient * 3)
    loss = model.head(hidden).square().mean()
    found = torch.autograd.grad(loss, [hidden, model.blocks[0][0].weight, model.head.bias], retain_graph=True)
    found += torch.autograd.grad(loss, [hidden], retain_graph=True)
    loss.backward()
    return [item.tolist() for item in found], seen, gradients_of(model)


def with_what_was_recorded(model: Any) -> Any:
    """A hook that computes with activations and weights, and reads gradients that are already there."""
    seen: list[Any] = []
    hidden = model.features(X)
    hidden.register_hook(lambda gradient: gradient * hidden.detach().abs() + model.head.weight.detach().mean(0))
    hidden.register_hook(lambda gradient: seen.append(model.head.weight.grad.norm().item()))
    F.cross_entropy(model.head(hidden), Y).backward()
    return seen, gradients_of(model)


def with_gradients_so_far(model: Any) -> Any:
    """A hook keeps parameters' gradients as they are before the backward adds more to them."""
    seen: list[Any] = []
    for _ in range(2):
        out = model.head(model.features(X))
        out.register_hook(lambda _: seen.extend(p.grad.clone() for p in model.parameters() if p.grad is not None))
        F.cross_entropy(out, Y).backward()
    return [gradient.tolist() for gradient in seen]


def read_before_and_after(model: Any) -> Any:
    """Values are read while hooks are registered, and the graph is used twice."""
    seen: list[float] = []
    hidden = model.blocks[0](X)
    seen.append(hidden.mean().item())
    hidden.register_hook(lambda gradient: seen.append(gradient.std().item()))
    out = model.head(torch.relu(model.blocks[1](hidden)))
    out.register_hook(lambda gradient: seen.append(gradient.abs().sum().item()))
    loss = out.square().mean()
    if loss.item() > 0:
        loss.backward(retain_graph=True)
    (loss * 2).backward()
    return seen, gradients_of(model)


class Inside(nn.Module):
    """Its parts register hooks in their own forwards, and keep what they retain."""

    class Part(nn.Module):
        def __init__(self, seen: list[Any]) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
            self.seen = seen

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self.up(x))
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: self.seen.append(gradient.sum().item()))
            self.out = x + self.down(hidden)
            if hidden.requires_grad:
                self.out.retain_grad()
            return self.out

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.parts = nn.Sequential(*[Inside.Part(self.seen) for _ in range(3)])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.parts(x))


def registered_inside(model: Any) -> Any:
    first = train(model)
    return first, list(model.parts[0].seen), [part.out.grad.tolist() for part in model.parts]


def both_kinds(model: Any) -> Any:
    """Hooks on states and on the parameters that all of them use."""
    seen: list[Any] = []
    clamped_in_each_step(model)
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda gradient, name=name: seen.append((name, gradient.norm().item())))
    return train(model), seen


RECORDED = {
    Net: [
        grad_cam,
        in_the_order_of_autograd,
        retained,
        hook_on_an_input,
        of_autograd_grad,
        with_what_was_recorded,
        with_gradients_so_far,
        read_before_and_after,
    ],
    Cell: [clamped_in_each_step, changed_in_place, both_kinds],
    Inside: [registered_inside],
}


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize(("build", "program"), [(build, item) for build, items in RECORDED.items() for item in items])
def test_hooks_on_recorded_tensors_are_those_of_one_process(build: Any, program: Any, num_ranks: int) -> None:
    assert_same_as_plainly(build, program, num_ranks)


def test_hooks_on_what_is_computed_again_are_those_of_one_process() -> None:
    for build, program in ((Net, grad_cam), (Cell, changed_in_place)):
        assert_same_as_plainly(build, program, 2, remat=["cell"] if build is Cell else ["blocks.*"])


# Hooks on modules.


def flow_of_gradients(model: Any) -> Any:
    """Every module logs its gradients, containers too."""
    log: list[Any] = []

    def hook(name: str) -> Any:
        def log_it(module: nn.Module, given: Any, got: Any) -> None:
            norms = [None if item is None else item.norm().item() for item in (*given, *got)]
            log.append((name, type(module).__name__, norms))

        return log_it

    handles = [item.register_full_backward_hook(hook(name)) for name, item in model.named_modules()]
    first = train(model)
    for handle in handles:
        handle.remove()
    return first, train(model), log


class GuidedBackprop:
    """As in the much copied pytorch-cnn-visualizations."""

    def __init__(self, model: Any) -> None:
        self.outputs: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, nn.ReLU):
                module.register_forward_hook(self.keep)
                module.register_full_backward_hook(self.guide)

    def keep(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.outputs.append(output)

    def guide(self, module: nn.Module, given: Any, got: Any) -> Any:
        output = self.outputs.pop().detach().clone()
        output[output > 0] = 1
        return (output * torch.clamp(given[0], min=0.0),)


def guided(model: Any) -> Any:
    guide = GuidedBackprop(model)
    x = X.clone().requires_grad_()
    model(x)[:, 1].sum().backward()
    assert x.grad is not None
    return x.grad.tolist(), len(guide.outputs), gradients_of(model)


def changed_by_modules(model: Any) -> Any:
    """Reversal, noise and a norm taken by module hooks, of which one is a pre-hook with a counter."""
    calls = 0
    norms: list[float] = []

    def reverse(module: nn.Module, given: Any, got: Any) -> Any:
        return tuple(None if item is None else -0.5 * item for item in given)

    def noisy(module: nn.Module, got: Any) -> Any:
        nonlocal calls
        calls += 1
        noise = torch.randn(got[0].shape, generator=torch.Generator().manual_seed(calls))
        return (got[0] + 0.01 * noise,)

    model.blocks[1][0].register_full_backward_hook(reverse)
    model.norm.register_full_backward_pre_hook(noisy)
    model.norm.register_full_backward_hook(lambda module, given, got: norms.append((given[0] - got[0]).norm().item()))
    model.register_full_backward_pre_hook(lambda module, got: (got[0] * 2,))
    return train(model), calls, norms


def with_forward_hooks(model: Any) -> Any:
    """Forward hooks that change what gradient flows through, beside backward hooks on the same modules."""
    seen: list[Any] = []
    model.blocks[0].register_forward_hook(lambda module, args, out: out * 2 + args[0])
    model.blocks[0].register_full_backward_hook(lambda module, given, got: seen.append(got[0].tolist()))
    model.head.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    model.head.register_full_backward_hook(lambda module, given, got: seen.append(given[0].tolist()))
    return train(model), seen


def on_all_modules(model: Any) -> Any:
    log: list[Any] = []
    module: Any = torch.nn.modules.module
    hook: Any = lambda m, given, got: log.append((type(m).__name__, len(given)))  # noqa: E731
    pre_hook: Any = lambda m, got: log.append(got[0].abs().sum().item())  # noqa: E731
    register, register_pre = module.register_module_full_backward_hook, module.register_module_full_backward_pre_hook
    results: list[Any] = []
    for kinds in ([(register, hook), (register_pre, pre_hook)], [(register, hook)], [(register_pre, pre_hook)], []):
        handles = [register(function) for register, function in kinds]
        try:
            results.append(train(model))
        finally:
            for handle in handles:
                handle.remove()
    return results, log


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("program", [flow_of_gradients, guided, changed_by_modules, with_forward_hooks])
def test_hooks_on_modules_are_those_of_one_process(program: Callable[[Any], Any], num_ranks: int) -> None:
    assert_same_as_plainly(Net, program, num_ranks)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_on_all_modules_are_those_of_one_process() -> None:
    assert_same_as_plainly(Net, on_all_modules, 1)
