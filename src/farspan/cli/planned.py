"""`farspan plan train.py`: from a program to its plan, printed, saved and drawn."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from farspan.cli.hints import read_hints
from farspan.cli.recalibrate import format_recalibration, recalibrated
from farspan.cli.script import profile_script
from farspan.outputs import write_text

if TYPE_CHECKING:
    from farspan.planner.answer import Answer
    from farspan.profile import StepProfile

__all__ = ["plan_script"]


def plan_script(arguments: argparse.Namespace) -> int:
    """Run the program up to its first steps, find the plan, write plan.json and plan.html."""
    from pathlib import Path

    from farspan.cluster import read_cluster
    from farspan.planner.answer import best_plan, explain, format_answer
    from farspan.profile import costed_graph, this_machine
    from farspan.report import forecast_page

    given = None if arguments.cluster is None else read_cluster(arguments.cluster)
    profile, hints = profile_script(
        arguments.script_argv,
        given,
        roofline=arguments.roofline,
        fresh=arguments.fresh,
        hints=read_hints(arguments),
    )
    cluster = given or this_machine()
    graph = costed_graph(profile, cluster, roofline=arguments.roofline)
    answer = best_plan(graph, cluster, arguments.micro_batches or profile.num_micro_batches, hints=hints)
    output, page = Path(arguments.output or "plan.json"), Path(arguments.html or "plan.html")
    said = ""
    if arguments.recalibrate is not None:
        found = recalibrated(answer, graph, cluster, plan=output, step=Path(arguments.recalibrate), hints=hints)
        said = f"{format_recalibration(found)}\n"
        if not found.is_worth_it:
            print(json.dumps(_members(answer, profile, str(output))) if arguments.json else said.rstrip())
            return 0
        answer = found.answer
    text = said + format_answer(answer, spread=profile.spread)
    if arguments.explain is not None:
        text += f"\n{explain(answer, arguments.explain)}"
    answer.best.plan.save(output)
    write_text(
        page,
        forecast_page(
            answer.best.simulation,
            title=f"farspan plan: {' '.join(arguments.script_argv)}",
            names=[f"{stage.nodes[0]} .. {stage.nodes[-1]}" for stage in answer.best.stages],
            plan=text,
            environment=_facts(profile),
        ),
    )
    if arguments.json:
        print(json.dumps(_members(answer, profile, str(output))))
        return 0
    sys.stdout.write(f"{text}\n" + "".join(f"{fact}\n" for fact in _facts(profile)))
    script = " ".join(arguments.script_argv)
    count = answer.best.plan.num_ranks
    start = f"farspan run -n {count} {script}"
    if cluster.num_hosts > 1:
        start = f"{count} processes, their ranks counted host by host as in {arguments.cluster}"
    sys.stdout.write(f'wrote {output} and {page}\nfarspan.distribute(model, plan="{output}"), then {start}\n')
    return 0


def _facts(profile: StepProfile) -> list[str]:
    how = f"measured on {profile.device}" if any(atom.forward_s for atom in profile.atoms) else "counted, not measured"
    return [
        f"costs: {len(profile.atoms)} pieces, {profile.num_unique} kinds, {how}",
        *(f"note: {note}" for note in profile.notes),
    ]


def _members(answer: Answer, profile: StepProfile, output: str) -> dict[str, Any]:
    best = answer.best
    stages = [
        {
            "where": stage.where,
            "class": stage.device,
            "nodes": list(stage.nodes),
            "hints": {name: answer.problem.whys[name] for name in stage.nodes if name in answer.problem.whys},
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
        "lower_bound_s": answer.bound,
        "gap": answer.gap,
        "search_s": answer.search_s,
        "micro_batches": best.num_micro_batches,
        "stages": stages,
        "links": [
            {"source": source, "target": target, "bytes": size} for (source, target), size in best.link_bytes.items()
        ],
        "others": [{"what": each.what, "step_s": each.step_s, "why": each.why} for each in answer.losers],
        "notes": list(profile.notes),
    }
