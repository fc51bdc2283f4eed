"""The order of AMP's trials: of those that were not fitted to, on T4 alone and on V100 and T4 together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from amp import RANGES, T4, V100, Trial, finished_trials, kind_of, step_s
from fitting import fit, median_error, spearman
from transformer import Fitted

__all__ = ["rank_mixed", "rank_trials"]

TRIALS_STEP = 3
"""Every third of the trials is fitted to."""
V100_RANGES = {  # from this start all three fits end where the loss is least
    "peak_share": RANGES["peak_share"],
    "between_bytes_per_s": (1e7, 1e8, V100.between_bytes_per_s),
    "start_s": (1e-5, 4e-3, 2e-2),
}
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


def rank_mixed(shared: Fitted, report: list[dict[str, Any]]) -> list[float]:
    """The same of the trials on V100 and T4; first with nothing fitted to any of them. That is one of the figures.

    The numbers of a T4 come from all homogeneous trials. Without a fit a V100 reaches the same shares of its data
    sheet's peak, memory and NVLink, takes as long to start a layer, and no longer to start an all-reduce; its host
    sends as many bytes a second to others as a host of T4 does, or what its network card has, if that is less.
    """
    homogeneous, trials = finished_trials("homogeneous"), finished_trials("het_cluster")
    measured = [trial.measured_s for trial in trials]
    t4 = _fit_t4(homogeneous, shared)
    _print_authors("12 V100 and 4 T4", trials)

    def predict(trial: Trial, v100: Found) -> float:
        return step_s(trial, [*[kind_of(V100, shared, v100)] * 3, kind_of(T4, shared, t4)])

    unfitted = t4 | {
        "within_bytes_per_s": V100.within_bytes_per_s * t4["within_bytes_per_s"] / T4.within_bytes_per_s,
        "between_bytes_per_s": min(V100.between_bytes_per_s, t4["between_bytes_per_s"]),
    }
    predicted = [predict(trial, unfitted) for trial in trials]
    report += list(_rows("AMP mixed, nothing fitted", trials, predicted))
    ranks = [spearman(predicted, measured)]
    print(
        f"12 V100 and 4 T4, nothing fitted: Spearman {ranks[0]:.4f} of {len(trials)}, median error "
        f"{median_error(predicted, measured):.1%}; {_first_choice(predicted, measured)}"
    )
    return ranks + _rank_by_thirds(
        "12 V100 and 4 T4",
        trials,
        lambda known: fit(
            lambda free: [predict(trial, unfitted | free) for trial in known],
            [trial.measured_s for trial in known],
            V100_RANGES,
        ),
        lambda trial, found: predict(trial, unfitted | found),
        report,
    )


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
