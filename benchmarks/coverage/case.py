"""One case: the plain loop in one process, the same loop as a rank of several, and the comparison."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.coverage.families import Case, Recipe, case_of, recipes
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

__all__ = ["prepare", "run_rank", "split_by_torch"]

LEARNING_RATE, MOMENTUM = 1e-3, 0.9
CLOSE, CLOSE_WITH_SUMS = 1e-6, 1e-5
"""The second where processes add up what each has of a layer."""
NUDGE, NUM_NUDGES, TIMES_NOISE = 2.0**-24, 4, 2
"""How far parameters are moved to see what rounding does to a model, and how often that is allowed for."""
SLOW_S = 40.0
"""Processor time that a plain run may take: three steps of a tiny model."""
STAGES = ("config", "build", "inputs", "forward", "backward", "repeat")


@dataclasses.dataclass(frozen=True, slots=True)
class History:
    """What three steps leave: losses and gradients by step, and all parameters and buffers at the end."""

    losses: list[list[float]]
    gradients: list[dict[str, Tensor | None]]
    state: dict[str, Tensor]
    noise: dict[str, float] = dataclasses.field(default_factory=dict)
    """By key, how far rounding moves a tensor: a gradient that is 0 in exact numbers is nothing else."""


def train(model: nn.Module, batches: list[list[Any]], case: Case) -> History:
    """Three steps of SGD with momentum; gradients are accumulated over the micro-batches of a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    losses: list[list[float]] = []
    gradients: list[dict[str, Tensor | None]] = []
    for step in batches:
        optimizer.zero_grad()
        parts = []
        for batch in step:
            loss = case.loss(model, batch) / len(step)
            loss.backward()
            parts.append(loss.detach())
        optimizer.step()
        gradients.append({name: _whole(item.grad) for name, item in model.named_parameters()})
        losses.append([part.item() for part in parts])
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return History(losses, gradients, {name: item for name, tensor in tensors if (item := _whole(tensor)) is not None})


def _whole(tensor: Any) -> Tensor | None:
    """A plain copy, also of what another rank owns."""
    if tensor is None:
        return None
    plain = tensor.detach()  # on every rank alike: under farspan it is recorded, and then read
    plain = plain.read() if hasattr(plain, "read") else plain
    plain = plain.to_dense() if plain.is_sparse else plain
    return torch.view_as_real(plain).clone() if plain.is_complex() else plain.clone().contiguous()


# The plain loop.


def prepare(name: str, folder: str, known: dict[str, Any] | None = None, *, with_noise: bool = False) -> dict[str, Any]:
    """Find the first recipe with which a family trains in one process, the same way twice, and keep what it gave.

    A `known` recipe has been found so before: it is run once. `with_noise`: and once with its parameters moved by a
    rounding, which shows how far rounding goes.
    """
    failures: list[tuple[int, str]] = []
    unbuilt: set[tuple[str, str]] = set()
    models: dict[tuple[str, str], nn.Module] = {}  # for probing: what counts is built again
    began = time.process_time()
    for recipe in [Recipe(**known)] if known else recipes(name):
        key = recipe.class_name, recipe.way
        if key in unbuilt or time.process_time() - began > 2 * SLOW_S:
            continue
        found = _try(name, recipe, folder, models, (1,) if known else (1, 2), with_noise)
        if isinstance(found, dict):
            return found
        failures.append(found)
        if found[0] <= STAGES.index("build"):
            unbuilt.add(key)
    stage, reason = max(failures, key=lambda item: item[0], default=(0, "no class"))
    return {"reason": f"{STAGES[stage]}: {reason}", "all": sorted({f"{STAGES[at]}: {text}" for at, text in failures})}


