"""What optimizers keep, and gradients, between two steps: the same on every rank."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.support.loop import X, Y, same_everywhere, weights
from torch import nn

_Distribute = Callable[[nn.Module], nn.Module]


def _backward(model: nn.Module, shift: int) -> None:
    model.zero_grad()
    F.cross_entropy(model(X + shift), Y).backward()


def test_state_may_be_counted_read_changed_pickled_and_reset() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        seen: list[Any] = []
        for shift in range(5):
            _backward(model, shift)
            optimizer.step()
            states = optimizer.state.values()
            norms: Any = sum(state["exp_avg"].norm() for state in states)
            seen.append((len(optimizer.state), norms.item()))
            if shift == 1:
                for p in model.parameters():
                    optimizer.state[p]["exp_avg"].zero_()
            if shift == 2:
                for state in optimizer.state.values():
                    state["exp_avg_sq"].mul_(0.5)
                    state["step"] -= 1
            if shift == 3:
                optimizer.state = defaultdict(dict)
        kept = pickle.loads(pickle.dumps([dict(optimizer.state[p]) for p in model.parameters()]))
        return seen, weights(model), [{name: value.tolist() for name, value in state.items()} for state in kept]

    same_everywhere(program)


def test_state_that_was_loaded_goes_to_its_owner() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        _backward(model, 0)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        optimizer.load_state_dict(saved)
        seen = [state["exp_avg"].sum().item() for state in optimizer.state.values()]
        _backward(model, 1)
        optimizer.step()
        return seen, weights(model)

    same_everywhere(program)


def test_hooks_of_loading_may_give_what_was_kept_to_other_parameters() -> None:
    def reversed_states(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        """As torch's documentation shows it for parameters that have come into another order."""
        last = len(saved["param_groups"][0]["params"]) - 1
        return {**saved, "state": {last - index: kept for index, kept in saved["state"].items()}}

    def halve(optimizer: torch.optim.Optimizer) -> None:
        for kept in optimizer.state.values():
            kept["exp_avg"].mul_(0.5)

    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        _backward(model, 0)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = torch.optim.Adam(list(model.parameters())[::-1], lr=0.01)
        optimizer.register_load_state_dict_pre_hook(reversed_states)
        optimizer.register_load_state_dict_post_hook(halve)
        optimizer.load_state_dict(saved)
        _backward(model, 1)
        optimizer.step()
        return weights(model), {
            number: kept["exp_avg"].tolist() for number, kept in optimizer.state_dict()["state"].items()
        }

    same_everywhere(program)


def test_checkpoints_of_old_torch_have_numbers_where_optimizers_have_tensors() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
        _backward(model, 0)
        optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        for kept in saved["state"].values():
            kept["step"], kept["mu_product"] = kept["step"].item(), kept["mu_product"].item()
        optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
        optimizer.load_state_dict(saved)
        _backward(model, 1)
        optimizer.step()
        return weights(model), {
            number: kept["exp_avg"].tolist() for number, kept in optimizer.state_dict()["state"].items()
        }

    same_everywhere(program)


def test_parameters_of_several_ranks_may_exchange_what_is_kept_for_them() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        parameters = list(model.parameters())
        for shift in range(4):
            _backward(model, shift)
            if shift == 1:
                parameters[0].grad = None  # its count of steps is another from here on
            optimizer.step()
            if shift == 1:
                first, last = (optimizer.state[parameters[place]] for place in (0, -1))
                first["step"], last["step"] = last["step"], first["step"]
        return weights(model), [kept["step"].item() for kept in optimizer.state.values()]

    same_everywhere(program)


def test_the_last_line_may_read_the_state_while_other_ranks_have_gone() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        _backward(model, 0)
        optimizer.step()
        return weights(model), [state["exp_avg"].tolist() for state in optimizer.state_dict()["state"].values()]

    for _ in range(3):
        same_everywhere(program)


def test_averages_may_be_written_into_the_weights_between_steps() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for shift in range(3):
            _backward(model, shift)
            optimizer.step()
            with torch.no_grad():
                for p in model.parameters():
                    p.lerp_(end=optimizer.state[p]["momentum_buffer"], weight=0.1)  # type: ignore[arg-type]
        return weights(model)

    same_everywhere(program, 2)


def test_gradients_may_be_set_to_parts_of_a_flat_one() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parameters: Any = list(model.parameters())
        for shift in range(2):
            flats: list[torch.Tensor] = []
            for task in range(2):
                optimizer.zero_grad()
                F.cross_entropy(model(X + shift), (Y + task) % 5).backward()
                flats.append(torch.cat([p.grad.detach().clone().flatten() for p in parameters]))
            one, other = flats
            if torch.dot(one, other) < 0:
                one = one - torch.dot(one, other) * other / other.norm() ** 2
            flat, begin = one + other, 0
            for p in parameters:
                p.grad = flat[begin : begin + p.numel()].view_as(p)
                begin += p.numel()
            optimizer.step()
        return weights(model)

    same_everywhere(program)


