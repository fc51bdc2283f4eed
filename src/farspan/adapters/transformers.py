"""transformers' Trainer: no reading of every micro-batch's loss, and files of rank 0 that all ranks can read."""

from __future__ import annotations

import functools
import json
from typing import Any

from farspan.adapters.this_rank import as_alone, barrier, is_first, noted_by_first, run_recorded, say_once

__all__ = ["ADAPTERS"]


def _adapt_trainer(module: Any) -> None:
    """`transformers.trainer`."""
    trainer = module.Trainer
    train, save_model, save, save_rng = (
        *(trainer.train, trainer.save_model),
        *(trainer._save_checkpoint, trainer._save_rng_state),
    )

    @functools.wraps(train)
    def train_without_reading(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.args.logging_nan_inf_filter:
            self.args.logging_nan_inf_filter = False
            say_once(
                "farspan has set logging_nan_inf_filter=False: it reads the loss of every micro-batch, and so\n"
                "  none would overlap. Only the logged loss differs, where a loss is nan or inf."
            )
        return train(self, *args, **kwargs)

    @functools.wraps(save_model)
    def save_model_with_barrier(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        config = getattr(self.model, "config", None)
        before = dict(vars(config)) if hasattr(config, "__dict__") else {}
        save_model(self, output_dir, _internal_call)
        if _internal_call:  # else one rank alone may save; in a checkpoint all ranks look whether it is there
            _take_config(config, before)
            barrier("the Trainer saves the model")

    @functools.wraps(save)
    def save_with_barrier(self: Any, *args: Any, **kwargs: Any) -> None:
        run_recorded("the Trainer saves a checkpoint")
        save(self, *args, **kwargs)
        barrier("the Trainer saves a checkpoint")

    @functools.wraps(save_rng)
    def save_rng_once(self: Any, output_dir: str) -> None:
        if self.args.should_save:
            save_rng(self, output_dir)

    trainer.train = train_without_reading
    trainer.save_model = save_model_with_barrier
    trainer._save_checkpoint = save_with_barrier
    trainer._save_rng_state = save_rng_once
    trainer.is_world_process_zero = trainer.is_local_process_zero = lambda self: is_first()


def _take_config(config: Any, before: dict[str, Any]) -> None:
    """Let every rank's configuration have what saving has set in that of the rank that writes.

    Layers hold the configuration, and farspan compares what they hold over the ranks.

    Args:
        config: Of the model; None if it has none.
        before: Its attributes before it was saved.
    """
    after = dict(vars(config)) if hasattr(config, "__dict__") else {}
    changed = {name: item for name, item in after.items() if name not in before or before[name] != item}
    text = json.dumps({name: item for name, item in changed.items() if _is_plain(item)})
    for name, item in json.loads(noted_by_first("what saving has set in the configuration", text.encode())).items():
        if name not in after or after[name] != item:
            setattr(config, name, item)


def _is_plain(item: Any) -> bool:
    """Returns whether JSON gives back an equal value."""
    return item is None or type(item) in (bool, int, float, str) or (type(item) is list and all(map(_is_plain, item)))


def _adapt_arguments(module: Any) -> None:
    """`transformers.training_args`: who writes; and one device, for on several the Trainer runs `nn.DataParallel`."""
    arguments = module.TrainingArguments
    num_devices, device = arguments.n_gpu.fget, arguments.device.fget
    module._is_torch_distributed_initialized = lambda: False  # it would warn that there is a group and no DDP
    arguments.n_gpu = property(lambda self: min(1, num_devices(self)))
    arguments.device = property(lambda self: as_alone(device(self)))
    arguments.should_save = arguments.should_log = property(lambda self: is_first())


ADAPTERS = {"transformers.trainer": _adapt_trainer, "transformers.training_args": _adapt_arguments}
