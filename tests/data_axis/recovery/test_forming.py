"""Who waits, while a new world is formed, for a rank that is lost meanwhile, finds that it will not come."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from farspan.comm.rendezvous.records import absence
from farspan.execute.data_axis.recovery.forming import Forming
from farspan.torch_private.groups import PrefixStore


@pytest.mark.parametrize("launcher", ["run", "hosts"])
def test_a_rank_that_is_lost_meanwhile_leaves_word_where_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    of_start, of_world = HashStore(), HashStore()
    peers: Any = SimpleNamespace(launcher=launcher, store=of_start, host="a")
    membership: Any = SimpleNamespace(rank=0)
    forming: Any = Forming(peers, "a", membership, 1.0)
    monkeypatch.setattr(forming, "_open", lambda place, **limits: of_world, raising=False)
    forming.hear([2])  # no world is formed
    forming._forming = SimpleNamespace(generation=3, ranks=[0, 2, 5])
    if launcher == "hosts":
        forming.hear([2])  # nobody waits yet: its store is not known
        assert of_world.num_keys() == 0
        forming._place = ("b", 5)
    forming.hear([2, 7])
    written, other = (of_start, of_world) if launcher == "run" else (of_world, of_start)
    assert written.num_keys() == 3 and other.num_keys() == 0
    found = PrefixStore("generation 3", written)
    for key in ("rank 1", "joined 1", "relay 1"):
        assert json.loads(found.get(key)) == json.loads(json.dumps(absence("it is lost")))
