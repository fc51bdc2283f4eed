"""Roles that call each other, and a role that trains one model over its ranks."""

from __future__ import annotations

import os
import signal

import pytest
from tests.launch.roles.roles import RunOfRoles
from tests.support.launcher import is_running


@pytest.fixture
def job(tmp_path):
    job = RunOfRoles(tmp_path)
    yield job
    job.close()


LEARNER_AND_ACTORS = """
import torch, time
from farspan.errors import ServiceError
class Buffer:
    def __init__(self): self.batches, self.rest = [], {}
    def add(self, batch): self.batches.append(batch); return len(self.batches)
    def said(self, who, how): self.rest[who] = how
if role == 'actor':
    buffer = farspan.service('buffer')
    for step in range(3):
        buffer.add({'x': torch.full((4, 8), float(rank + step))})
    sys.exit()
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
model = farspan.distribute(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
buffer = Buffer()
if rank == 0: farspan.expose('buffer', buffer)
for step in range(6):
    end = time.monotonic() + 100
    while rank == 0 and len(buffer.batches) <= step: assert time.monotonic() < end; time.sleep(0.01)
    batch = farspan.from_rank(0, buffer.batches[step] if rank == 0 else None)
    optimizer.zero_grad()
    loss = model(batch['x']).square().mean()
    loss.backward()
    optimizer.step()
    print(step, f'{loss.item():.3f}' != 'nan')
"""


def test_the_ranks_of_a_learner_are_a_world_and_actors_fill_its_buffer(job):
    code, out, err = job.run(LEARNER_AND_ACTORS, "--role", "actor=2", "--role", "learner=2")
    assert code == 0 and out == "".join(f"{step} True\n" for step in range(6)), err
    assert "failed" not in err and "copies" not in err


KILLED = """
import torch, time
from farspan.errors import ServiceError
class Actor:
    def act(self):
        if os.fork(): ready()  # the child lives on, as the worker of a loader may
        time.sleep(1000)
    def name(self): return f"{role} {os.environ['FARSPAN_RESTART']}"
if role == 'actor':
    farspan.expose('actor', Actor()).wait()
actor = farspan.service('actor', timeout=100)
print(actor.name())
acting = actor.future.act()
try:
    acting.result(100)
except ServiceError as error:
    print(error.is_loss, str(error).splitlines()[0])
print(actor.name())  # waits until it has been started again
"""


def test_a_killed_process_is_lost_to_its_callers_and_back_once_started_again(job):
    job.start(KILLED, "--role", "actor=1", "--role", "learner=1", "--max-restarts", "1")
    os.kill(job.pid("actor0"), signal.SIGKILL)
    code, out, err = job.end()
    assert code == 0, err
    assert out == "actor 0\nTrue the service 'actor' of actor 0 is lost while act is called.\nactor 1\n"


FORKED = """
import time
class Names:
    def who(self, rank): return rank * 2
if role == 'server': farspan.expose('names', Names()).wait()
names = farspan.service('names', timeout=100)
assert names.who(1) == 2
child = os.fork()
if not child:
    try:
        assert names.who(2) == 4
        print('child')
        sys.stdout.flush()
    finally:
        os._exit(0)
os.waitpid(child, 0)
print(names.who(3))
"""


def test_a_forked_child_calls_over_a_connection_of_its_own(job):
    code, out, err = job.run(FORKED, "--role", "server=1", "--role", "caller=1")
    assert (code, out) == (0, "child\n6\n"), err


def test_a_wait_for_a_service_that_never_comes_names_what_there_is(job):
    script = "if role == 'server': farspan.expose('bufer', []).wait()\n"
    script += "farspan.service('bufer')\nfarspan.service('buffer', timeout=0.1)\n"
    code, _, err = job.run(script, "--role", "server=1", "--role", "caller=1")
    assert code == 1
    assert "DeadlineError: caller 0 waited 0.1 s for the service 'buffer'." in err and "there is 'bufer'" in err


TWO_WORLDS = """
import time, torch
from torch import nn
model = farspan.distribute(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
with torch.no_grad(): value = model(torch.ones(1, 4)).sum().item()
class Result:
    def take(self, value): print('taken', value == value)
if role == 'reference':
    ready()
    if rank == 1: time.sleep(1000)
    model(torch.ones(1, 4)).sum().item()
ready()
end = time.monotonic() + 100
while not os.path.exists(f'{here}/go'): assert time.monotonic() < end; time.sleep(0.01)
print(f'{value == value}')
"""


def test_the_ranks_of_another_role_that_is_a_world_fail_together_and_the_run_goes_on(job):
    job.start(TWO_WORLDS, "--role", "reference=2", "--role", "learner=2", "--files", "all")
    first, second = job.pid("reference0"), job.pid("reference1")
    os.kill(second, signal.SIGKILL)
    job.wait_until_said("the run goes on without reference")
    assert not is_running(first) and not is_running(second)
    job.pid("learner1")
    (job.folder / "go").touch()
    code, out, err = job.end()
    assert (code, out) == (0, "True\n"), err
    assert "reference: rank 1 of 2 failed: killed by SIGKILL" in err and "the run goes on without reference" in err
