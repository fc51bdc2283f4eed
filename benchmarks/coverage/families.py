"""Which models are tried: one for each family of the installed transformers, and plain torch modules.

A family is a model type that some auto mapping names and that is not a part of another one in the same folder. A recipe
says how it is made: the class, how its config is made small (configs.py), and how its inputs are read (inputs.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from benchmarks.coverage.configs import WAYS, tiny_config
from benchmarks.coverage.inputs import VARIANTS, inputs_of, optional_inputs
from benchmarks.coverage.plain_torch import CASES
from torch import Tensor, nn

__all__ = ["Case", "Recipe", "case_of", "family_names", "recipes"]

BATCHES = (2, 3)
"""Sizes of the micro-batches of a step."""
MAX_PARAMETERS = 30_000_000
MAPPINGS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "IMAGE_TEXT_TO_TEXT",
    "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION",
    "CTC",
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "AUDIO_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "QUESTION_ANSWERING",
    "MULTIMODAL_LM",
    "TIME_SERIES_PREDICTION",
    "DEPTH_ESTIMATION",
    "PRETRAINING",
)
"""In the order of preference; all others follow, and the bare model comes last."""
PREFIX = "MODEL_FOR_"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a family's model and inputs are made; all of it in words, so that it can be kept as JSON."""

    class_name: str
    way: str = WAYS[0]
    variant: str = VARIANTS[0]
    batches: tuple[int, ...] = BATCHES
    needed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, its batches by step and micro-batch, and the loss of one batch."""

    build: Callable[[], nn.Module]
    batches: Callable[[nn.Module], list[list[Any]]]
    loss: Callable[[nn.Module, Any], Tensor]
    call: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]
    """A batch -> the arguments of the model."""


@functools.cache
def family_names() -> dict[str, list[str]]:
    """Model type -> names of its classes, the preferred one first; plain torch modules have no class."""
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    first = [f"{PREFIX}{name}_MAPPING_NAMES" for name in MAPPINGS]
    rest = sorted(name for name in vars(auto) if name.startswith(PREFIX) and name.endswith("_MAPPING_NAMES"))
    found: dict[str, list[str]] = {}
    for mapping in dict.fromkeys([*first, *rest, "MODEL_MAPPING_NAMES"]):
        for model_type, names in getattr(auto, mapping, {}).items():
            for name in [names] if isinstance(names, str) else names:
                if name not in found.setdefault(model_type, []):
                    found[model_type].append(name)
    classes = {model_type: tuple(names) for model_type, names in found.items()}
    parts = _parts(list(found))
    kept: dict[str, list[str]] = {f"torch.{name}": [] for name in CASES}
    seen: set[tuple[str, ...]] = set()
    for model_type in sorted(found):
        if model_type not in parts and classes[model_type] not in seen:
            seen.add(classes[model_type])
            kept[model_type] = found[model_type]
    return kept


def _parts(model_types: list[str]) -> set[str]:
    """Model types that are sub-configs of another one in the same folder."""
    mapping: Any = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING
    parts: set[str] = set()
    for model_type in model_types:
        with contextlib.suppress(Exception):
            whole = mapping[model_type]
            for spec in whole.sub_configs_defaults.values():
                part = spec.config_class if hasattr(spec.config_class, "model_type") else mapping[spec.model_type]
                is_near = part.__module__.rpartition(".")[0] == whole.__module__.rpartition(".")[0]
                if is_near and part is not whole:
                    parts.add(part.model_type)
    return parts


def recipes(name: str) -> Iterator[Recipe]:
    """What to try, in turn: the first that trains is the family's."""
    if name.startswith("torch."):
        yield Recipe(class_name=name)
        return
    for class_name in family_names()[name][:3]:
        optional = optional_inputs(getattr(importlib.import_module("transformers"), class_name))
        for variant in VARIANTS:
            for way in WAYS:
                for needed in ((), optional) if optional else ((),):
                    yield Recipe(class_name=class_name, way=way, variant=variant, needed=needed)


def case_of(name: str, recipe: Recipe) -> Case:
    """The case that a recipe describes."""
    if name.startswith("torch."):
        plain = CASES[name.removeprefix("torch.")]
        return Case(
            build=lambda: _seeded(plain.build),
            batches=lambda _: plain.batches(),
            loss=plain.loss,
            call=lambda batch: (batch[: plain.num_inputs], {}),
        )
    return Case(
        build=lambda: _build(name, recipe),
        batches=lambda model: _batches(model, recipe),
        loss=lambda model, batch: loss_of(model(**batch)),
        call=lambda batch: ((), batch),
    )


def _build(name: str, recipe: Recipe) -> nn.Module:
    config_module: Any = importlib.import_module("transformers.models.auto.configuration_auto")
    config = tiny_config(config_module.CONFIG_MAPPING[name], recipe.way)
    cls = getattr(importlib.import_module("transformers"), recipe.class_name)
    number = 0
    with contextlib.suppress(Exception), torch.device("meta"):
        number = sum(item.numel() for item in cls(config).parameters())
    if number > MAX_PARAMETERS:
        raise ValueError(f"{number:,} parameters are not tiny")
    return _seeded(lambda: cls(config))


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """Built from a seed, with nothing random in its forward that can be turned off, and no parameter at rest.

    A parameter that is left uninitialised gets numbers; every one gets noise, so that no gradient is zero for a head
    or a scale that starts at zero.
    """
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # fills what is not initialised with NaN
    try:
        model = build()
    finally:
        torch.use_deterministic_algorithms(False)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for item in model.parameters():
            if item.is_floating_point():
                noise = 0.02 * torch.randn(item.shape, generator=generator).to(item.dtype)
                item.copy_(torch.where(item.isfinite(), item, 0.0) + noise)
        for item in model.buffers():
            if item.is_floating_point() and item.isnan().any():
                item.nan_to_num_(0.0)
    for module in model.modules():
        for attribute, value in vars(module).items():
            if re.search("drop", attribute) and isinstance(value, float):
                setattr(module, attribute, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model.train()


def _batches(model: nn.Module, recipe: Recipe) -> list[list[Any]]:
    model.eval()  # features are counted with the model itself: no running statistic may change
    needed = frozenset(recipe.needed)
    try:
        return [
            [
                inputs_of(model, batch, 10 * step + place, recipe.variant, needed)
                for place, batch in enumerate(recipe.batches)
            ]
            for step in range(3)
        ]
    finally:
        model.train()


def loss_of(output: Any) -> Tensor:
    """The model's own loss; where it has none, the sum of the mean squares of all that it gives."""
    loss = output.get("loss") if isinstance(output, dict) else None
    if loss is not None:
        return loss if loss.dim() == 0 else loss.mean()
    total: Any = 0.0
    for item in _tensors(output, set()):
        if item.requires_grad and (item.is_floating_point() or item.is_complex()):
            total = total + item.abs().float().square().mean()
    return total


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, seen)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name), seen)


def module_of(name: str) -> str:
    """The file of a family's classes, for a reader of the table."""
    classes = family_names().get(name) or ["?"]
    cls = getattr(sys.modules.get("transformers"), classes[0], None)
    return getattr(cls, "__module__", "")
