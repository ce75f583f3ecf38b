"""Plans that offload values picked by hand, and what is measured of them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch
from torch import fx

import zerofx
from tests.lib.deciding import decided
from tests.lib.graphs import Prepared, prepare
from tests.lib.models import CASES, Case, batches
from tests.lib.runs.training import Trained, build, differences, parts, step_of, train_plain, world
from zerofx.ir.aliasing import is_view, storage_bytes
from zerofx.ir.edit import consumers
from zerofx.ir.facts import Phase, is_random, origin, tensor
from zerofx.ir.graph import StepGraph
from zerofx.passes.activations.recompute import recompute
from zerofx.runtime.measure.measure import Measurement
from zerofx.scheduler.analysis.saved_values import saved_values
from zerofx.scheduler.decide.undecided import undecided
from zerofx.scheduler.plan.decisions import Absence
from zerofx.scheduler.plan.facts import Tier
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.scheduler.plan.plan import Plan


def check_measured(found: Measurement, predicted: Plan, num_bytes: int, share: float | None = None) -> None:
    """Bytes moved, sent and held are those predicted; the device's peak within ``num_bytes`` or ``share``."""
    assert found.link_bytes == predicted.link_bytes and found.wire_bytes == predicted.wire_bytes
    assert {**found.peak_bytes, "device": 0} == {**predicted.peak_bytes, "device": 0}
    assert found.peak_bytes["device"] == pytest.approx(predicted.peak_bytes["device"], rel=share, abs=num_bytes)
    assert found.model_state_bytes == predicted.model_state_bytes


def trains_and_holds_as_planned(name: str, stage: int, plan: Plan) -> list[str]:
    """What differs from plain training of a case, on each rank; bytes and peaks are asserted to be those predicted."""
    case, (rank, _) = CASES[name], world()
    step, _ = step_of(name, stage, plan=plan)
    torch.manual_seed(rank)
    losses = [step(*args, **keywords).clone() for args, keywords in batches(case, rank, 3)]
    wrong = differences(train_plain(case, 3), Trained(losses, step.full_state_dict()))
    args, keywords = next(batches(case, 0, 1))
    check_measured(step.measure(*args, num_steps=2, **keywords), step.plan, 4096, share=0.001)
    step.close()
    return wrong


def check_saved_and_loaded(step: zerofx.Step, reference: zerofx.Step, args: tuple[torch.Tensor, ...]) -> None:
    """A step that keeps something in a slower tier saves, loads and gives back the bits of one that does not."""
    for one in (step, reference):
        one(*args)
        one(*args)
    weights, saved, expected = step.full_state_dict(), step.optimizer.state_dict(), reference.optimizer.state_dict()
    assert same_tensors(weights, reference.full_state_dict())
    assert saved["param_groups"] == expected["param_groups"] and saved["state"].keys() == expected["state"].keys()
    assert all(same_tensors(saved["state"][key], entry) for key, entry in expected["state"].items())
    step(*args)
    step.optimizer.load_state_dict(saved)
    with step.full_parameters(write_back=True) as model:
        model.load_state_dict(weights)
    assert torch.equal(step(*args), reference(*args))
    assert torch.equal(step(*args), reference(*args))
    step.close()
    assert same_tensors(step.model.state_dict(), reference.full_state_dict())
    assert step.optimizer.state_dict()["state"].keys() == expected["state"].keys()


