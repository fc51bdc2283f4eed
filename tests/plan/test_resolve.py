from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from farspan.errors import PlanError
from farspan.plan import Plan, Resolved, resolve

MODULES = [
    "",
    "embed",
    "blocks",
    *(f"blocks.{i}{part}" for i in range(3) for part in ("", ".attn", ".mlp", ".mlp.0", ".mlp.1", ".mlp.2")),
    "drop",
    "head",
]
PARAMETERS = [
    "scale",
    "embed.weight",
    *(f"blocks.{i}.{part}.weight" for i in range(3) for part in ("attn", "mlp.0", "mlp.2")),
    "head.bias",
]
TIED = {"head.weight": "embed.weight"}


def _resolve(
    mapping: Mapping[str, int],
    *,
    parameters: Sequence[str] = PARAMETERS,
    aliases: Mapping[str, str] = TIED,
    modules: Sequence[str] = MODULES,
    num_stages: int = 3,
) -> Resolved:
    plan = Plan(stages=tuple(f"rank:{stage}" for stage in range(num_stages)), placement=mapping)
    return resolve(plan, parameters=parameters, aliases=aliases, modules=modules, world_size=num_stages)


def _stages(found: Resolved, name: str) -> set[int]:
    return {stage for other, stage in found.owner.items() if other.startswith(name)}


def test_the_empty_name_is_the_whole_model() -> None:
    found = resolve(
        Plan.from_mapping({"": "rank:0"}), parameters=PARAMETERS, aliases=TIED, modules=MODULES, world_size=1
    )
    assert set(found.owner.values()) == {0}
    assert set(found.leaf_stage.values()) == {0}
    assert list(found.leaf_stage) == MODULES
    assert list(found.owner) == PARAMETERS


def test_every_name_of_a_parameter_has_a_stage() -> None:
    found = _resolve({"": 1})
    assert set(found.name_stage) == {*PARAMETERS, *TIED}


def test_its_own_entry_beats_what_a_name_inherits_whatever_the_order() -> None:
    for mapping in ({"": 0, "blocks": 1, "blocks.1": 2}, {"blocks.1": 2, "blocks": 1, "": 0}):
        found = _resolve(mapping)
        assert _stages(found, "blocks.0") == {1}
        assert _stages(found, "blocks.1") == {2}
        assert _stages(found, "embed") == {0}


def test_an_exact_name_beats_a_glob_whatever_the_order() -> None:
    for mapping in ({"": 0, "blocks.*": 1, "blocks.0": 2}, {"blocks.0": 2, "blocks.*": 1, "": 0}):
        found = _resolve(mapping)
        assert _stages(found, "blocks.0") == {2}
        assert _stages(found, "blocks.1") == {1}
        assert found.leaf_stage["blocks.0"] == 2


def test_of_two_globs_the_later_wins() -> None:
    assert _stages(_resolve({"": 0, "blocks.*": 1, "blocks.[12]": 2}), "blocks.1") == {2}
    assert _stages(_resolve({"": 0, "blocks.[12]": 2, "blocks.*": 1}), "blocks.1") == {1}


def test_a_glob_counts_at_the_outermost_names_only() -> None:
    found = _resolve({"*": 0, "blocks.2": 1, "*.mlp": 2})
    assert found.leaf_stage["blocks.2.mlp"] == 2
    assert found.leaf_stage["blocks.2.attn"] == 1
    assert found.leaf_stage["blocks.0.attn"] == 0
    assert found.leaf_stage["blocks.0"] is None


def test_a_single_parameter_can_be_placed() -> None:
    found = _resolve({"": 0, "blocks.0.mlp.2.weight": 1})
    assert found.owner["blocks.0.mlp.2.weight"] == 1
    assert [name for name, stage in found.leaf_stage.items() if stage is None] == [
        "",
        "blocks",
        "blocks.0",
        "blocks.0.mlp",
    ]


def test_a_tied_parameter_is_owned_under_its_first_name_and_used_under_each() -> None:
    found = _resolve({"": 0, "head": 2})
    assert found.owner["embed.weight"] == 0
    assert found.name_stage["embed.weight"] == 0
    assert found.name_stage["head.weight"] == 2
    assert found.leaf_stage["head"] == 2
    assert found.leaf_stage["embed"] == 0


def test_a_name_that_no_entry_covers_follows_the_other_name_of_its_parameter() -> None:
    by_first = {"scale": 0, "embed": 1, "blocks": 0, "head.bias": 1}
    found = _resolve(by_first)
    assert found.name_stage["head.weight"] == 1
    assert found.leaf_stage["head"] == 1
    by_alias = {"scale": 0, "blocks": 0, "head": 1}
    found = _resolve(by_alias)
    assert found.owner["embed.weight"] == found.name_stage["embed.weight"] == 1
    assert found.leaf_stage["embed"] == 1


def test_a_module_registered_twice_can_be_placed_by_either_name() -> None:
    parameters, aliases, modules = ["a.weight", "c.weight"], {"b.weight": "a.weight"}, ["", "a", "c"]
    for mapping in ({"a": 0, "c": 1}, {"b": 0, "c": 1}):
        found = _resolve(mapping, parameters=parameters, aliases=aliases, modules=modules, num_stages=2)
        assert found.owner == {"a.weight": 0, "c.weight": 1}
        assert found.leaf_stage == {"": None, "a": 0, "c": 1}


