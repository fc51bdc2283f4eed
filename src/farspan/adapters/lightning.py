"""Lightning's Trainer and Fabric: one device, one process, of which rank 0 writes.

The connector chooses the strategy, from arguments and launch variables; it is given one device. `SingleDeviceStrategy`
then says who writes, and where all wait for each other.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from farspan.adapters.shares import number_of_groups, this_group
from farspan.adapters.this_rank import barrier, existing, is_first, say_once
from farspan.errors import PlanError, RecordError
from farspan.execute.process.world import current_engine
from farspan.record.tensor import LazyTensor

__all__ = ["ADAPTERS"]

_ONE_PROCESS = ("auto", "single_device")


def _adapt_strategy(module: Any) -> None:
    """`...strategies.single_device`."""
    strategy = module.SingleDeviceStrategy
    strategy.is_global_zero = property(lambda self: is_first())
    strategy.barrier = lambda self, name=None: barrier(f"Lightning's barrier {name or ''}")
    strategy.broadcast = lambda self, obj, src=0: _broadcast(obj, src)


def _broadcast(obj: Any, src: int) -> Any:
    """Returns on every rank what rank `src` has found (the name of a folder or a run, a decision)."""
    engine = current_engine()
    if engine is None or engine.num_ranks == 1:
        return obj
    text = json.dumps(_described(obj)) if engine.rank == src else ""
    found = json.loads(engine.agreement.broadcast("Lightning's broadcast", text.encode(), src))
    if "cannot" in found:
        raise RecordError(
            f"Lightning's broadcast cannot carry a {found['cannot']}.",
            why=f"rank {src} gave it; only text, paths, numbers, and lists and dictionaries of them are sent.",
            hint="let every rank compute it, or broadcast its text",
        )
    return Path(found["path"]) if "path" in found else found["value"]


def _described(obj: Any) -> dict[str, Any]:
    if isinstance(obj, Path):
        return {"path": str(obj)}
    try:
        is_kept = json.loads(json.dumps(obj)) == obj
    except (TypeError, ValueError):
        is_kept = False
    return {"value": obj} if is_kept else {"cannot": type(obj).__qualname__}


def _adapt_fabric_module(module: Any) -> None:
    """`...wrappers`: Fabric hooks what a model returns, to see in the backward that `fabric.backward` was called. Ours
    is recorded there, and runs later.
    """
    wrapper = module._FabricModule
    register = wrapper._register_backward_hook

    @functools.wraps(register)
    def register_on_plain(self: Any, tensor: Any) -> Any:
        return tensor if isinstance(tensor, LazyTensor) else register(self, tensor)

    wrapper._register_backward_hook = register_on_plain


def _adapt_parallel(module: Any) -> None:
    """`...strategies.parallel`: one that has been made already believes in several processes."""
    made = existing([module.ParallelStrategy])
    if made is not None:
        raise PlanError(
            "a Lightning Trainer or Fabric for several processes exists before farspan.distribute(model) is called.",
            why=f"it has made a {made.__name__}, which wraps the model and splits the data.",
            hint="make it with devices=1, or after farspan.distribute(model)",
        )


def _adapt_data(module: Any) -> None:
    """`...connectors.data_connector`: each group trains on its share; all validate on everything."""
    connector = module._DataConnector
    prepare = connector._prepare_dataloader

    @functools.wraps(prepare)
    def prepare_share(self: Any, dataloader: Any, shuffle: bool, mode: Any) -> Any:
        trainer = self.trainer
        is_shared = (
            number_of_groups() > 1
            and mode == module.RunningStage.TRAINING
            and isinstance(dataloader, module.DataLoader)
            and trainer._accelerator_connector.use_distributed_sampler
            and not isinstance(dataloader.sampler, module.DistributedSampler)
            and not module.has_iterable_dataset(dataloader)
        )
        if not is_shared:
            return prepare(self, dataloader, shuffle, mode)
        ways = {"num_replicas": number_of_groups(), "rank": this_group(), "overfit_batches": trainer.overfit_batches}
        sampler = module._get_distributed_sampler(dataloader, shuffle, mode=mode, **ways)
        return module._update_dataloader(dataloader, sampler, mode=mode)

    connector._prepare_dataloader = prepare_share


def _adapt_connector(name: str) -> Any:
    def adapt(module: Any) -> None:
        connector = getattr(module, name)
        original = connector.__init__

        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **_for_one_process(module, kwargs))

        connector.__init__ = init

    return adapt


def _for_one_process(module: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the connector's arguments, for one process on one device."""
    strategy = given.get("strategy", "auto")
    if not (strategy in _ONE_PROCESS or (isinstance(strategy, str) and strategy.startswith("ddp"))):
        if isinstance(strategy, module.SingleDeviceStrategy):
            return given
        raise PlanError(
            f"Lightning's strategy={strategy!r} cannot train a model that farspan has distributed.",
            why="it would split the model, or its data, once more.",
            hint='strategy="auto"',
        )
    changed: dict[str, Any] = {"strategy": strategy if strategy in _ONE_PROCESS else "auto", "num_nodes": 1}
    if not _is_one(given.get("devices", "auto")):
        changed["devices"] = 1
    overridden = [
        f"{name}={value!r}" for name, value in changed.items() if given.get(name, "auto") not in ("auto", value)
    ]
    if overridden:
        say_once(f"farspan has set {', '.join(overridden)} for Lightning: all ranks together train one model.")
    plugins = given.get("plugins")
    plugins = [] if plugins is None else list(plugins) if isinstance(plugins, (list, tuple, set)) else [plugins]
    if not any(isinstance(plugin, module.ClusterEnvironment) for plugin in plugins):
        plugins.append(module.LightningEnvironment())  # rather than what launch variables suggest
    return {**given, **changed, "plugins": plugins}


def _is_one(devices: Any) -> bool:
    """Returns whether `devices=` names one: 1, "1", [2], "2,"; "auto" is as many as there are."""
    if isinstance(devices, str):
        return devices == "1" or ("," in devices and len([part for part in devices.split(",") if part]) == 1)
    return devices == 1 or (isinstance(devices, (list, tuple)) and len(devices) == 1)


def _adapt_rank(module: Any) -> None:
    """`lightning_utilities.core.rank_zero`: who logs and warns."""
    module.rank_zero_only.rank = 0 if is_first() else 1


ADAPTERS = {"lightning_utilities.core.rank_zero": _adapt_rank}
for _package in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
    ADAPTERS |= {
        f"{_package}.strategies.parallel": _adapt_parallel,
        f"{_package}.strategies.single_device": _adapt_strategy,
    }
for _package in ("lightning.pytorch", "pytorch_lightning"):
    ADAPTERS[f"{_package}.trainer.connectors.accelerator_connector"] = _adapt_connector("_AcceleratorConnector")
    ADAPTERS[f"{_package}.trainer.connectors.data_connector"] = _adapt_data
for _package in ("lightning.fabric", "lightning_fabric"):
    ADAPTERS[f"{_package}.connector"] = _adapt_connector("_Connector")
    ADAPTERS[f"{_package}.wrappers"] = _adapt_fabric_module
