"""Check a step graph after a pass: every rule that the emitted step relies on.

=====================  =====================================================================================
order                  a node comes after everything that it reads
names                  no two nodes have one: what is emitted is made of them
release                a gathered buffer is released once, and nothing reads it afterwards
residency              once the gather pass has run, every whole parameter buffer, gathered or copied up, is released
launches               gathers that start as one collective stand one after the other, and all of them are there
waits                  nothing but its wait reads a started collective or copy; each is awaited once, and what one on
                       a value reads is held until then
gradients              every trained bucket is reduced at most once in a micro-batch
updates                where masters are changed, parameters are written
update                 a slice is not written before its last gather, or copy to a faster tier, is done with it
in place               no slice that is gathered in place is written before all ranks are done with what they gathered
plan                   after the last pass: one gather, reduction or offload for each decision of the plan, no others,
                       gathers merged as it says, states and parameters in the tiers that it says, and what it says sent
                       in few bits
loop                   a round of a loop over micro-batches reads what is there in every round: what it is handed on,
                       what is made before the loop and stays after it, or what the same round of another loop has
                       made; what it makes goes no further
random operators       none is run twice
clipping               nothing is updated before the factors that gradients are multiplied by are known
scaling                nothing is updated before all gradients are known to be finite
host                   an update on the host is awaited in its step, or where it is delayed before the next one of it,
                       or where it runs on, as what goes back to its tier may, before what needs it in the next step
                       begins
states                 what lives in a slower tier is only copied, or read where it lives
offload                what is stored in a slower tier is reloaded, and read by nothing else; a value is not read on the
                       device after the wait that frees it
=====================  =====================================================================================

That a gather's buffer is not read before its wait follows from order and waits, and is no check of its own.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import NoReturn

from torch import fx

from zerofx.errors import InvalidGraphError
from zerofx.ir import ops
from zerofx.ir.aliasing import Storage, is_view, mutated_inputs, storage_source
from zerofx.ir.edit import consumers, is_view_of
from zerofx.ir.facts import DEVICE, Role, copied_from, delayed_bucket, host_bucket, is_random, placeholder, tier_of
from zerofx.ir.graph import StepGraph
from zerofx.ir.micro_batches import loop_numbers, loops_of
from zerofx.ir.ops import VALUE_COLLECTIVES
from zerofx.ir.streams import background_work, num_gathers_after, runs_on_host
from zerofx.ir.text import target_name
from zerofx.passes.in_place import gathers_of_lasting_slices
from zerofx.passes.lib.plan_check import GATHERS, differences, is_reduction, parameter_gathers
from zerofx.passes.settle import readers_next, updates_on_host
from zerofx.scheduler.plan.plan import Plan

_NEIGHBOURS = 6
_STARTED = frozenset(
    {*GATHERS, ops.all_gather_into, *ops.REDUCTIONS, ops.exchange, *ops.OWNER_EXCHANGES, *ops.TRANSFERS}
)


def verify(step: StepGraph, after: str, plan: Plan | None = None) -> None:
    """Check all rules; with ``plan``, also that the graph does all that the plan says.

    Collectives are then in the same order on all ranks, since the graph follows from the captured graph and the plan,
    and both are compared between ranks.

    Raises:
        InvalidGraphError: names the rule, the pass ``after`` which it was broken, and shows the nodes around the spot.
    """
    order = step.positions()
    _check_names(step, after)
    for node in step.calls():
        for source in node.all_input_nodes:
            if order[source] > order[node]:
                _fail(step, after, node, f"order: {node.name} reads {source.name}, which comes later")
        if node.target in _STARTED:
            _check_started(step, after, node)
        if node.target is ops.release:
            _check_release(step, after, node, order)
        if node.target is ops.offload:
            _check_offload(step, after, node, order)
    _check_launches(step, after)
    _check_placed(step, after)
    _check_on_host(step, after, order, is_last=plan is not None)
    _check_residencies(step, after)
    _check_reductions(step, after)
    _check_updates(step, after, order)
    _check_in_place(step, after)
    _check_clipped(step, after, order)
    _check_random(step, after)
    _check_loop(step, after, order)
    if plan is not None:
        _check_written(step, after, plan)
        for difference in differences(step, plan):
            _fail(step, after, step.output, f"plan: {difference}")


def _check_started(step: StepGraph, after: str, node: fx.Node) -> None:
    waits = [user for user in node.users if user.target in (ops.wait, ops.run_on)]
    others = [user.name for user in node.users if user not in waits]
    if len(waits) != 1 or others:
        _fail(step, after, node, f"waits: {node.name} has {len(waits)} waits and is read by {others}")
    if node.target in VALUE_COLLECTIVES and waits[0].args != (node, node.args[0]):
        _fail(step, after, waits[0], f"waits: {waits[0].name} does not hold what {node.name} reads until then")


def _check_launches(step: StepGraph, after: str) -> None:
    missing = 0
    for node in step.calls():
        more = num_gathers_after(node)
        if missing and (node.target is not ops.all_gather or more != missing - 1):
            what = f"launches: {node.name} stands where one of {missing} gathers should that start with those before it"
            _fail(step, after, node, what)
        missing = more
    if missing:
        _fail(step, after, step.output, f"launches: {missing} gathers are missing that should start with the last one")


def _check_release(step: StepGraph, after: str, node: fx.Node, order: dict[fx.Node, int]) -> None:
    full = node.args[0]
    assert isinstance(full, fx.Node)
    for reader in consumers(full):
        if reader.target is ops.release and reader is not node:
            _fail(step, after, reader, f"release: {full.name} is released twice")
        if order[reader] > order[node]:
            _fail(step, after, reader, f"release: {reader.name} reads {full.name} after its release")


def _check_offload(step: StepGraph, after: str, node: fx.Node, order: dict[fx.Node, int]) -> None:
    value, stored = node.all_input_nodes[0], next(iter(node.users))
    if stored.args != (node, value):
        _fail(
            step, after, stored, f"offload: {stored.name} awaits {node.name} and does not hold {value.name} until then"
        )
    for reader in consumers(value):
        if order[reader] > order[stored]:
            _fail(step, after, reader, f"offload: {reader.name} reads {value.name} after {stored.name}, which frees it")
    readers = consumers(stored)
    reloads = [reader for reader in readers if reader.target is ops.reload]
    others = [
        reader.name
        for reader in readers
        if reader not in reloads
        and reader.target not in (ops.next_micro_batch, ops.settle, ops.run_on)
        and not (reader.target is ops.wait and reader.args[0] in reloads)
        and not runs_on_host(reader)
    ]
    if others or not any(reader in reloads or runs_on_host(reader) for reader in readers):
        _fail(step, after, stored, f"offload: {stored.name} has {len(reloads)} reloads and is read by {others}")
    for reload in reloads:
        held = [wait for wait in reload.users if wait.args != (reload, stored)]
        if held:
            _fail(step, after, reload, f"offload: {held[0].name} does not hold {stored.name} until its reload is done")


def _check_placed(step: StepGraph, after: str) -> None:
    for node in step.placeholders():
        if tier_of(node) == DEVICE:
            continue
        for reader in consumers(node):
            is_copy = reader.target in ops.TRANSFERS or reader.target is ops.wait
            if not is_copy and not (tier_of(node) == "host" and runs_on_host(reader)):
                _fail(step, after, reader, f"states: {reader.name} reads {node.name} on {tier_of(node)}")


def _check_on_host(step: StepGraph, after: str, order: dict[fx.Node, int], *, is_last: bool) -> None:
    all_settled = {background_work(node): order[node] for node in step.calls() if node.target is ops.settle}
    all_run_on = {background_work(node): node for node in step.calls() if node.target is ops.run_on}
    settled: dict[int | None, int] = {bucket: place for (bucket, back), place in all_settled.items() if not back}
    runs_on = {bucket: node for (bucket, back), node in all_run_on.items() if not back}
    for node in filter(runs_on_host, step.calls()):
        bucket, begins_after = host_bucket(node), order[node] > settled.get(host_bucket(node), len(order))
        if bucket in runs_on and order[node] < order[runs_on[bucket]]:
            continue
        if bucket not in settled or begins_after != (delayed_bucket(node) is not None):
            which = "the last update" if delayed_bucket(node) is not None else "the update"
            _fail(step, after, node, f"host: {node.name} is of bucket {bucket}, {which} of which is not awaited")
    updates = updates_on_host(step)
    for left, node in all_run_on.items() if all_settled.keys() & all_run_on.keys() or is_last else ():
        for reader in readers_next(node, updates):
            if order[reader] < all_settled.get(left, len(order)):
                what = f"host: {reader.name} reads what {node.name} has let run on in the step before, not awaited"
                _fail(step, after, reader, what)


def _check_residencies(step: StepGraph, after: str) -> None:
    # The shard pass gathers everything once at the start; releases come with the gather pass.
    if not any(node.target is ops.release for node in step.calls()):
        return
    for node in parameter_gathers(step):
        readers = consumers(node)
        whole = next((reader for reader in readers if reader.target is ops.dequantise), None)
        if not any(reader.target is ops.release for reader in (readers if whole is None else consumers(whole))):
            _fail(step, after, node, f"residency: what {node.name} gathers is never released")


def _check_updates(step: StepGraph, after: str, order: dict[fx.Node, int]) -> None:
    parts = list(step.placeholders(Role.PART))
    for shard in step.placeholders(Role.SHARD):
        owners = [shard, *(part for part in parts if placeholder(part).bucket == placeholder(shard).bucket)]
        writers = [reader for owner in owners for reader in consumers(owner) if owner in mutated_inputs(reader)]
        readers = (ops.all_gather, ops.reload, ops.quantise, ops.fp8_slice_largest, ops.fp8_slice_cast)
        for started in (user for user in shard.users if user.target in readers):
            done = max(order[user] for user in (started, *started.users))
            for writer in writers:
                if order[writer] < done:
                    what = f"update: {writer.name} writes {shard.name} before {started.name} is done"
                    _fail(step, after, writer, what)


def _check_in_place(step: StepGraph, after: str) -> None:
    marked = [node for node in step.calls() if node.kwargs.get("in_place")]
    lasting = gathers_of_lasting_slices(step) if marked else []
    for node in marked:
        if node not in lasting:
            what = f"in place: {node.name} reads slices that may be written before all ranks have released them"
            _fail(step, after, node, what)


def _check_clipped(step: StepGraph, after: str, order: dict[fx.Node, int]) -> None:
    rules = []
    if step.clipping is not None:
        rules.append(("clipping", order[step.clipping.factor], "the factor is known"))
    if step.unscaling is not None:
        rules.append(("scaling", order[step.unscaling.inverse], "the inverse of the scale is known"))
    checks = [node for node in step.calls() if node.target is ops.check_gradients]
    rules += [("scaling", order[check], "gradients are known to be finite") for check in checks]
    if not rules:
        return
    for role in (Role.FULL, Role.SHARD, Role.PART, Role.MASTER, Role.STATE):
        for stored in step.placeholders(role):
            for writer in (reader for reader in consumers(stored) if stored in mutated_inputs(reader)):
                for rule, known, what in rules:
                    if order[writer] < known and writer.target not in ops.COLLECTIVES:
                        _fail(step, after, writer, f"{rule}: {writer.name} writes {stored.name} before {what}")


def _check_written(step: StepGraph, after: str, plan: Plan) -> None:
    """Check that what an update changes masters of has its new parameters, wherever they live."""
    masters, parameters = (
        {placeholder(node).bucket for role in roles for node in step.placeholders(role) if _is_written(node)}
        for roles in ((Role.MASTER,), (Role.FULL, Role.SHARD, Role.PART))
    )
    for bucket in masters - parameters:
        name = plan.buckets[bucket].name if bucket is not None else "a bucket"
        _fail(step, after, step.output, f"updates: nothing writes the parameters of {name}, whose masters are changed")


def _is_written(stored: fx.Node) -> bool:
    return any(is_view_of(given, stored) for reader in consumers(stored) for given in mutated_inputs(reader))


def _check_reductions(step: StepGraph, after: str) -> None:
    counts: Counter[object] = Counter()
    for node in step.calls():
        if node.target is ops.next_micro_batch:
            counts.clear()
        elif is_reduction(node):
            counts[node.args[1]] += 1
            if counts[node.args[1]] > 1:
                _fail(step, after, node, f"gradients: bucket {node.args[1]} is reduced 2 times")


def _check_names(step: StepGraph, after: str) -> None:
    seen: set[str] = set()
    for node in step.graph.nodes:
        if node.name in seen:
            _fail(step, after, node, f"names: {node.name} is the name of another node too")
        seen.add(node.name)


def _check_random(step: StepGraph, after: str) -> None:
    seen: set[str] = set()
    for node in step.calls():
        if is_random(node):
            original = copied_from(node) or node.name
            if original in seen:
                _fail(step, after, node, f"random operators: {node.name} runs {original} a second time")
            seen.add(original)


def _check_loop(step: StepGraph, after: str, order: dict[fx.Node, int]) -> None:
    loops = loops_of(step)
    loop_of_node = loop_numbers(loops)
    ends = [order[loop.end] for loop in loops]
    given = [{storage_source(before) for before, _ in loop.carries} for loop in loops]
    handed_on = [{storage_source(after) for _, after in loop.carries} for loop in loops]
    for storage, readers in _readers_by_storage(step).items() if loops else ():
        owner = storage[0]
        last, made_in = max(map(order.__getitem__, readers)), loop_of_node.get(owner)
        for number in dict.fromkeys(loop_of_node[reader] for reader in readers if reader in loop_of_node):
            if made_in is None and storage not in given[number] and last < ends[number]:
                _fail(step, after, owner, f"loop: {owner.name} is read in each round, and gone after the first")
        for number, passed in enumerate(given):
            if storage in passed and storage not in handed_on[number] and last > ends[number]:
                _fail(
                    step, after, owner, f"loop: {owner.name} is handed on to the first round, and read after the last"
                )
        if made_in is None or storage in handed_on[made_in]:
            continue
        # Round i of another loop may read what round i of this one has made.
        if any(order[reader] > ends[made_in] and reader not in loop_of_node for reader in readers):
            _fail(step, after, owner, f"loop: {owner.name} is made in each round, and read after the last")


def _readers_by_storage(step: StepGraph) -> dict[Storage, list[fx.Node]]:
    """The readers of what calls make, in order, without views, and without what hands it out of the step."""
    readers: dict[Storage, list[fx.Node]] = {}
    for node in step.calls():
        if node.target is operator.getitem:
            continue  # it names one output
        for storage in map(storage_source, node.all_input_nodes):
            # Gradients that are to be reduced are outputs, and what a step hands out of each round is that.
            is_handed_out = node.target is ops.check_gradients
            is_renamed = is_view(node) and storage_source(node) == storage
            if storage[0].op == "call_function" and not is_handed_out and not is_renamed:
                readers.setdefault(storage, []).append(node)
    return readers


def _fail(step: StepGraph, after: str, node: fx.Node, what: str) -> NoReturn:
    nodes = list(step.graph.nodes)
    at = nodes.index(node)
    around = nodes[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS + 1]
    lines = [f"{'>' if n is node else ' '} {n.name} = {target_name(n)}{n.args}" for n in around]
    raise InvalidGraphError(f"after pass {after}, {what}\n" + "\n".join(lines))
