"""Objects that are called by name, within one process."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.launcher import wait_until

import farspan
from farspan.errors import DeadlineError, LaunchError, RecordError, ServiceError
from farspan.launch.membership.lines import listen_in, socket_to
from farspan.services.names import names_of_run

TIMEOUT_S = 60.0


@dataclasses.dataclass
class Sample:
    name: str
    state: torch.Tensor


class Buffer:
    limit = 10

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)

    def add(self, item: Any, *, times: int = 1) -> int:
        self.items += [item] * times
        return len(self.items)

    def get(self, index: int) -> Any:
        return self.items[index]

    def same(self, value: Any) -> Any:
        return value

    def fail(self) -> None:
        raise KeyError("the buffer has no such thing")

    def leave(self) -> None:
        raise SystemExit(3)

    def give_code(self) -> Any:
        return lambda: 1

    def wait_in_line(self) -> int:
        self.entered.release()
        assert self.gate.wait(TIMEOUT_S)
        return len(self.items)

    def _secret(self) -> int:
        return 1

    @property
    def size(self) -> int:
        return len(self.items)


@pytest.fixture
def buffer():
    buffer = Buffer()
    with farspan.expose("buffer", buffer):
        yield buffer


def test_methods_are_called_and_return(buffer: Buffer) -> None:
    service = farspan.service("buffer", timeout=TIMEOUT_S)
    assert service.add("x") == 1
    assert service.add("y", times=3) == 4
    assert [service.get(i) for i in range(4)] == ["x", "y", "y", "y"]
    assert repr(service) == "farspan.service('buffer')"


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -(1 << 70), 1.5, float("inf"), 1 + 2j, "text \ud800 \0", "l" * 50_000, b"bytes", (1, (2,)),
        [1, [2]], {"a": 1, 2: "b", (1, 2): None}, {1, 2}, range(3), slice(1, 2), torch.float16, [],
    ],
)  # fmt: skip
def test_plain_values_arrive_as_they_are(buffer: Buffer, value: Any) -> None:
    found = farspan.service("buffer", timeout=TIMEOUT_S).same(value)
    assert found == value and type(found) is type(value)


def test_tensors_arrays_and_dataclasses_arrive_as_they_are(buffer: Buffer) -> None:
    service = farspan.service("buffer", timeout=TIMEOUT_S)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        value = (torch.arange(12).reshape(3, 4) % 2).to(dtype)
        found = service.same(value.t())
        assert found.dtype == dtype and torch.equal(found, value.t())
    sample = service.same(Sample("s", torch.ones(2)))
    assert type(sample) is Sample and sample.name == "s" and torch.equal(sample.state, torch.ones(2))
    tensors = service.same({"w": torch.zeros(0, 3), "v": [torch.tensor(2.0), torch.full((1 << 18,), 7.0)]})
    assert tensors["w"].shape == (0, 3) and tensors["v"][0].item() == 2.0 and tensors["v"][1].sum() == 7.0 * (1 << 18)
    array = service.same(np.arange(3, dtype=np.int16))
    assert array.dtype == np.int16 and array.tolist() == [0, 1, 2]


def test_what_a_tensor_holds_when_it_is_sent_counts(buffer: Buffer) -> None:
    service = farspan.service("buffer", timeout=TIMEOUT_S)
    value = torch.zeros(1 << 16)
    future = service.future.add(value)
    value += 1
    future.result(TIMEOUT_S)
    assert buffer.items[0].sum() == 0


def test_futures_are_answered_in_the_order_of_the_calls(buffer: Buffer) -> None:
    service = farspan.service("buffer", timeout=TIMEOUT_S)
    futures = [service.future.add(number) for number in range(2000)]
    assert [future.result(TIMEOUT_S) for future in futures] == list(range(1, 2001))
    assert buffer.items == list(range(2000))


def test_several_callers_at_a_time(buffer: Buffer) -> None:
    def call(caller: int) -> None:
        service = farspan.service("buffer", timeout=TIMEOUT_S)
        for number in range(200):
            service.add((caller, number))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, range(8)))
    assert len(buffer.items) == 1600
    for caller in range(8):
        assert [number for who, number in buffer.items if who == caller] == list(range(200))


def test_an_exception_of_the_method_is_the_callers(buffer: Buffer) -> None:
    service = farspan.service("buffer", timeout=TIMEOUT_S)
    found = r"fail of the service .buffer. of process \d+ raised KeyError: .*no such"
    with pytest.raises(ServiceError, match=found) as e:
        service.fail()
    assert e.value.remote_type == "KeyError" and not e.value.is_loss and "in fail" in e.value.remote_traceback
    with pytest.raises(ServiceError, match="raised SystemExit"):
        service.leave()
    assert service.add(1) == 1


def test_what_is_no_method_is_named_with_those_that_are(buffer: Buffer) -> None:
    service = farspan.service("buffer", timeout=TIMEOUT_S)
    for name in ("nothing", "size", "limit", "items"):
        with pytest.raises(ServiceError, match=f"(?s)no method '{name}'.*add, fail, get, give_code, leave, same"):
            getattr(service, name)()
    with pytest.raises(AttributeError):
        service._secret()
    with pytest.raises(ServiceError, match="no method '_secret'"):
        service._send("_secret", (), {}).result(TIMEOUT_S)
    with pytest.raises(ServiceError, match=r"no method 'items\.append'"):
        service._send("items.append", (1,), {}).result(TIMEOUT_S)
    with pytest.raises(ServiceError, match="raised TypeError"):
        service.get()


def test_only_the_methods_that_are_named_can_be_called() -> None:
    with farspan.expose("few", [3, 1], methods=["append"]):
        service = farspan.service("few", timeout=TIMEOUT_S)
        service.append(2)
        with pytest.raises(ServiceError, match=r"(?s)no method 'pop'.*there is append\."):
            service.pop()


def test_what_cannot_be_sent_is_refused_before_it_is(buffer: Buffer) -> None:
    service = farspan.service("buffer", timeout=TIMEOUT_S)
    with pytest.raises(RecordError, match=r"an argument of add is, or holds, a function"):
        service.add(lambda: 1)
    with pytest.raises(RecordError, match=r"an argument of add requires grad"):
        service.add(torch.ones(2, requires_grad=True))
    with pytest.raises(RecordError, match=r"torch\.sparse_coo"):
        service.future.add(torch.ones(2).to_sparse())
    with pytest.raises(ServiceError, match="what give_code returns is, or holds, a function") as raised:
        service.give_code()
    assert raised.value.remote_type == "RecordError"
    assert service.add(1) == 1


def test_a_call_has_a_deadline_that_says_what_it_waited_for(buffer: Buffer) -> None:
    service = farspan.service("buffer", timeout=TIMEOUT_S)
    service._timeout_s = 0.2
    with pytest.raises(DeadlineError, match=r"waited 0.2 s for the service 'buffer' to run wait_in_line"):
        service.wait_in_line()
    buffer.gate.set()
    assert farspan.service("buffer", timeout=TIMEOUT_S).add(1) == 1


def test_calls_run_one_after_the_other_unless_there_are_threads(buffer: Buffer) -> None:
    line = farspan.service("buffer", timeout=TIMEOUT_S)
    waiting = line.future.wait_in_line()
    added = line.future.add(1)
    assert buffer.entered.acquire(timeout=TIMEOUT_S) and not buffer.items
    buffer.gate.set()
    assert (waiting.result(TIMEOUT_S), added.result(TIMEOUT_S)) == (0, 1)
    many = Buffer()
    with farspan.expose("many", many, threads=3):
        service = farspan.service("many", timeout=TIMEOUT_S)
        waiting = [service.future.wait_in_line() for _ in range(2)]
        assert service.add(1) == 1
        many.gate.set()
        assert [each.result(TIMEOUT_S) for each in waiting] == [1, 1]


def test_a_name_is_that_of_one_object(buffer: Buffer) -> None:
    with pytest.raises(ServiceError, match=r"(?s)the service 'buffer' is there already.*process \d+ has exposed it"):
        farspan.expose("buffer", Buffer())
    with pytest.raises(ServiceError, match=r"(?s)there is no service 'bufer'.*there is 'buffer'"):
        farspan.service("bufer", timeout=TIMEOUT_S)
    assert farspan.service("buffer", timeout=TIMEOUT_S).add(1) == 1


def test_calls_under_way_raise_when_the_object_goes_and_later_ones_find_the_next() -> None:
    first, second = Buffer(), Buffer()
    exposed = farspan.expose("comes", first, threads=2)
    service = farspan.service("comes", timeout=TIMEOUT_S)
    future = service.future.wait_in_line()
    assert first.entered.acquire(timeout=TIMEOUT_S)
    closing = threading.Thread(target=exposed.close)
    closing.start()
    with pytest.raises(ServiceError, match=r"(?s)is lost while wait_in_line is called.*not known") as raised:
        future.result(TIMEOUT_S)
    assert raised.value.is_loss and exposed.wait(TIMEOUT_S)
    first.gate.set()
    closing.join()
    with farspan.expose("comes", second):
        assert service.add("again") == 1
    assert second.items == ["again"] and not first.items


def test_a_process_that_ends_while_it_is_connected_to_is_waited_past() -> None:
    """The kernel closes the sockets of a killed process one after the other: the listener may outlive the name."""
    names = names_of_run()
    with listen_in(names.folder, "dying") as dying:
        names.expose("dies", "dying")
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(farspan.service, "dies", timeout=TIMEOUT_S)
            dying.accept()[0].close()
            names.withdraw("dies")
            with pytest.raises(ServiceError, match="there is no service 'dies'"):  # alone, nobody else could expose it
                found.result(TIMEOUT_S)


def test_a_caller_that_does_not_read_delays_nobody(buffer: Buffer) -> None:
    from farspan.services.messages import call_message

    stranger = socket_to(names_of_run().folder, names_of_run().find("buffer", TIMEOUT_S).socket)
    with stranger:
        stranger.setblocking(False)
        buffer.items.append("x" * 100_000)
        call = b"".join(map(bytes, call_message(1, "get", [0], {})))
        for _ in range(200):  # 20 MB of answers, far more than a socket takes
            stranger.send(call)
        service = farspan.service("buffer", timeout=TIMEOUT_S)
        wait_until(lambda: service.get(0) == "x" * 100_000)


@pytest.mark.parametrize(
    "said",
    [b"GET / HTTP/1.1\r\n\r\n" * 9, b"FSC1\xff\xff\xff\xff" + b"\0" * 20, b"FSC1\0\0\0\2\0\0\0\0\0\0\0\0{}"],
)
def test_what_is_no_message_ends_its_own_connection_alone(buffer: Buffer, said: bytes) -> None:
    service = farspan.service("buffer", timeout=TIMEOUT_S)
    stranger = socket_to(names_of_run().folder, names_of_run().find("buffer", TIMEOUT_S).socket)
    with stranger:
        stranger.settimeout(TIMEOUT_S)
        stranger.sendall(said)
        assert stranger.recv(2) == b"!"
        assert stranger.recv(1) == b""
    assert service.add(1) == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("a/b", []), "no name of a service"),
        (("x", 1, ["_private"]), "no method '_private'"),
        (("x", [], ["nothing"]), "no method 'nothing'"),
        (("x", object()), "no methods"),
    ],
)
def test_bad_use_is_refused(arguments: tuple[Any, ...], match: str) -> None:
    name, obj, *methods = arguments
    with pytest.raises(LaunchError, match=match):
        farspan.expose(name, obj, methods=methods[0] if methods else None)


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(LaunchError, match="threads=0"):
        farspan.expose("x", [], threads=0)
    with pytest.raises(LaunchError, match="timeout=0"):
        farspan.service("x", timeout=0)