def _try(
    name: str,
    recipe: Recipe,
    folder: str,
    models: dict[tuple[str, str], nn.Module],
    seeds: tuple[int, ...],
    with_noise: bool,
) -> dict[str, Any] | tuple[int, str]:
    stage = 0
    try:
        case = case_of(name, recipe)
        stage = 1
        key = recipe.class_name, recipe.way
        if key not in models:
            models[key] = case.build()
        model = models[key]
        stage = 2
        batches = case.batches(model)
        stage = 3
        began = time.process_time()
        probe = case.loss(model, batches[0][0])
        if not isinstance(probe, Tensor) or not probe.isfinite():
            return stage, f"{recipe.class_name}: the loss is {float(probe)}"
        if time.process_time() - began > SLOW_S / 10:
            return stage, f"{recipe.class_name}: a forward takes {time.process_time() - began:.0f} s"
        stage = 4
        histories = []
        for seed in seeds:
            model = case.build()
            batches = case.batches(model)
            digest = digest_of(model)
            torch.manual_seed(seed)
            histories.append(train(model, batches, case))
        stage = 5
    except Exception as error:
        return stage, f"{recipe.class_name}: {type(error).__name__}: {' '.join(str(error).split())[:240]}"
    first = histories[0]
    if not _is_finite(first):
        return stage, f"{recipe.class_name}: not all finite"
    if not any(item is not None and item.any() for item in first.gradients[0].values()):
        return stage, f"{recipe.class_name}: no gradient"
    result = compare(first, histories[-1])
    if result["verdict"] != "bitwise":
        return stage, f"{recipe.class_name}: two runs differ, {result['worst']}"
    keep(first, folder, noise_of(case, first) if with_noise else {})
    number = sum(item.numel() for item in model.parameters())
    return {"recipe": dataclasses.asdict(recipe), "digest": digest, "num_parameters": number, "losses": first.losses}


def noise_of(case: Case, plain: History) -> dict[str, float]:
    """How far the tensors of a history move, at most, where each parameter is moved by a rounding, in several ways."""
    found: dict[str, float] = {}
    for seed in range(NUM_NUDGES):
        model = case.build()
        batches = case.batches(model)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for item in model.parameters():
                if item.is_floating_point():
                    item.mul_(1 + NUDGE * torch.randn(item.shape, generator=generator).sign().to(item.dtype))
        torch.manual_seed(1)
        moved = train(model, batches, case)
        pairs = [*zip(plain.gradients, moved.gradients, strict=True), (plain.state, moved.state)]
        for where, (wanted, got) in zip(("gradients 0", "gradients 1", "gradients 2", "state"), pairs, strict=True):
            for name, one in wanted.items():
                other = got[name]
                if one is not None and other is not None and one.is_floating_point() and one.numel():
                    key = f"{where} {name}"
                    found[key] = max(found.get(key, 0.0), (one - other).abs().max().item())
    return found


def _is_finite(history: History) -> bool:
    tensors = [*history.state.values(), *[item for step in history.gradients for item in step.values()]]
    return all(
        item is None or not item.is_floating_point() or bool(item.isnan().logical_not().all()) for item in tensors
    )


