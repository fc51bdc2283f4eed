"""`farspan plan` as a user types it."""

from __future__ import annotations

import json
import sys

import pytest
from tests.support.launcher import TIMEOUT_S

from farspan.cli.main import main

GRAPH = {
    "format": "farspan-graph/1",
    "nodes": [{"name": f"n{i}", "forward_s": 0.001, "backward_s": 0.002, "memory_bytes": 1e9} for i in range(4)],
    "edges": [{"source": f"n{i}", "target": f"n{i + 1}", "bytes": 1e6} for i in range(3)],
}
CLUSTER = '[links]\nwithin = "10 GB/s"\n[[hosts]]\nkind = "gpu"\ndevices = 2\nmemory = "2.5 GB"\n'


@pytest.fixture
def plan(tmp_path, capsys):
    (tmp_path / "graph.json").write_text(json.dumps(GRAPH))
    (tmp_path / "cluster.toml").write_text(CLUSTER)

    def call(*words: str) -> tuple[int, str, str]:
        files = ["--graph", str(tmp_path / "graph.json"), "--cluster", str(tmp_path / "cluster.toml")]
        code = main(["plan", *files, *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_json_has_plan_objective_bound_gap_and_seconds(plan) -> None:
    code, out, _ = plan("--json")
    found = json.loads(out)
    assert code == 0 and found["objective"] == "step-time"
    assert 0 < found["lower_bound_s"] <= found["value_s"] and found["search_s"] > 0
    assert found["gap"] == pytest.approx(1 - found["lower_bound_s"] / found["value_s"])
    (parts,) = found["plan"].values()
    assert sorted(name for part in parts for name in part["nodes"]) == ["n0", "n1", "n2", "n3"]
    assert all(part["memory_bytes"] <= 2.5e9 and part["nodes"] for part in parts)


def test_step_time_is_that_of_two_stages(plan) -> None:
    found = json.loads(plan("--json", "--micro-batches", "4")[1])
    assert found["value_s"] == pytest.approx(2 * 0.0062 + 3 * 0.0062)


def test_a_table_for_people(plan) -> None:
    code, out, _ = plan()
    assert code == 0 and "dp x tp" in out and "n0 .. n1" in out and "no plan is below" in out


def test_an_option_without_effect_is_refused(plan) -> None:
    for words in (("--roofline",), ("--output", "plan.json"), ("--explain", "n0")):
        code, _, err = plan(*words)
        assert code == 2 and "has no effect" in err and "try" in err


def test_planning_imports_no_torch(tmp_path) -> None:
    import subprocess

    (tmp_path / "graph.json").write_text(json.dumps(GRAPH))
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    code = (
        "import sys\nfrom farspan.cli.main import main\n"
        "main(['plan', '--graph', 'graph.json', '--cluster', 'cluster.toml'])\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, timeout=TIMEOUT_S)
