"""Roles whose processes are on two hosts."""

from __future__ import annotations

import os
import signal

import pytest
from tests.launch.roles.hosts import RunOnHosts
from tests.support.launcher import is_running

from farspan.launch.hosts import Host
from farspan.launch.roles import Role
from farspan.launch.roles.slots import Slots, lay


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("FARSPAN_SECRET", "known to both hosts")
    job = RunOnHosts(tmp_path)
    yield job
    job.close()


@pytest.mark.parametrize(
    ("slots", "roles", "found"),
    [
        ({"a": 2, "b": 4}, {"actor": 4, "learner": 2}, {"learner": "a2", "actor": "b4"}),
        ({"a": 2, "b": 2}, {"data": 1, "actor": 1, "learner": 2}, {"learner": "a2", "data": "b1", "actor": "b1"}),
        ({"a": 1, "b": 4}, {"actor": 2, "learner": 2}, {"learner": "a1 b1", "actor": "b2"}),
        ({"a": 8, "b": 1}, {"actor": 1, "learner": 1}, {"learner": "a1", "actor": "a1"}),
    ],
)
def test_roles_are_laid_over_slots_in_order_the_last_one_first(slots, roles, found):
    hosts = [Host(name=name, num_processes=count) for name, count in slots.items()]
    laid = lay(Slots("learner"), [Role(name=name, num_processes=count) for name, count in roles.items()], hosts)
    assert {name: " ".join(f"{each.name}{each.num_processes}" for each in of) for name, of in laid.items()} == found
    for of in laid.values():
        for host in of:
            others = sum(each.num_processes for other in laid.values() for each in other if each.name == host.name)
            assert host.num_processes + host.num_beside == others


WORLD = """
class Log:
    def __init__(self): self.lines = []
    def add(self, line): self.lines.append(line)
if role == 'actor':
    farspan.service('log', timeout=100).add((rank, os.environ['FARSPAN_LOCAL_RANK'], os.environ['FARSPAN_WORLD_SIZE']))
    time.sleep(1000)
log = Log()
if rank == 0: farspan.expose('log', log)
import torch
from torch import nn
model = farspan.distribute(nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]))
for step in range(2):  # without an optimizer, for which torch loads much
    model.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    with torch.no_grad(): [parameter.sub_(0.1 * parameter.grad) for parameter in model.parameters()]
while rank == 0 and len(log.lines) < 2: time.sleep(0.01)
print(sorted(log.lines))
if rank == 1: os._exit(7)
model(torch.ones(2, 4)).sum().item()
"""


def test_the_last_role_is_one_program_over_hosts_and_ends_the_run(job):
    job.slots = (1, 3)
    code, out, err = job.run(WORLD, "--role", "actor=2", "--role", "learner=2")
    assert out == "[(0, '0', '2'), (1, '1', '2')]\n", err
    assert "farspan run: learner: localhost has rank 0, " in err
    assert code == 7 and "farspan run: learner: rank 1 of 2 failed: exit code 7." in err
    assert job.end_second()[0] == 7


COMES_AND_GOES = """
if role == 'actor':
    print('start', os.environ['FARSPAN_RESTART']); ready(); time.sleep(1000)
while not os.path.exists(f'{here}/go'): time.sleep(0.01)
print('done')
"""


def test_a_process_of_another_role_on_another_host_comes_and_goes(job):
    job.start(COMES_AND_GOES, "--role", "actor=2", "--role", "learner=1", "--max-restarts", "1")
    other = job.pid("actor1")
    for _ in range(2):
        os.kill(job.pid("actor0"), signal.SIGKILL)
    job.wait_until_said("actor 0 was killed by SIGKILL; the run goes on without it; its log is")
    assert is_running(other)
    (job.folder / "go").touch()
    code, out, err = job.end()
    assert (code, out) == (0, "done\n") and "actor 0 was killed by SIGKILL; restart 1 of 1 of it" in err
    assert job.log("actor/rank0.log") == "start 0\n" and job.log("actor/restart-1/rank0.log") == "start 1\n"
    assert job.end_second()[0] == 0 and not is_running(other)


def test_a_process_of_a_host_that_is_lost_is_started_on_one_that_comes(job):
    job.slots, job.nnodes = (1, 1), "1:2"
    job.start(COMES_AND_GOES, "--role", "actor=1", "--role", "learner=1", "--max-restarts", "1")
    job.pid("actor0")
    with job.second:
        job.second.kill()
    job.wait_until_said("it waits for a free slot")
    job.start_second()
    job.wait_until_said("actor 0 has a slot: restart 1 of 1 of it, on ")
    job.pid("actor0")
    (job.folder / "go").touch()
    code, _, err = job.end()
    assert code == 0 and err.count(" has come, with 1 process") == 2, err
    assert job.log("actor/restart-1/rank0.log") == "start 1\n" and job.end_second()[0] == 0


def test_a_signal_ends_the_roles_on_all_hosts(job):
    job.start("ready(); time.sleep(1000)\n", "--role", "actor=2", "--role", "learner=1")
    pids = [job.pid(process) for process in ("actor0", "actor1", "learner0")]
    job.process.send_signal(signal.SIGINT)
    code, _, err = job.end()
    assert code == 130 and err.count("SIGINT") == 2, err
    assert job.end_second()[0] == 130 and not any(map(is_running, pids))


def test_too_few_slots_are_said_to_all_hosts(job):
    code, _, err = job.run("", "--role", "actor=3", "--role", "learner=1")
    assert code == 2 and "4 processes of 2 roles, and 3 slots on 2 hosts." in err
    assert job.end_second()[0] == 1