def digest_of(model: nn.Module) -> str:
    """All parameters and buffers, in a few letters."""
    found = hashlib.sha256()
    for name, item in [*model.named_parameters(), *model.named_buffers()]:
        found.update(name.encode())
        found.update(item.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def keep(history: History, folder: str, noise: dict[str, float]) -> None:
    tensors = {f"state {name}": item for name, item in history.state.items()}
    for step, gradients in enumerate(history.gradients):
        tensors.update({f"{step} {name}": item for name, item in gradients.items() if item is not None})
    save_file(tensors, f"{folder}/plain.safetensors")
    nothing = [[name for name, item in step.items() if item is None] for step in history.gradients]
    Path(folder, "plain.json").write_text(json.dumps({"losses": history.losses, "nothing": nothing, "noise": noise}))


def kept(folder: str) -> History:
    tensors = load_file(f"{folder}/plain.safetensors")
    rest = json.loads(Path(folder, "plain.json").read_text())
    gradients: list[dict[str, Tensor | None]] = [dict.fromkeys(names) for names in rest["nothing"]]
    state: dict[str, Tensor] = {}
    for key, item in tensors.items():
        where, _, name = key.partition(" ")
        if where == "state":
            state[name] = item
        else:
            gradients[int(where)][name] = item
    return History(rest["losses"], gradients, state, rest["noise"])


# As a rank.


def run_rank(name: str, prepared: dict[str, Any], num_stages: int, tensor: int, folder: str) -> dict[str, Any]:
    """The same loop under farspan; how it compares with what the plain loop gave."""
    import farspan
    from farspan.execute.process.world import current_engine

    recipe = Recipe(**prepared["recipe"])
    case = case_of(name, recipe)
    model = case.build()
    batches = case.batches(model)
    if digest_of(model) != prepared["digest"]:
        raise AssertionError("the model is built differently in another process")
    torch.manual_seed(1)
    model = farspan.distribute(model, stages=num_stages, tensor_parallel=tensor if tensor > 1 else None)
    result = compare(kept(folder), train(model, batches, case), CLOSE_WITH_SUMS if tensor > 1 else CLOSE)
    engine = current_engine()
    if tensor > 1 and engine is not None:
        form_of = engine.recorder.splitting.matrices.form_of
        result["forms"] = {key: form_of(key) for key, item in model.named_parameters() if item.dim() > 1}
    return result


def compare(wanted: History, got: History, close: float = CLOSE) -> dict[str, Any]:
    """The verdict (bitwise, close, wrong) and the worst differences: |d| / (max |wanted| + 1e-6), tensor by tensor.

    Of |d| as much does not count as rounding may do to the tensor (`History.noise`).

    The verdict is on the first step's gradients, and on all parameters and buffers at the end.
    """
    complaints: list[str] = []
    largest: dict[str, tuple[float, str]] = {}
    num_equal = num_tensors = 0
    for step, (mine, theirs) in enumerate(zip(wanted.gradients, got.gradients, strict=True)):
        for name in mine.keys() | theirs.keys():
            a, b = mine.get(name), theirs.get(name)
            if (a is None) != (b is None):
                complaints.append(f"step {step}: the gradient of {name} is {'None' if b is None else 'not None'}")
            elif a is not None and b is not None:
                num_tensors += 1
                num_equal += _note(largest, f"gradients {step}", name, a, b, wanted.noise)
    for name in wanted.state.keys() | got.state.keys():
        if name not in wanted.state or name not in got.state:
            complaints.append(f"{name} is only in one of them")
            continue
        num_tensors += 1
        is_equal = _note(largest, "state", name, wanted.state[name], got.state[name], wanted.noise)
        num_equal += is_equal
        if not is_equal and not wanted.state[name].is_floating_point():
            complaints.append(f"the integers of {name} differ")
    for step, (mine, theirs) in enumerate(zip(wanted.losses, got.losses, strict=True)):
        num_tensors += 1
        num_equal += _note(largest, f"losses {step}", "loss", torch.tensor(mine), torch.tensor(theirs), {})
    judged = max(largest.get(key, (0.0, ""))[0] for key in ("gradients 0", "state"))
    is_close = judged <= close and not complaints
    verdict = "wrong" if not is_close else "bitwise" if num_equal == num_tensors else "close"
    worst = {key: f"{value:.1e} {name}" for key, (value, name) in largest.items() if value}
    return {
        "verdict": verdict,
        "difference": judged,
        "worst": worst,
        "complaints": complaints[:5],
        "num_equal": num_equal,
        "num_tensors": num_tensors,
    }


def _note(
    largest: dict[str, tuple[float, str]],
    where: str,
    name: str,
    wanted: Tensor,
    got: Tensor,
    noise: dict[str, float],
) -> bool:
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        largest[where] = (float("inf"), name)
        return False
    both = wanted.isnan() & got.isnan() if wanted.is_floating_point() else torch.zeros((), dtype=torch.bool)
    if torch.equal(wanted, got) or bool(((wanted == got) | both).all()):
        return True
    a, b = wanted.double(), got.double()
    finite = torch.where(a.isfinite(), a, 0.0)
    farthest = (a - b).abs().masked_fill((a == b) | both, 0.0).max() - TIMES_NOISE * noise.get(f"{where} {name}", 0.0)
    difference = (farthest.clamp(min=0.0) / (finite.abs().max() + 1e-6)).item()
    difference = difference if difference == difference else float("inf")
    if difference > largest.get(where, (-1.0, ""))[0]:
        largest[where] = (difference, name)
    return False


# torch's own way.


def split_by_torch(name: str, prepared: dict[str, Any]) -> str:
    """Let torch.distributed.pipelining.pipeline() split the model before its middle block, as it is written."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    case = case_of(name, Recipe(**prepared["recipe"]))
    model = case.build()
    words, more = case.call(case.batches(model)[0][0])
    middle = middle_block(model)
    pipe = pipeline(model, mb_args=words, mb_kwargs=more, split_spec={middle: SplitPoint.BEGINNING})
    if pipe.num_stages != 2:
        raise ValueError(f"{pipe.num_stages} stages, not 2")
    return middle


def middle_block(model: nn.Module) -> str:
    """The middle entry of the list of modules that holds most of the parameters."""
    best, most = "", -1
    for name, module in model.named_modules():
        children = [child for child, part in module.named_children() if next(part.parameters(), None) is not None]
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(children) < 2:
            continue
        number = sum(item.numel() for item in module.parameters())
        if number > most:
            best, most = f"{name}.{children[len(children) // 2]}".removeprefix("."), number
    if not best:
        names = [name for name, part in model.named_children() if next(part.parameters(), None) is not None]
        return names[len(names) // 2]
    return best
