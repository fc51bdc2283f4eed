"""Autocast, compiled modules and choices of the host, over real processes: torch keeps their state for all threads."""

from __future__ import annotations

import pytest
from tests.programs import semantics
from tests.support.ranks import differences, differing


@pytest.mark.parametrize("name", semantics.GROUPS["autocast"])
def test_same_in_lower_precision(name: str) -> None:
    assert differing(differences(semantics.__file__, "autocast", 2), name) == ["", ""]


@pytest.mark.parametrize("name", semantics.GROUPS["host_choices"])
def test_choices_of_the_host_agree(name: str) -> None:
    assert differing(differences(semantics.__file__, "host_choices", 3), name) == ["", "", ""]


@pytest.mark.parametrize("name", semantics.GROUPS["compiled"])
def test_compiled_modules_compute_the_same_and_are_compiled(name: str) -> None:
    """Under the plan that is estimated: one that is measured may leave a rank without any compiled module."""
    found = differences(semantics.__file__, "compiled", 2)
    assert differing(found, name) == ["", ""]
