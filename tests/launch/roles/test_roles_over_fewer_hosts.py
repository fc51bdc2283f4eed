"""Roles with --nnodes MIN:MAX: processes of a host that is lost are started on others, where slots are free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.launch.hosts.away import Launcher

from farspan.errors import LaunchError
from farspan.launch.hosts import Host
from farspan.launch.roles import Role
from farspan.launch.roles.slots import Slots, lay

HOSTS = [Host(name=name, num_processes=2) for name in "abc"]
ACTOR, LEARNER = Role(name="actor", num_processes=2), Role(name="learner", num_processes=3)


def names(hosts) -> str:
    return " ".join(f"{host.name}{host.num_processes}" for host in hosts)


def test_a_process_gets_a_slot_that_is_free_and_none_that_the_last_role_needs() -> None:
    slots = Slots("learner")
    assert {name: names(of) for name, of in lay(slots, [ACTOR, LEARNER], HOSTS).items()} == {
        "learner": "a2 b1",
        "actor": "b1 c1",
    }
    slots.lose("b")
    assert slots.move("actor", 0) is None  # the free slot of c is that of the learner
    freed = []
    slots.when_free("actor", lambda: freed.append(True))
    assert names(slots.lay(LEARNER, [HOSTS[0], HOSTS[2]])) == "a2 c1" and len(freed) == 1
    assert slots.move("actor", 0) is None
    slots.set_hosts(HOSTS)
    moved = slots.move("actor", 0)
    assert len(freed) == 2 and moved is not None and (moved[0].name, moved[0].num_beside, moved[1]) == ("b", 0, 0)
    slots.lose("c")
    moved = slots.move("actor", 1)
    assert moved is None  # the last role has lost a slot of c, and the free one of b is kept for it
    assert names(slots.lay(LEARNER, HOSTS[:2])) == "a2 b1"


def test_a_process_that_moves_gets_a_number_that_no_other_one_of_its_role_has_there() -> None:
    slots = Slots("main")
    several, main = Role(name="actor", num_processes=3), Role(name="main", num_processes=1)
    lay(slots, [several, main], [Host(name="a", num_processes=3), Host(name="b", num_processes=1)])
    slots.give_up("actor", 0)
    slots.lose("b")
    moved = slots.move("actor", 2)
    assert moved is not None and (moved[0].name, moved[1]) == ("a", 0)  # that of 1 is 1


def test_too_few_slots_are_an_error_that_says_which_there_are() -> None:
    slots = Slots("learner")
    lay(slots, [ACTOR, LEARNER], HOSTS)
    with pytest.raises(LaunchError) as error:
        slots.lay(LEARNER, HOSTS[1:])
    assert error.value.what == "3 processes of learner, and 2 free slots on 2 hosts."
    assert error.value.why == "b has 2, 1 in use; c has 2, 1 in use."


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[object]:
    made: list[Launcher] = []

    def start(hosts: str, *options: str, **more) -> Launcher:
        made.append(Launcher(tmp_path, hosts, "--nnodes", "1:3", "--max-restarts", "2", *options, **more))
        return made[-1]

    yield start
    for each in made:
        each.close()


COMES_AND_GOES = """
import farspan
class Log:
    def __init__(self): self.lines = []
    def add(self, *line): self.lines.append(line)
if role == "actor":
    host = os.path.basename(os.environ["TMPDIR"])
    farspan.service("log", timeout=100).add(rank, start, host, os.environ["FARSPAN_LOCAL_RANK"], ranks)
    time.sleep(1000)
log = Log()
farspan.expose("log", log)
while sum(line[1] for line in log.lines) < 2: time.sleep(0.01)
for line in sorted(log.lines): print("heard", *line, flush=True)
"""


def test_processes_of_a_lost_host_are_started_on_others_or_when_it_is_back(launch) -> None:
    hosts = "localhost:1,127.0.0.2:2,127.0.0.3:1"
    launcher = launch(hosts, "--role", "actor=2", "--role", "learner=1", script=COMES_AND_GOES)
    launcher.lose("127.0.0.2", "actor0-0", "actor0-1")
    launcher.wait_for("; it waits for a free slot")
    assert "; restart 1 of 2 of it, on 127.0.0.3\n" in launcher.said()
    launcher.bring_back("127.0.0.2")
    code, said = launcher.end()
    assert code == 0, said
    assert "127.0.0.2 answers again, and its slots are free" in said
    assert " has a slot: restart 1 of 2 of it, on 127.0.0.2" in said
    again = [line.split()[1:] for line in said.splitlines() if line.startswith("heard") and line.split()[2] == "1"]
    assert [each[0] for each in again] == ["0", "1"], said
    assert sorted(each[2] for each in again) == ["127.0.0.2", "127.0.0.3"], said
    assert [each[3:] for each in again] == [["0", "2"], ["0", "2"]], said


MOVES = """
print("begins", start, os.path.basename(os.environ["TMPDIR"]), flush=True)
time.sleep(1000)
"""


def test_the_last_role_is_started_on_the_slots_that_are_free_or_else_ends_with_an_error(launch) -> None:
    hosts = "127.0.0.2:1,localhost:2,127.0.0.3:1"
    launcher = launch(hosts, "--role", "actor=1", "--role", "learner=2", script=MOVES, deadline_s=3)
    launcher.lose("127.0.0.2", "learner0-0")
    launcher.wait_for("begins 1 own")
    launcher.lose("127.0.0.3", "learner1-1")
    code, said = launcher.end()
    assert code == 2 and "waits for 127.0.0.2, 127.0.0.3 to come back" in said, said
    assert "LaunchError: 2 processes of learner, and 1 free slot on 1 hosts.\n  why  localhost has 2, 1 in use." in said