def test_modules_without_parameters_that_nobody_placed_are_free_and_do_not_count() -> None:
    found = _resolve(
        {"scale": 0, "embed": 0, "blocks.0.attn": 0, "blocks.*.mlp.?": 1, "blocks.[12].attn": 1, "head": 1}
    )
    assert found.leaf_stage["drop"] is None
    assert found.leaf_stage["blocks.1"] == 1
    found = _resolve({"scale": 0, "embed": 0, "blocks.*.attn": 1, "blocks.*.mlp.0": 1, "blocks.*.mlp.2": 1, "head": 1})
    assert found.leaf_stage["blocks.0.mlp.1"] is None  # free
    assert found.leaf_stage["blocks.0.mlp"] == found.leaf_stage["blocks"] == 1


def test_a_module_without_parameters_is_owned_by_its_assigned_stage() -> None:
    found = _resolve({"": 0, "drop": 2})
    assert found.leaf_stage["drop"] == 2
    assert found.leaf_stage["blocks.0.mlp.1"] == 0
    assert found.leaf_stage[""] is None
    assert found.leaf_stage["blocks"] == 0


def test_a_module_whose_children_all_lie_elsewhere_is_owned_there() -> None:
    found = _resolve({"": 0, "blocks.*.attn": 1, "blocks.*.mlp": 1})
    assert found.leaf_stage["blocks.0"] == found.leaf_stage["blocks"] == 1
    modules = ["", "f", "f.a", "f.b", "g"]
    found = _resolve(
        {"f.a": 1, "f.b": 1, "f": 0, "g": 0}, parameters=["g.w"], aliases={}, modules=modules, num_stages=2
    )
    assert found.leaf_stage == {"": None, "f": None, "f.a": 1, "f.b": 1, "g": 0}
    found = _resolve({"f.a": 1, "g": 0}, parameters=["g.w"], aliases={}, modules=modules, num_stages=2)
    assert found.leaf_stage == {"": None, "f": 1, "f.a": 1, "f.b": None, "g": 0}


def test_a_model_without_parameters_resolves() -> None:
    found = _resolve({"": 0}, parameters=[], aliases={}, modules=["", "relu"], num_stages=1)
    assert found == Resolved(name_stage={}, owner={}, leaf_stage={"": 0, "relu": 0})


def _error(mapping: Mapping[str, str], world_size: int = 2) -> PlanError:
    texts: list[str] = []
    for _ in range(2):
        with pytest.raises(PlanError) as caught:
            resolve(
                Plan.from_mapping(mapping), parameters=PARAMETERS, aliases=TIED, modules=MODULES, world_size=world_size
            )
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) <= 8
    assert caught.value.why
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(("entry", "near"), [("embd", "embed"), ("blocks.7", "blocks.2"), ("bloks.*", "blocks")])
def test_an_entry_that_matches_nothing_is_an_error_with_the_nearest_names(entry: str, near: str) -> None:
    error = _error({"": "rank:0", entry: "rank:1"})
    assert f"'{entry}'" in error.what
    assert "rank:1" in error.what
    assert f"'{near}'" in error.hint


def test_a_parameter_without_owner_is_an_error_that_says_what_to_add() -> None:
    error = _error({"scale": "rank:0", "embed": "rank:0", "blocks": "rank:1"})
    assert error.what == "no stage owns the parameter 'head.bias'."
    assert "1 of 12 parameters" in error.why
    assert 'add "head": "rank:1"' in error.hint
    error = _error({"embed": "rank:0", "blocks.0": "rank:1"})
    assert error.what == "no stage owns 8 parameters."
    assert "8 of 12 parameters: 'scale'" in error.why
    assert "and 4 more" in error.why


def test_the_entry_proposed_for_parameters_without_owner_takes_nothing_from_others() -> None:
    error = _error(
        {"scale": "rank:0", "embed": "rank:0", "head": "rank:0", "blocks.0": "rank:1", "blocks.1.attn": "rank:1"}
    )
    assert 'add "blocks.1.mlp": "rank:1"' in error.hint


def test_a_rank_that_does_not_exist_is_an_error() -> None:
    error = _error({"": "rank:0", "head": "rank:3/cpu", "embed": "rank:1", "blocks": "rank:2"}, world_size=2)
    assert "'rank:2'" in error.what
    assert "2 processes for a plan of 4 ranks" in error.why
    assert "farspan run -n 4" in error.hint


def test_a_name_that_matches_nothing_is_said_before_the_ranks_it_would_need() -> None:
    error = _error({"block.*": "rank:0"}, world_size=2)
    assert error.what == "the plan's entry 'block.*' (on rank:0) matches nothing in this model."


def test_a_plan_of_some_entries_is_told_the_others_before_the_ranks_they_would_be_on() -> None:
    error = _error({"embed": "rank:0", "blocks.0": "rank:0"}, world_size=2)
    assert error.what.startswith("no stage owns ")
    entries = [f'"{name}": "rank:1"' for name in ("scale", "blocks.1", "blocks.2", "head")]
    assert error.hint.startswith(f"add {', '.join(entries)} to the plan (where ")
    assert "no stage yet: 'rank:1'" in error.hint and 'or "": "rank:1" for all' in error.hint


def test_every_rank_must_have_a_stage() -> None:
    error = _error({"": "rank:0", "head": "rank:1"}, world_size=3)
    assert error.what == "3 processes for a plan of 2 ranks."
    assert "'rank:2'" in error.why
    assert "farspan run -n 2" in error.hint
    error = _error({"": "rank:0", "head": "rank:2"}, world_size=3)
    assert "'rank:1'" in error.why
    assert "without gaps" in error.hint
