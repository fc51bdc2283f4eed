"""The order of AMP's trials: of those that were not fitted to, on T4 alone and on V100 and T4 together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from amp import RANGES, T4, V100, Trial, finished_trials, kind_of, step_s
from fitting import fit, median_error, spearman
from transformer import Fitted

__all__ = ["rank_mixed", "rank_trials"]

TRIALS_STEP = 3
"""Every third of the homogeneous trials is fitted to."""
NEAR = 0.20
Found = dict[str, float]


def rank_trials(shared: Fitted, report: list[dict[str, Any]]) -> list[float]:
    """Spearman of the homogeneous trials that were not fitted to, for each third that is; the first is reported."""
    trials = finished_trials("homogeneous")
    _print_authors("16 T4", trials)
    return _rank_by_thirds(
        "16 T4",
        trials,
        lambda known: _fit_t4(known, shared),
        lambda trial, found: step_s(trial, [kind_of(T4, shared, found)] * 4),
        report,
    )


def rank_mixed(shared: Fitted, report: list[dict[str, Any]]) -> float:
    """Spearman of the trials on V100 and T4, with nothing fitted to any of them.

    The numbers of a T4 come from all homogeneous trials. A V100 reaches the share of its peak that the devices of the
    other tables reach, the same share of its NVLink as a T4 does of its PCIe, and takes as long to start a layer; its
    host sends as many bytes a second to others as a host of T4 does, or what its network card has, if that is less.
    """
    trials = finished_trials("het_cluster")
    measured = [trial.measured_s for trial in trials]
    t4 = _fit_t4(finished_trials("homogeneous"), shared)
    v100 = t4 | {
        "peak_share": shared.peak_share,
        "within_bytes_per_s": V100.within_bytes_per_s * t4["within_bytes_per_s"] / T4.within_bytes_per_s,
        "between_bytes_per_s": min(V100.between_bytes_per_s, t4["between_bytes_per_s"]),
    }
    machine = "12 V100 and 4 T4"
    hosts = [*[kind_of(V100, shared, v100)] * 3, kind_of(T4, shared, t4)]
    predicted = [step_s(trial, hosts) for trial in trials]
    report += list(_rows("AMP mixed, nothing fitted", trials, predicted))
    _print_authors(machine, trials)
    rank = spearman(predicted, measured)
    print(
        f"{machine}, nothing fitted: Spearman {rank:.4f} of {len(trials)}, median error "
        f"{median_error(predicted, measured):.1%}; {_first_choice(predicted, measured)}"
    )
    _print_subsets(predicted, measured)
    return rank


def _print_subsets(predicted: Sequence[float], measured: Sequence[float]) -> None:
    """How much of the rank correlation hangs on which trials are looked at, and on those that are far off."""
    pairs = list(zip(predicted, measured, strict=True))

    def of(kept: Sequence[tuple[float, float]]) -> str:
        return f"{spearman(*zip(*kept, strict=True)):.3f} of {len(kept)}"

    for number in range(TRIALS_STEP):
        print("  without a third:", of([pair for index, pair in enumerate(pairs) if index % TRIALS_STEP != number]))
    one_out = [spearman(*zip(*pairs[:index], *pairs[index + 1 :], strict=True)) for index in range(len(pairs))]
    print(f"  without one: {min(one_out):.3f} to {max(one_out):.3f}")
    near = [(ours, theirs) for ours, theirs in pairs if abs(ours / theirs - 1) <= NEAR]
    exact = [(theirs if abs(ours / theirs - 1) <= NEAR else ours, theirs) for ours, theirs in pairs]
    print(f"  predicted within {NEAR:.0%}: {of(near)}; were those exact: {of(exact)}")


def _fit_t4(known: Sequence[Trial], shared: Fitted) -> Found:
    return fit(
        lambda free: [step_s(trial, [kind_of(T4, shared, free)] * 4) for trial in known],
        [trial.measured_s for trial in known],
        RANGES,
    )


def _rank_by_thirds(
    machine: str,
    trials: Sequence[Trial],
    fit_to: Callable[[Sequence[Trial]], Found],
    predict: Callable[[Trial, Found], float],
    report: list[dict[str, Any]],
) -> list[float]:
    measured = [trial.measured_s for trial in trials]
    ranks: list[float] = []
    for number in range(TRIALS_STEP):
        found = fit_to(trials[number::TRIALS_STEP])
        print(f"{machine}:", ", ".join(f"{name} {value:.3g}" for name, value in found.items()))
        predicted = [predict(trial, found) for trial in trials]
        others = [index for index in range(len(trials)) if index % TRIALS_STEP != number]
        pairs = [[values[index] for index in others] for values in (predicted, measured)]
        ranks.append(spearman(*pairs))
        print(
            f"{machine}, fitted on {len(trials) - len(others)} trials: Spearman {ranks[-1]:.4f} of {len(others)} "
            f"others ({spearman(predicted, measured):.4f} of all), median error {median_error(*pairs):.1%}; "
            f"{_first_choice(predicted, measured)}",
            flush=True,
        )
        if number == 0:
            report += list(_rows(f"AMP, {machine}", trials, predicted))
    return ranks


def _rows(family: str, trials: Sequence[Trial], predicted: Sequence[float]) -> Iterator[dict[str, Any]]:
    for trial, seconds in zip(trials, predicted, strict=True):
        yield {"family": family, "name": trial.name, "measured_s": trial.measured_s, "predicted_s": seconds}


def _print_authors(machine: str, trials: Sequence[Trial]) -> None:
    pairs = [trial.authors_s for trial in trials], [trial.measured_s for trial in trials]
    print(f"{machine}, AMP's authors: Spearman {spearman(*pairs):.4f}, median error {median_error(*pairs):.1%}")


def _first_choice(predicted: Sequence[float], measured: Sequence[float]) -> str:
    return f"first choice {measured[predicted.index(min(predicted))]} s, best {min(measured)} s"
