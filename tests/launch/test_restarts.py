"""Runs that are started again after a rank has failed."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.support.launcher import READY, TIMEOUT_S, Job, is_running, wait_until

from farspan.launch.attempts import Here, Restarts, attempt_repeatedly
from farspan.launch.attempts.attempt import Attempt
from farspan.launch.attempts.standby import Standby
from farspan.launch.attempts.waiting import HostLostError
from farspan.launch.logs import find_place
from farspan.launch.rank.notes import GATE_VARIABLE, SAVED_VARIABLE, note_saving

TIMES = """
times = int(os.environ['FARSPAN_RESTART']) + 1
open(f'{here}/times{rank}', 'w').write(str(times))
"""
"""How often the ranks were started."""

TRAINS = """
import json, torch, farspan
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
model = farspan.distribute(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]))
class ByHand:  # it has no state, and needs none of what torch loads for its optimizers
    def zero_grad(self): model.zero_grad()
    @torch.no_grad()
    def step(self): [parameter.sub_(0.1 * parameter.grad) for parameter in model.parameters()]
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01) if SAVES_IN_MEMORY else ByHand()
kept = {'model': model} | ({'optimizer': optimizer} if SAVES_IN_MEMORY else {})
loader = farspan.resumable(DataLoader(TensorDataset(torch.randn(40, 8)), batch_size=4, shuffle=True))
folder, step = f'{here}/checkpoints', 0
if farspan.latest(folder):
    step = farspan.load(folder, **kept).step
while step < 12:
    for x, in loader:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0:
            with open(f'{here}/losses', 'a') as file: print(json.dumps([step, loss.item()]), file=file)
        if step % 4 == 0:
            farspan.save(folder, **kept, step=step, memory=SAVES_IN_MEMORY).wait()
            if rank == 0: open(f'{here}/memory', 'w').write(os.environ['FARSPAN_MEMORY'])
        if step == 6 and rank == 1 and times == 1: os.kill(os.getpid(), signal.SIGKILL)
        if step == 12: break
"""


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    yield job
    job.close()


WAYS = [(False, False), (True, False), (True, True)]


@pytest.mark.parametrize(("is_in_memory", "has_standby"), WAYS)
def test_a_program_that_is_killed_goes_on_from_its_checkpoint_with_the_same_numbers(job, is_in_memory, has_standby):
    trains = TRAINS.replace("SAVES_IN_MEMORY", str(is_in_memory))
    script = "import random, torch\ntorch.manual_seed(1)\n" + TIMES + trains
    code, _, err = job.run(script, max_restarts=5, has_standby=has_standby)
    assert code == 0 and (job.folder / "times0").read_text() == "2", err
    assert "rank 1 of 2 failed: killed by SIGKILL" in err and "restart 1 of 5; step 4 is saved" in err
    losses = [json.loads(line) for line in (job.folder / "losses").read_text().splitlines()]
    steps = [step for step, _ in losses]
    assert steps in ([1, 2, 3, 4, 5, 6, *range(5, 13)], [1, 2, 3, 4, 5, *range(5, 13)])
    assert len(set(map(tuple, losses))) == 12  # a step that was taken again has the loss that it had, bit for bit
    assert (job.folder / "checkpoints").exists() != is_in_memory
    assert not Path((job.folder / "memory").read_text()).exists()


BEGUN = """
has_torch = 'torch' in sys.modules
import random
from farspan.launch.rank.notes import note_saving
before = open(f'{here}/begun{rank}').read().splitlines() if times > 1 else []
others = [line for line in before if os.path.exists(f'/proc/{line.split()[1]}')]
with open(f'{here}/begun{rank}', 'a') as file:
    draws = [random.random()]
    if rank == 0:
        import torch
        draws.append(torch.rand(1).item())
    print(times, os.getpid(), has_torch, len(others), *draws, file=file)
