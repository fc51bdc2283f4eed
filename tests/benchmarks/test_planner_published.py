"""benchmarks/planner_published: what AMP's step waits for, on devices where all else takes no time."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "planner_published"
MIB, BYTES_PER_S = 2**20, 1e6


@pytest.fixture
def amp(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("amp", "families", "transformer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("amp")


def step_s(
    amp: ModuleType, *, tp: int, dp: int, micro_batch: int, cuts: tuple[int, ...], launch_s: float = 0.0
) -> float:
    """The step on four hosts of which only the links between them, and the launches, take time."""
    device = amp.Device(
        flops=1e30,
        memory_bytes_per_s=1e30,
        within_bytes_per_s=1e30,
        between_bytes_per_s=BYTES_PER_S,
        watts=1e30,
        per_host=4,
    )
    fitted = amp.Fitted(
        peak_share=1.0,
        half_size=1.0,
        flops_per_watt=1.0,
        fused_attention_share=1.0,
        float8_gain=1.0,
        memory_share=1.0,
        link_share=1.0,
        overlap=0.0,
        launch_s=launch_s,
    )
    trial = amp.Trial(micro_batch=micro_batch, tp=tp, dp=dp, cuts=cuts, authors_s=0.0, measured_s=0.0)
    return amp.step_s(trial, [amp.Kind(device=device, fitted=fitted)] * 4)


def test_a_stage_waits_for_mask_and_full_gradients_on_both_of_its_borders(amp: ModuleType) -> None:
    tp, micro_batch, num_micro_batches = 4, 2, 16
    activation, mask, tied = micro_batch * 2 * MIB, 2 * MIB, 2 * amp.MODEL.embedding_parameters / tp
    border = activation / tp + mask + activation
    expected = (3 * border + (num_micro_batches - 1) * 2 * border + tied) / BYTES_PER_S
    assert step_s(amp, tp=tp, dp=1, micro_batch=micro_batch, cuts=(0, 8, 14, 20, 30)) == pytest.approx(
        expected, rel=1e-3
    )


def test_data_parallel_gradients_are_reduced_in_32_bits(amp: ModuleType) -> None:
    parameters = 24 * amp.MODEL.layer_parameters + amp.MODEL.embedding_parameters
    expected = 2 * 15 / 16 * 4 * parameters / (4 * BYTES_PER_S)
    assert step_s(amp, tp=1, dp=16, micro_batch=1, cuts=(0, 30)) == pytest.approx(expected, rel=1e-3)


def test_launches_take_time_only_where_timers_wait_for_the_device(amp: ModuleType) -> None:
    def launches_s(tp: int) -> float:
        how = {"tp": tp, "dp": 16 // tp, "micro_batch": 2, "cuts": (0, 30)}
        return step_s(amp, **how, launch_s=1.0) - step_s(amp, **how)

    assert launches_s(1) == 0
    assert launches_s(4) == pytest.approx(4 * 24 * 3)  # micro-batches, layers, passes
