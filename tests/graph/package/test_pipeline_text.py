"""Pipelines as text: what is read is what was written, and a plan's decisions come back from it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerofx.errors import UsageError
from zerofx.pipeline import PLAN, PREPARE, find, pass_texts, with_pass_texts
from zerofx.scheduler.plan.pass_options import options_of
from zerofx.scheduler.plan.pipeline_text import OptionValue, PassText, pipeline_text, read_pipeline
from zerofx.scheduler.plan.plan import Plan

LISTED = (*PREPARE, *PLAN)
_WORDS = st.sampled_from(
    ("mm", "relu_1", "none", "true", "inf", "inf.x", "head.weight[0:2]", "1e5", "a b", '"', "{,}", "")
)
_TEXTS = _WORDS | st.text()
_NUMBERS = st.integers() | st.floats(allow_nan=False)
_VALUES: st.SearchStrategy[OptionValue] = st.recursive(
    st.none() | st.booleans() | _NUMBERS | _TEXTS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6
)
_NAMES = st.from_regex(r"[a-z_][a-z0-9_]*", fullmatch=True)
_OPTIONS = st.dictionaries(_NAMES, st.lists(_VALUES, max_size=3).map(tuple), max_size=3).map(lambda d: tuple(d.items()))
_PASSES = st.builds(PassText, _NAMES, _OPTIONS)


@settings(deadline=None)
@given(st.lists(_PASSES, max_size=4).map(tuple))
def test_what_is_read_is_what_was_written(passes: tuple[PassText, ...]) -> None:
    found = read_pipeline(pipeline_text(passes))
    assert found == passes
    assert repr(found) == repr(passes)  # 1 is no 1.0, and no True


def _decisions_of(entry: str) -> Any:
    """Tuples of the decisions that a plan has in ``entry``."""
    (kind, _) = get_args(get_type_hints(Plan)[entry])
    return st.lists(_TEXTS if kind is str else st.builds(kind), max_size=3).map(tuple)


_ENTRIES = sorted({entry for one in LISTED for entry, columns in one.decisions.items()})
_BARE = Plan(3, 2, None, "cpu", "", (), (), ())
_SINGLE = ("max_grad_norm", "grad_norms", "loss_scaled", "num_micro_batches")
_CHANGES = st.fixed_dictionaries({
    **{entry: _decisions_of(entry) for entry in _ENTRIES if entry not in _SINGLE},
    "max_grad_norm": st.none() | st.floats(min_value=0, allow_nan=False),
    "grad_norms": st.booleans(),
    "loss_scaled": st.booleans(),
    "num_micro_batches": st.integers(1, 64),
})  # fmt: skip


def _unexplained(plan: Plan) -> Plan:
    """``plan`` without what its decisions say besides."""
    said = {"reason": "given in a pipeline", "num_bytes": 0, "layer": ""}

    def bare(one: Any) -> Any:
        names = {each.name for each in fields(one)} if not isinstance(one, str) else set()
        return replace(one, **{name: value for name, value in said.items() if name in names}) if names else one

    rows = {entry: getattr(plan, entry) for entry in _ENTRIES}
    changed: dict[str, Any] = {name: tuple(map(bare, one)) for name, one in rows.items() if isinstance(one, tuple)}
    return replace(plan, **changed)


@settings(deadline=None, max_examples=50)
@given(_CHANGES)
def test_a_plans_decisions_come_back_from_its_pipeline(changes: dict[str, Any]) -> None:
    plan = replace(_BARE, **changes)
    text = pipeline_text([PassText(one.name, options_of(plan, one.decisions)) for one in LISTED])
    assert with_pass_texts(_BARE, read_pipeline(text)) == _unexplained(plan)
    again = with_pass_texts(plan, read_pipeline(text))
    assert [options_of(again, one.decisions) for one in LISTED] == [options_of(plan, one.decisions) for one in LISTED]


def test_every_decision_is_carried_out_by_one_rewrite() -> None:
    carried = Counter(
        (entry, column) for one in LISTED for entry, columns in one.decisions.items() for column in columns or ("",)
    )
    besides = {"reason", "num_bytes", "layer"}
    about = {"stage", "num_ranks", "precision", "machine", "graph", "buckets", "memory_budget", "wire", "summary"}
    # What a plan is for, and what it leads to.
    about |= {"micro_batches_reason", "ranks_per_node", "replicate", "model", "states_reason"}
    about |= {"prediction"}
    hints = get_type_hints(Plan)
    expected = set()
    for entry in {one.name for one in fields(Plan)} - about:
        kinds = get_args(hints[entry])
        decided = kinds and not isinstance(kinds[0], type(None)) and hasattr(kinds[0], "__dataclass_fields__")
        columns = {one.name for one in fields(kinds[0])} - besides if decided else {""}
        expected |= {(entry, column) for column in columns}
    # A bucket's number says which decision the columns of a second pass are of.
    assert set(carried) == expected and set(carried.values()) == {1}


def test_options_that_are_left_out_are_defaults_and_passes_without_any_stay_as_they_are() -> None:
    plan = replace(_BARE, tiles=(_tile("mm", 4, "classes"),))
    (tile,) = with_pass_texts(plan, read_pipeline("tile{value=mm_1 num_tiles=2}")).tiles
    assert (tile.value, tile.num_tiles, tile.over) == ("mm_1", 2, "rows")
    assert with_pass_texts(plan, read_pipeline("simplify,tile,recompute")) == plan
    assert with_pass_texts(plan, read_pipeline("tile{value=}")).tiles == ()
    kept = with_pass_texts(plan, read_pipeline("tile{value=mm num_tiles=8 over=classes}"))
    assert kept.tiles[0].reason == plan.tiles[0].reason  # of as many decisions as there were


def _tile(value: str, num: int, over: Any) -> Any:
    (kind, _) = get_args(get_type_hints(Plan)["tiles"])
    return kind(value, num, 0, "by hand", over=over)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tile recompute", "expected a comma between two passes in the pipeline at character 6, found 'recompute'"),
        ("tile,", "expected the name of a pass in the pipeline at character 6, found ''"),
        ("tile{value mm}", "expected = after value"),
        ("tile{value=mm", "expected a space between two options, or } after them"),
        ("tile{value=mm value=mm_1}", "expected value once"),
        ("tile{value=[mm}", "expected ] after a list"),
        ("tile{value=,}", "expected a value"),
        ('tile{value="\\x"}', "expected a text as JSON has it"),
        ("tile{values=mm}", r"expected options of tile (value, num_tiles, over), found values"),
        ("shard,reduced", "expected the name of a pass (check_results, "),
        ("simplify{hard=true}", "expected options of simplify (it has none), found hard"),
        ("tile{value=mm}", "expected num_tiles among the options of tile, found value alone"),
        ("tile{value=mm num_tiles=2,3}", "expected a value of each option for each of the tiles, found 1 of value, 2"),
        ("tile{value=mm num_tiles=two}", "found another: Plan.tiles[0].num_tiles: expected int, found 'two'"),
        ("gather{bucket=0 first=mm last=mm}", "expected issue for 1 gathers, found a plan with 0: give the options of"),
        ("accumulate{num_micro_batches=2,3}", "expected one value of num_micro_batches of accumulate, found 2"),
    ],
)  # fmt: skip
def test_what_is_no_pipeline_says_where(text: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        with_pass_texts(_BARE, read_pipeline(text))
    assert message in str(refused.value)


def test_only_what_has_something_to_do_is_ordered() -> None:
    names = [one.name for one in pass_texts(replace(_BARE, stage=0))]
    assert names == [
        "simplify",
        "tile",
        "recompute",
        "offload",
        "shard",
        "reduce",
        "direct",
        "update",
        "buffers",
        "prefetch",
    ]
    clipped = pass_texts(replace(_BARE, max_grad_norm=math.inf), guarded=True)
    assert "clip{max_grad_norm=inf}" in pipeline_text(clipped) and clipped[-1].name == "guard_loss"
    assert find("update").about == "Inline each bucket's update program after its reduction."
