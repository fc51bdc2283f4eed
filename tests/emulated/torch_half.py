"""The half of torch that a CPU build lacks: what `torch.cuda` calls in `torch._C`, over the emulated accelerator.

Settings, all by the environment, because ranks start with nothing else:

    EMULATED_DEVICES             "cuda:2": two devices that torch calls cuda; "npu:2": two by a name of their own
    EMULATED_MEMORY_MIB  memory of each device (2048)
    EMULATED_LAG_US      the longest time that a stream holds up an item (300); 0: none
    EMULATED_LAG_EVERY   one item in so many is held up (16)
    EMULATED_SEED        of these draws (0)
    EMULATED_DEADLINE_S  after which a wait is an error (60)
    EMULATED_CHECK       0: accesses are not checked for an order
    EMULATED_NCCL        0: torch was built without it
    EMULATED_MACHINE     a name: devices of processes with other names are other devices
    EMULATED_REPORT      a folder: each process writes its races and its counters there as it ends
"""

from __future__ import annotations

import atexit
import dataclasses
import datetime
import faulthandler
import importlib.machinery
import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable
from typing import Any

__all__ = ["Settings", "install", "install_rest", "native"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment says of the devices.

    Attributes:
        kind: "cuda", or the name of an accelerator that torch reaches through `torch.accelerator` alone.
        num_devices: Devices of this process.
        memory_bytes: Memory of each.
        lag_us: The longest time that a stream holds up an item.
        lag_every: One item in so many is held up.
        seed: Of the draws of lags.
        deadline_s: After which a wait is an error.
        check_order: Whether accesses are checked for an event that orders them.
        has_nccl: Whether torch has an NCCL for them.
    """

    kind: str
    num_devices: int
    memory_bytes: int
    lag_us: int
    lag_every: int
    seed: int
    deadline_s: float
    check_order: bool
    has_nccl: bool

    @staticmethod
    def of_environment() -> Settings:
        def number(name: str, default: int) -> int:
            return int(os.environ.get(f"EMULATED_{name}", default))

        kind, _, count = os.environ["EMULATED_DEVICES"].partition(":")
        return Settings(
            kind=kind,
            num_devices=int(count or 1),
            memory_bytes=number("MEMORY_MIB", 2048) << 20,
            lag_us=number("LAG_US", 300),
            lag_every=number("LAG_EVERY", 16),
            seed=number("SEED", 0),
            deadline_s=float(number("DEADLINE_S", 60)),
            check_order=bool(number("CHECK", 1)),
            has_nccl=kind == "cuda" and bool(number("NCCL", 1)),
        )


native: Any = None
"""The extension, once it is installed."""


def install() -> None:
    """Put the devices in place; torch's C++ half has been imported, and its `torch.cuda` not yet."""
    global native
    from tests.emulated.build import extension_path

    path = extension_path()
    if not path.exists():
        raise ImportError(f"EMULATED_DEVICES is set, but {path} has not been built: python tests/emulated/build.py")
    loader = importlib.machinery.ExtensionFileLoader("emulated_accelerator", str(path))
    spec = importlib.util.spec_from_file_location("emulated_accelerator", path, loader=loader)
    assert spec is not None
    native = importlib.util.module_from_spec(spec)
    loader.exec_module(native)
    settings = Settings.of_environment()
    values = dataclasses.asdict(settings)
    faulthandler.enable()  # who touches memory of a device is named by its stack
    native.start(values.pop("kind"), values)
    atexit.register(_at_end, settings)
    os.register_at_fork(after_in_child=_forked)
    if settings.kind == "cuda":
        _fill_in(settings)
    else:
        _name_module(settings)


def install_rest() -> None:
    """Put in place what needs more of torch, before `torch.distributed` looks whether there is an NCCL."""
    import torch._C._distributed_c10d as c10d

    settings = Settings.of_environment()
    if settings.kind == "cuda":
        _resize_storages()
    if settings.has_nccl:
        native.bind_nccl(c10d)
        module: Any = c10d
        module._DEFAULT_PG_NCCL_TIMEOUT = datetime.timedelta(minutes=10)


_is_forked = False


def _forked() -> None:
    global _is_forked
    _is_forked = True  # the threads that are the streams are not here


def _at_end(settings: Settings) -> None:
    """Let the streams come to their end, and write what has been seen."""
    if _is_forked:
        return
    counters = native.counters()  # before this wait, which is not the program's
    error = ""
    native.abort_all_communicators()
    for index in range(settings.num_devices):
        try:
            native.synchronize(index)
        except RuntimeError as raised:
            error = str(raised)
    races = native.take_races()
    folder = os.environ.get("EMULATED_REPORT")
    if folder:
        report = {"command": sys.argv, "counters": counters, "races": races, "error": error}
        native.write_file(os.path.join(folder, f"{os.getpid()}.json"), json.dumps(report, indent=1))
    elif races:
        print(f"emulated accelerator: {len(races)} races; the first:\n{races[0]}", file=sys.stderr)


@dataclasses.dataclass(frozen=True)
class _Properties:
    """What `torch.cuda.get_device_properties` returns."""

    name: str
    total_memory: int
    uuid: str
    major: int = 8
    minor: int = 0
    multi_processor_count: int = 4
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    max_threads_per_multi_processor: int = 2048
    gcnArchName: str = ""  # noqa: N815
    warp_size: int = 32
    L2_cache_size: int = 1 << 22
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 49152
    shared_memory_per_multiprocessor: int = 102400


class _Runtime:
    """What `torch.cuda.cudart()` returns."""

    class cudaError:  # noqa: N801
        success = 0

    @staticmethod
    def cudaMemGetInfo(device: int) -> tuple[int, int]:  # noqa: N802
        return native.memory_info(device)

    @staticmethod
    def cudaGetErrorString(code: int) -> str:  # noqa: N802
        return str(code)

    @staticmethod
    def cudaProfilerStart() -> int:  # noqa: N802
        return 0

    @staticmethod
    def cudaProfilerStop() -> int:  # noqa: N802
        return 0


def _fill_in(settings: Settings) -> None:
    """Put the missing names of `torch._C` in place."""
    import torch

    c: Any = torch._C
    properties = [
        _Properties(
            name=f"Emulated accelerator ({settings.memory_bytes >> 20} MiB)",
            total_memory=settings.memory_bytes,
            uuid=f"emulated {os.environ.get('EMULATED_MACHINE', '')} {index}",
        )
        for index in range(settings.num_devices)
    ]

    class StreamBase(c.Stream):
        """A stream of the device; torch's own class for streams of any device does what is common."""

        def __new__(
            cls,
            priority: int = 0,
            stream_id: int | None = None,
            device_index: int = 0,
            device_type: int = 0,
            stream_ptr: int = 0,
        ) -> Any:
            if stream_id is not None and device_type:
                return super().__new__(
                    cls, stream_id=stream_id, device_index=device_index, device_type=device_type, priority=priority
                )
            return super().__new__(cls, device=f"cuda:{native.current_device()}", priority=priority)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

        @property
        def priority(self) -> int:
            return 0

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -1

    class EventBase(c.Event):
        """An event of the device."""

        def __new__(
            cls,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> Any:
            if interprocess:
                raise NotImplementedError("events between processes are not emulated")
            return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)

        def elapsed_time(self, end_event: Any) -> float:
            return native.elapsed_ms(self.event_id, end_event.event_id)

        @property
        def cuda_event(self) -> int:
            return self.event_id

    def memory_stats(device: int) -> dict[str, Any]:
        found = native.memory_stats(device)

        def kinds(now: int, peak: int) -> dict[str, dict[str, int]]:
            one = {"current": now, "peak": peak, "allocated": now, "freed": 0}
            return dict.fromkeys(("all", "small_pool", "large_pool"), one)

        in_use, peak = found["allocated"], found["peak"]
        return {
            "allocated_bytes": kinds(in_use, peak),
            "active_bytes": kinds(in_use, peak),
            "requested_bytes": kinds(found["requested"], peak),
            "reserved_bytes": kinds(found["reserved"], found["peak_reserved"]),
            "allocation": kinds(found["num_alloc"] - found["num_free"], found["num_alloc"]),
            "num_ooms": found["num_ooms"],
            "num_alloc_retries": 0,
        }

    def init() -> None:
        import torch.cuda

        module: Any = torch.cuda
        module.default_generators = tuple(native.default_generator(at) for at in range(settings.num_devices))
        module._get_device_properties = lambda device: properties[device]

    def nothing(*_arguments: object, **_named: object) -> None:
        pass

    class NoGraphs:
        def __new__(cls, *_arguments: object, **_named: object) -> Any:
            raise NotImplementedError("CUDA graphs are not emulated")

    names: dict[str, Callable[..., Any] | type] = {
        "_CudaStreamBase": StreamBase,
        "_CudaEventBase": EventBase,
        "_CudaDeviceProperties": _Properties,
        "_CUDAGraph": NoGraphs,
        "_graph_pool_handle": lambda: (0, 0),
        "_cuda_init": init,
        "_cuda_isInBadFork": lambda: _is_forked,
        "_cuda_getDeviceCount": native.device_count,
        "_cuda_getDevice": native.current_device,
        "_cuda_setDevice": native.exchange_device,
        "_cuda_exchangeDevice": lambda device: native.exchange_device(device) if device >= 0 else -1,
        "_cuda_maybeExchangeDevice": lambda device: native.exchange_device(device) if device >= 0 else -1,
        "_cuda_getCurrentStream": native.current_stream,
        "_cuda_getCurrentRawStream": lambda device: native.current_stream(device)[0],
        "_cuda_getDefaultStream": native.default_stream,
        "_cuda_setStream": lambda stream_id, device_index, device_type: native.set_stream(stream_id, device_index),
        "_cuda_synchronize": lambda: native.synchronize(-1),
        "_cuda_sleep": lambda cycles: native.occupy(cycles / 1e9),
        "_cuda_emptyCache": native.empty_cache,
        "_cuda_memoryStats": memory_stats,
        "_cuda_resetPeakMemoryStats": native.reset_peak,
        "_cuda_resetAccumulatedMemoryStats": nothing,
        "_cuda_ipc_collect": nothing,
        "_cuda_getArchFlags": lambda: "sm_80",
        "_cuda_getCompiledVersion": lambda: 12000,
        "_cuda_canDeviceAccessPeer": lambda device, peer: True,
        "_cuda_hasPrimaryContext": lambda device: True,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_clearCublasWorkspaces": nothing,
        "_cuda_lock_mutex": nothing,
        "_cuda_unlock_mutex": nothing,
        "_cuda_set_sync_debug_mode": nothing,
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_setMemoryFraction": nothing,
        "_cudart": _Runtime,  # type: ignore[dict-item]
    }
    for name, value in names.items():
        setattr(c, name, value)
    c._has_cuda = True


def _resize_storages() -> None:
    """Let storages of the device change their size, which torch's C++ half does for those of the CPU alone."""
    import torch
    from torch.storage import UntypedStorage

    of_torch = UntypedStorage.resize_

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return of_torch(self, size)
        native.set_storage_bytes(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), size)
        return self

    setattr(UntypedStorage, "resize_", resize_)  # noqa: B010