def test_state_that_the_program_has_taken_goes_on_being_what_the_optimizer_keeps() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        taken: list[torch.Tensor] = []
        seen: list[Any] = []
        for shift in range(4):
            _backward(model, shift)
            optimizer.step()
            if shift == 0:
                taken = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
            if shift == 2:
                taken[0].zero_()
                taken[-1].add_(1.0)
            seen.append([momentum.tolist() for momentum in taken])
        return seen, weights(model)

    same_everywhere(program)


def test_gradients_that_were_set_may_be_used_together() -> None:
    class Together(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            parameters = self.param_groups[0]["params"]
            everything = torch.cat([p.grad for p in parameters])
            for p in parameters:
                p.sub_(p.grad * everything.abs().max())

    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        biases = [p for p in model.parameters() if p.dim() == 1]
        optimizer = Together(biases, {})
        for shift in range(2):
            _backward(model, shift)
            for number, p in enumerate(biases):
                assert p.grad is not None
                p.grad = p.grad * 0.5 if number % 2 else p.grad.mul_(2.0)
            optimizer.step()
        return weights(model)

    same_everywhere(program)


def test_a_learning_rate_may_be_made_of_the_loss() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen: list[float] = []
        for shift in range(3):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X + shift), Y)
            loss.backward()
            squares: Any = sum(p.grad.pow(2).sum() for p in model.parameters())  # type: ignore[union-attr]
            for group in optimizer.param_groups:
                group["lr"] = (loss.detach() / squares).clamp(max=0.1)
            optimizer.step()
            seen.append(float(optimizer.param_groups[0]["lr"]))
        return seen, weights(model)

    same_everywhere(program)


def test_gradients_may_be_read_between_two_backwards() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parameters: Any = list(model.parameters())
        out = model(X)
        first, second = F.cross_entropy(out, Y), out.pow(2).mean()
        first.backward(retain_graph=True)
        kept = [p.grad.clone() for p in parameters]
        seen = [kept[0].norm().item()]
        second.backward()
        squares: Any = sum(((p.grad - part) ** 2).sum() for p, part in zip(parameters, kept, strict=True))
        seen.append(squares.item())
        optimizer.step()
        return seen, weights(model)

    for num_ranks in (1, 2):
        same_everywhere(program, num_ranks)


class _Averaging(torch.optim.Optimizer):
    """Keeps tensors in attributes and groups, which programs read for their logs."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "norm": None})
        self.averages: dict[int, torch.Tensor] = {}
        self.history: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        total: Any = 0
        for number, p in enumerate(self.param_groups[0]["params"]):
            assert p.grad is not None
            self.averages.setdefault(number, torch.zeros_like(p)).mul_(0.5).add_(p, alpha=0.5)
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"])
            total = total + p.grad.square().sum()
        self.history.append(p.grad.norm())
        self.param_groups[0]["norm"] = total.sqrt()


def test_what_a_step_keeps_in_attributes_is_the_same_on_every_rank() -> None:
    """It was a plain tensor on the rank that had it: reading it was a divergence."""

    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = _Averaging(model.parameters())
        seen: list[Any] = []
        for shift in range(4):
            _backward(model, shift)
            optimizer.step()
            averages = optimizer.averages.values()
            seen.append([average.sum().item() for average in averages])
            seen.append([item.item() for item in [*optimizer.history, optimizer.param_groups[0]["norm"]]])
            if shift == 1:
                optimizer.history.clear()  # a slower rank may not have read it yet
                optimizer.averages[0].zero_()
            if shift == 2:
                with torch.no_grad():
                    for p, average in zip(model.parameters(), averages, strict=True):
                        p.copy_(average)
        return seen, weights(model)

    same_everywhere(program)


def test_what_is_saved_in_inference_mode_may_be_loaded_and_trained_on() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for shift in range(3):
            optimizer.zero_grad()
            _backward(model, shift)
            optimizer.step()
            if shift == 0:
                with torch.inference_mode():
                    saved = optimizer.state_dict(), model.state_dict()
        optimizer.load_state_dict(saved[0])
        model.load_state_dict(saved[1])
        _backward(model, 3)
        optimizer.step()
        used = sum((p * saved[1][name]).sum() for name, p in model.named_parameters())
        return float(used.detach()), weights(model)  # type: ignore[union-attr]

    same_everywhere(program)


def test_state_may_be_exchanged_between_parameters_and_shared_by_them() -> None:
    def program(model: nn.Module, distribute: _Distribute) -> Any:
        distribute(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        layers: Any = model.layers
        first, last = layers[0].bias, layers[5].bias
        seen: list[Any] = []
        for shift in range(6):
            _backward(model, shift)
            if shift == 2:
                one, other = optimizer.state[first], optimizer.state[last]
                one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]
            if shift == 3:
                optimizer.state[first]["exp_avg"] = optimizer.state[last]["exp_avg"]
            if shift == 5:
                optimizer.state[last]["exp_avg"].zero_()
                seen.append(optimizer.state[first]["exp_avg"].tolist())
            optimizer.step()
        return seen, weights(model)

    same_everywhere(program)
