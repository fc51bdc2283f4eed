"""`farspan plan train.py`: from a program to its plan, printed, saved and drawn."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from farspan.cli.arguments.hint_options import read_hints
from farspan.cli.arguments.misplaced import hint_at_misplaced
from farspan.cli.recalibrate_command import format_recalibration, read_measured, recalibrated
from farspan.cli.script import check_script, profile_script
from farspan.outputs import check_outputs, write_json, write_line, write_output, write_text
from farspan.progress import said_if_slow
from farspan.units import count_of

if TYPE_CHECKING:
    from farspan.planner.optimize import SearchResult
    from farspan.profile import StepProfile

__all__ = ["plan_script"]

_RARE_IN_SCRIPTS = ("--micro-batches", "--max-memory", "--pin", "--together", "--stages", "--cluster", "--roofline")
"""Options of which it is said that they stand behind a script which does not name them."""


def plan_script(arguments: argparse.Namespace) -> int:
    """Run the program up to its first steps, find the plan, write plan.json and plan.html."""
    from farspan.cluster import read_cluster

    script_argv: list[str] = arguments.script_argv
    hints = read_hints(arguments)  # "--pin head rank:1 train.py" has another script
    check_script(script_argv)
    hint_at_misplaced("plan", script_argv, _RARE_IN_SCRIPTS)
    output: str = "plan.json" if arguments.output is None else arguments.output
    page: str = "plan.html" if arguments.html is None else arguments.html
    inputs = [arguments.cluster, arguments.recalibrate, *(script_argv[:1] if script_argv[0] != "-m" else [])]
    check_outputs({"--output": output, "--html": page}, inputs)
    given = None if arguments.cluster is None else read_cluster(arguments.cluster)
    measured = None if arguments.recalibrate is None else read_measured(output, arguments.recalibrate)

    # What follows imports torch, and may take long.
    from farspan.planner.optimize import best_plan, explain, format_result
    from farspan.profile import costed_graph, this_machine
    from farspan.report import predicted_page

    profile, hints = profile_script(script_argv, given, roofline=arguments.roofline, fresh=arguments.fresh, hints=hints)
    cluster = given or this_machine()
    graph = costed_graph(profile, cluster, roofline=arguments.roofline)
    with said_if_slow("searching for a plan", write_line):
        result = best_plan(graph, cluster, arguments.micro_batches or profile.num_micro_batches, hints=hints)
    said = ""
    if measured is not None:
        found = recalibrated(result, graph, cluster, measured=measured, hints=hints)
        said = f"{format_recalibration(found)}\n"
        if not found.is_worth_it:
            if arguments.json:
                write_json(_members(result, profile, output))
            else:
                write_output(said.rstrip())
            return 0
        result = found.result
    text = said + format_result(result, spread=profile.spread)
    if arguments.explain is not None:
        text += f"\n{explain(result, arguments.explain)}"
    result.best.plan.save(output)
    write_text(
        page,
        predicted_page(
            result.best.simulation,
            title=f"farspan plan: {' '.join(script_argv)}",
            names=[f"{stage.nodes[0]} .. {stage.nodes[-1]}" for stage in result.best.stages],
            plan=text,
            environment=_facts(profile),
        ),
    )
    if arguments.json:
        write_json(_members(result, profile, output))
        return 0
    script = " ".join(script_argv)
    count = result.best.plan.num_ranks
    if result.is_one_device:
        start = f"to run it: python {script}"
    elif cluster.num_hosts > 1:
        start = f"{count} processes, their ranks counted host by host as in {arguments.cluster}"
    else:
        start = f"farspan run -n {count} {script}"
    if not result.is_one_device:
        start = f'farspan.distribute(model, plan="{output}"), then {start}'
    write_output("\n".join([text, *_facts(profile), f"wrote {output} and {page}", start]))
    return 0


def _facts(profile: StepProfile) -> list[str]:
    is_measured = any(unit.forward_s for unit in profile.units)
    how = f"was measured on {profile.device}" if is_measured else "was counted and not measured"
    return [
        f"what each of {count_of(len(profile.units), 'module')} takes {how}",
        *(f"note: {note}" for note in profile.notes),
    ]


def _members(result: SearchResult, profile: StepProfile, output: str) -> dict[str, Any]:
    best = result.best
    stages = [
        {
            "where": stage.where,
            "class": stage.device,
            "nodes": list(stage.nodes),
            "hints": {name: result.problem.whys[name] for name in stage.nodes if name in result.problem.whys},
            "remat": list(stage.remat),
            "forward_s": stage.forward_s,
            "backward_s": stage.backward_s,
            "parameter_bytes": stage.parameter_bytes,
            "in_flight": stage.in_flight,
            "memory_bytes": stage.memory_bytes,
            "busy": stage.busy,
        }
        for stage in best.stages
    ]
    return {
        "format": "farspan-answer/1",
        "plan": output,
        "step_s": best.step_s,
        "spread": profile.spread,
        "bubble": best.bubble,
        "lower_bound_s": result.bound,
        "gap": result.gap,
        "search_s": result.search_s,
        "micro_batches": best.num_micro_batches,
        "stages": stages,
        "links": [
            {"source": source, "target": target, "bytes": size} for (source, target), size in best.link_bytes.items()
        ],
        "others": [{"what": each.what, "step_s": each.step_s, "why": each.why} for each in result.rejected],
        "notes": list(profile.notes),
    }