def _name_module(settings: Settings) -> None:
    """Give the devices a name of their own, which programs reach through `torch.accelerator`."""
    import torch

    torch._C._rename_privateuse1_backend(settings.kind)
    module: Any = types.ModuleType(f"torch.{settings.kind}")

    def indices(device: Any = None) -> int:
        index = torch.device(device).index if isinstance(device, str | torch.device) else device
        return native.current_device() if index is None else index

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        native.default_generator(indices(device)).set_state(state)

    def seed_all(seed: int) -> None:
        for index in range(settings.num_devices):
            native.default_generator(index).manual_seed(seed)

    names: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: _is_forked,
        "_lazy_init": lambda: None,
        "device_count": native.device_count,
        "current_device": native.current_device,
        "set_device": lambda device: native.exchange_device(indices(device)),
        "synchronize": lambda device=None: native.synchronize(indices(device)),
        "get_rng_state": lambda device=None: native.default_generator(indices(device)).get_state(),
        "set_rng_state": set_rng_state,
        "manual_seed": lambda seed: native.default_generator(indices()).manual_seed(seed),
        "manual_seed_all": seed_all,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
    }
    for name, value in names.items():
        setattr(module, name, value)
    sys.modules[module.__name__] = module
    setattr(torch, settings.kind, module)
