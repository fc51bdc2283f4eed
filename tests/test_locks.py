from __future__ import annotations

import threading

import pytest

from farspan.errors import DeadlineError
from farspan.locks import Lock


def test_who_waits_for_a_lock_is_told_who_has_it() -> None:
    lock, is_held, may_end = Lock("the till", deadline_s=0.05), threading.Event(), threading.Event()

    def hold() -> None:
        with lock, lock:  # the thread that has it may take it again
            is_held.set()
            may_end.wait(60)

    holder = threading.Thread(target=hold, name="cashier")
    holder.start()
    assert is_held.wait(60)
    with pytest.raises(DeadlineError, match=r"waited 0.05 s for the till[^$]*thread cashier"), lock:
        pass
    may_end.set()
    holder.join(60)
    with lock:
        pass