if rank == 0: note_saving(times)
while times < NUM_STARTS and not os.path.exists(f'{here}/logs/restart-{times}/rank1.log'): time.sleep(0.01)
"""
"""What a start finds, and that it has saved; it goes on when the next one is being prepared."""


@pytest.mark.parametrize("num_starts", [2, 3])
def test_processes_that_are_kept_ready_run_the_script_when_it_is_their_turn_and_draw_as_those_of_any_start(
    job, num_starts
):
    script = TIMES + BEGUN + READY.replace("ready{rank}", "ready{times}-{rank}")
    script = (script + "if times < NUM_STARTS: time.sleep(600)\n").replace("NUM_STARTS", str(num_starts))
    job.start(script, max_restarts=5, has_standby=True)
    for start in range(1, num_starts):
        os.kill(job.pid(f"{start}-1"), signal.SIGKILL)
    code, _, err = job.end()
    assert code == 0, err
    begun = [line.split() for line in (job.folder / "begun0").read_text().splitlines()]
    assert [line[0] for line in begun] == ["1", "2", "3"][:num_starts] and {line[3] for line in begun} == {"0"}
    assert [line[2] for line in begun] == ["False", "True", "True"][:num_starts]
    assert len(begun[0]) == 6 and len({tuple(line[4:]) for line in begun}) == 1
    assert (job.logs / f"restart-{num_starts - 1}" / "rank1.log").exists()
    assert not (job.logs / f"restart-{num_starts}").exists()


def test_after_a_start_that_was_ready_the_next_one_is_made_ready(tmp_path, monkeypatch):
    events, made, gates = queue.SimpleQueue(), [], []

    def prepare(variables):
        made.append(Mock(spec=Attempt))
        gates.append(Path(variables[GATE_VARIABLE]))
        return made[-1]

    def save():
        monkeypatch.setenv(SAVED_VARIABLE, saved)  # each start says it once
        note_saving(1, str(tmp_path / "progress"))
        events.get(timeout=TIMEOUT_S).action()

    standby = Standby(events, prepare)
    saved = standby.variables()[SAVED_VARIABLE]
    assert standby.take() is None and not made
    for number in range(2):
        save()
        save()  # one is ready already
        assert len(made) == number + 1 and gates[number].is_fifo()
        if number == 0:
            assert standby.take() is made[0] and not gates[0].exists() and standby.take() is None
    standby.close()
    assert [each.start.call_count for each in made] == [1, 1]
    assert [each.discard.call_count for each in made] == [0, 1] and not gates[1].parent.exists()


def test_what_cannot_be_kept_ready_is_refused(job):
    for options in ({}, {"max_restarts": 1, "n": 1}):
        code, _, err = job.run("", **{"n": 2, "has_standby": True, **options})
        assert code != 0 and "LaunchError: --standby is not possible here." in err


def test_an_error_of_the_program_s_own_that_comes_again_in_the_same_place_ends_the_run(job):
    script = TIMES + "print('draws', os.environ['PYTHONHASHSEED'], flush=True)\n"
    script += "open(f'{here}/printed{times}-{rank}', 'w').close()\n"
    script += "while not os.path.exists(f'{here}/printed{times}-0'): time.sleep(0.01)\n"
    script += "if rank == 1: raise ValueError(f'time {times}')\n"
    code, out, err = job.run(script, max_restarts=10)
    assert code == 1
    assert (job.folder / "times1").read_text() == "2" and err.count("ValueError: time 2") == 1
    assert "not started again: the same error came twice in the same place, and nothing was saved in between.\n" in err
    assert 'script.py", line ' in err[err.index("not started again") :]
    assert len(set(out.splitlines())) == 1  # what all ranks draw by, in all starts
    assert (job.logs / "rank1.log").exists() and (job.logs / "restart-1" / "rank1.log").exists()


def test_an_error_that_comes_again_after_more_was_saved_may_have_come_by_chance(job):
    script = "from farspan.launch.rank.notes import note_saving\n" + TIMES
    script += "if rank == 0: note_saving(min(times, 4))\n"
    code, _, err = job.run(script + "raise ValueError", 1, max_restarts=10)
    assert code == 1 and (job.folder / "times0").read_text() == "5"
    assert "restart 4 of 10; step 4 is saved" in err and "nothing was saved in between" in err


def test_a_rank_that_is_always_killed_is_started_again_as_often_as_asked(job):
    code, _, err = job.run(TIMES + "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)", max_restarts=2)
    assert code == 128 + signal.SIGKILL and (job.folder / "times1").read_text() == "3"
    assert "not started again: this was restart 2 of 2" in err


@pytest.mark.skipif(sys.platform != "linux", reason="a group is killed with its rank")
def test_what_a_rank_has_started_is_gone_before_the_next_start(job):
    script = TIMES + "if times == 1:\n"
    script += "    child = os.fork()\n    if child == 0:\n"
    script += "        signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)\n"
    script += "    open(f'{here}/child', 'w').write(str(child))\n    sys.exit(3)\n"
    script += "pid = int(open(f'{here}/child').read())\n"
    script += "print(open(f'/proc/{pid}/stat').read().split()[2] if os.path.exists(f'/proc/{pid}') else 'Z')\n"
    code, out, _ = job.run(script, 1, max_restarts=1)
    assert (code, out) == (0, "Z\n")


def test_ctrl_c_is_not_answered_by_a_restart(job):
    job.start(READY + "time.sleep(60)", max_restarts=5)
    pids = [job.pid(0), job.pid(1)]
    job.process.send_signal(signal.SIGINT)
    code, _, err = job.end()
    assert code == 130 and "restart" not in err
    wait_until(lambda: not any(map(is_running, pids)))


def test_the_place_of_an_error_does_not_depend_on_the_numbers_that_it_names():
    log = 'Traceback (most recent call last):\n  File "a.py", line {}, in f\n    boom\nValueError: {}\n'
    assert find_place(log.format(3, 1)) == find_place(log.format(3, 2)) == 'File "a.py", line 3, in f\nValueError'
    assert find_place(log.format(4, 1)) != find_place(log.format(3, 1))
    assert find_place("farspan.errors.RemoteError: rank 1 failed") == find_place("killed") == ""
    assert find_place(log.format(3, 1).replace("ValueError", "farspan.errors.ServiceError")) == ""


@pytest.mark.parametrize("most", [0, 1])
def test_a_host_that_is_lost_before_its_ranks_begin_is_a_failure_like_others(most, tmp_path):
    crews = [HostLostError("a host is lost.", why="nothing has come from it."), Here([sys.executable, "-c", ""], 1, {})]
    said = []

    def open_crew(_):
        crew = crews.pop(0)
        if isinstance(crew, HostLostError):
            raise crew
        return crew

    def run():
        more = {"files": None, "grace_s": 1.0, "says": said.append}
        variables = dict(os.environ)
        return attempt_repeatedly(
            queue.SimpleQueue(), open_crew, lambda: 1, folder=tmp_path, variables=variables, restarts=restarts, **more
        )

    restarts = Restarts(most)
    if most:
        assert run() == 0 and said == ["farspan run: a host is lost. nothing has come from it. restart 1 of 1"]
    else:
        with pytest.raises(HostLostError):
            run()
    restarts.close()