def same_tensors(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two states have the same names with the same bits."""
    pairs = [(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one.keys() & other.keys()]
    return one.keys() == other.keys() and all(torch.equal(a, b) for a, b in pairs)


def prepare_case(
    case: Case,
    stage: int,
    num_ranks: int,
    num_micro_batches: int = 1,
    precision: str | None = None,
    *,
    loss_scaled: bool = False,
    reduce_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
) -> Prepared:
    """A case's captured graph and plan, as ``compile`` makes them for its first batch."""
    model = build(case)
    args, keywords = next(parts(*next(batches(case, 0, 1)), num_micro_batches))
    return prepare(
        model, args, keywords=keywords, loss_fn=case.loss_fn, stage=stage, num_ranks=num_ranks,
        optimizer=case.optimizer(model), num_micro_batches=num_micro_batches, precision=precision,
        loss_scaled=loss_scaled, reduce_dtype=reduce_dtype, state_dtype=state_dtype, mesh=mesh,
    )  # fmt: skip


def placing(prepared: Prepared, tier: str, update: str, every: int = 1) -> Plan:
    """The plan of ``prepared`` with the states of every so many buckets in ``tier``."""
    buckets = [decision.bucket for decision in prepared.plan.reduces][::every]
    states = (
        Absence(kind="states", bucket=bucket, tier=cast(Tier, tier), update=cast(Tier, update), reason="by hand")
        for bucket in buckets
    )
    return prepared.plan.replace_absences(states=states)


def parameters_away(prepared: Prepared, tier: str, states: tuple[str, str] | None, *, every: int = 1) -> Plan:
    """The plan of ``prepared`` with the parameters of every so many buckets in ``tier``.

    ``states``: the tier of all optimizer states, and where updates run; None for both on the device.
    """
    buckets = prepared.layout.buckets
    plan = _undecided(prepared).replace_absences(
        parameters=[
            Absence(kind="parameters", bucket=bucket.index, tier=cast(Tier, tier), reason="by hand")
            for bucket in buckets[::every]
        ]
    )
    if states is not None:
        where, update = cast(tuple[Tier, Tier], states)
        on = (
            Absence(kind="states", bucket=bucket.index, tier=where, update=update, reason="by hand")
            for bucket in buckets
            if bucket.trainable
        )
        plan = plan.replace_absences(states=on)
    return decided(prepared.step, prepared.layout, plan)


def recomputing(prepared: Prepared) -> Plan:
    """The plan of ``prepared``, with every third value of backward's computed again."""
    values = [node for node in saved_values(prepared.step) if not _is_drawn(node) and _lives(node)][::3]
    recomputes = tuple(
        Absence(kind="recomputes", value=n.name, num_bytes=storage_bytes(tensor(n)), reason="by hand") for n in values
    )
    return decided(prepared.step, prepared.layout, _undecided(prepared).replace_absences(recomputes=recomputes))


def offloading(prepared: Prepared, plan: Plan, tiers: Sequence[str], *, near: bool = False) -> Plan:
    """``plan`` with all values offloaded that wait for backward, to ``tiers`` in turn.

    A value is freed after the unit after that of its last use, and reloaded while the unit before its first use runs;
    ``near``: freed, and reloaded, where it is used.
    """
    step = prepared.step.clone()
    recompute(step, frozenset(d.value for d in plan.recomputes), frozenset(plan.extra_keeps))
    order = step.positions()
    runs = _runs(step)
    home = {node: number for number, run in enumerate(runs) for node in run}
    captured = {node.name for node in prepared.step.graph.nodes}
    found: list[Absence] = []
    for value in (node for node in step.calls() if _lives(node)):
        readers = sorted(consumers(value), key=order.__getitem__)
        backward = [reader for reader in readers if origin(reader).phase is Phase.BACKWARD]
        if not backward or any(reader.op == "output" for reader in readers):
            continue
        made = value if value in home else value.all_input_nodes[0]
        last = max([made, *(reader for reader in readers if reader not in backward)], key=order.__getitem__)
        out, back = home[last], home[backward[0]]
        before = [n for run in runs[out + 1 : back] for n in run if n.name in captured]
        here = [n for n in runs[back] if n.name in captured and order[n] <= order[backward[0]]]
        apart = not near and before and home[before[0]] < home[before[-1]]
        free_after = before[0] if apart else last
        reload_before = before[-1] if apart else (here or before)[-1]
        found.append(
            Absence(
                kind="offloads",
                value=value.name, tier=cast(Tier, tiers[len(found) % len(tiers)]),
                num_bytes=storage_bytes(tensor(value)), free_after=(free_after.name,),
                reload_before=(reload_before.name,),
                reason="picked by hand", layer=origin(value).layer,
            )
        )  # fmt: skip
    if not plan.recomputes:
        return plan.replace_absences(offloads=tuple(found))
    # Backward is ordered differently where values are offloaded: residencies are decided for that order.
    return decided(prepared.step, prepared.layout, plan.replace_absences(offloads=tuple(found)))


def _undecided(prepared: Prepared) -> Plan:
    return undecided(prepared.step, prepared.layout, prepared.plan.stage, prepared.plan.precision, "cpu")


def _runs(step: StepGraph) -> list[list[fx.Node]]:
    """The nodes that compute, by unit and phase, in order."""
    runs: list[list[fx.Node]] = []
    before = None
    for node in step.calls():
        if is_view(node):
            continue
        here = (step.unit_of(node), origin(node).phase)
        if here != before:
            runs.append([])
        runs[-1].append(node)
        before = here
    return runs


def _is_drawn(node: fx.Node) -> bool:
    return is_random(node) or any(is_random(source) for source in node.all_input_nodes)


def _lives(node: fx.Node) -> bool:
    """Whether a forward node names a tensor with memory of its own."""
    if origin(node).phase is not Phase.FORWARD or not hasattr(node.meta.get("val"), "stride"):
        return False
    if node.target is not operator.getitem:
        return not is_view(node)
    source = node.args[0]
    return isinstance(source, fx.Node) and not is_view(source)
