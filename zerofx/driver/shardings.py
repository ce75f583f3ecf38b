"""Sharing of a step's computation by the ranks of the model axis: decided on rank 0, and kept on disk.

Deciding it takes longer than making most plans. It follows from the captured graph, the mesh, the machine and the
requested placements; if layouts are simulated to choose among them, also from everything that a plan follows from.
Products in fp8 are chosen after that, in the graph of one rank.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import xxhash
from torch import fx

from zerofx.capture.cache import trace_settings
from zerofx.disk.cache import DiskCache, key_of
from zerofx.driver.captures import Captures
from zerofx.driver.meshes.layouts import Judge, Shardings, best_prices, choose_copies, choose_sending
from zerofx.driver.prepared import Earlier, Request, Shared
from zerofx.errors import PlanError, RankMismatchError, UsageError, notify
from zerofx.ir.batch import Batch, hash_of
from zerofx.ir.canonical import graph_parts
from zerofx.ir.facts import Role, placeholder
from zerofx.ir.graph import StepGraph
from zerofx.ir.sharding.grouped import ends_of
from zerofx.json_format import parse_value, to_data
from zerofx.option_table import defaults_for
from zerofx.options import CompileOptions
from zerofx.passes.prepare.stages import buffers_of_backward
from zerofx.progress import watch_progress
from zerofx.runtime.state.optimizer import hyperparameter_texts
from zerofx.scheduler.analysis.expert_rows import Experts, experts_of, kinds_that_send, weights_of
from zerofx.scheduler.analysis.sharding_pins import EXCHANGE, apply_pins, pins_of
from zerofx.scheduler.analysis.sharding_ways import ShardingWays, sharding_ways
from zerofx.scheduler.cost.sharding_seconds import Prices
from zerofx.scheduler.decide.shardings import decide_shardings
from zerofx.scheduler.decide.value_overlap import decide_overlaps
from zerofx.scheduler.plan.decisions import MovedNodes, ProductDecision, ShardingDecision
from zerofx.scheduler.plan.mesh import TOGETHER, Mesh, batch_number
from zerofx.scheduler.plan.placements import FIRST_CAPACITY, Placement, Ragged, Sharded, placement_of
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.plan.text.shared import placement_words
from zerofx.scheduler.search.fp8_products import ProductKey, decide_products
from zerofx.scheduler.search.stage_cuts import BALANCES, Balance
from zerofx.torch_private.profiler import is_profiling
from zerofx.units import first_few

Decision = TypeVar("Decision", ShardingDecision, MovedNodes, ProductDecision)


def decide_with_cache(
    request: Request, step: StepGraph, kind: type[Decision], decide: Callable[[], tuple[Decision, ...]], *said: str
) -> tuple[Decision, ...]:
    """The result of ``decide()`` for the captured ``step``, from the cache if an earlier run decided it; ``said`` is
    everything else it follows from."""
    cache = DiskCache(request.settings.cache_dir)
    if cache.folder is None:
        return decide()
    key = key_of("sharing", (
        kind.__name__, *graph_parts(step), repr(request.mesh), repr(request.machine), *trace_settings(), *said,
    ))  # fmt: skip
    decisions = cache.read_as(key, lambda text: from_json(kind, text))
    if decisions is None:
        decisions = decide()
        if not is_profiling():  # as of plans
            cache.write(key, to_json(decisions))
    return decisions


def to_json(decisions: Sequence[ShardingDecision | MovedNodes | ProductDecision]) -> str:
    """Decisions as JSON."""
    return json.dumps(to_data(decisions))


def from_json(kind: type[Decision], text: str) -> tuple[Decision, ...]:
    """The decisions that ``to_json`` wrote as ``text``."""
    return tuple(parse_value(kind, item, kind.__name__) for item in json.loads(text))


GatherHashes = Callable[[Mapping[str, str], str], Sequence[Mapping[str, str]]]
T = TypeVar("T")
Everywhere = Callable[[str, Callable[[], str]], str]
"""What rank 0 says, on all ranks: ``Control.share``."""


def layouts(
    request: Request, captures: Captures, earlier: Earlier | None, everywhere: Everywhere
) -> Iterator[Captures]:
    """The step as one rank of the model axis runs it, or ``captures`` without such an axis: the fastest way, then, if
    it is another, the one that takes less memory, which is for where no plan of the first fits. Then, where rows of
    experts are to have more room than steps begin with, with that, in rounds.

    It is shared in one way whatever else a plan does (options that are not for "sharing"), so that all have the same
    bits.

    Raises:
        ZeroFXError: as ``share_computation``.
    """
    if request.needed:
        request = _compare_copies(request, captures, earlier, everywhere)
    if request.num_rounds > 1:
        yield _lay_out_in_rounds(request, captures, earlier, everywhere)
        return
    fastest = share_computation(request, captures, earlier, everywhere)
    yield choose_products(request, fastest, earlier, everywhere)
    if request.mesh.model > 1:
        smaller = share_computation(request, captures, earlier, everywhere, within_budget=True)
        if smaller.shardings != fastest.shardings:
            yield choose_products(request, smaller, earlier, everywhere)
    if request.num_copies:
        yield from layouts(_drop_copies(request), captures, earlier, everywhere)
        return
    if request.capacity == FIRST_CAPACITY or isinstance(request.options.plan, Plan):
        return
    begun = replace(request, capacity=FIRST_CAPACITY)
    if earlier is None:
        yield from layouts(begun, captures, earlier, everywhere)
        return
    num_rounds = math.ceil(request.capacity / FIRST_CAPACITY)
    try:
        yield _lay_out_in_rounds(replace(begun, num_rounds=num_rounds), captures, earlier, everywhere)
    except PlanError as obstacle:
        if request.verbose:
            notify(f"rows of experts are not sent in rounds: {obstacle}")


def _compare_copies(request: Request, captures: Captures, earlier: Earlier | None, everywhere: Everywhere) -> Request:
    """The request with copies of experts, or, if a step is no faster so, with room for their rows; stages do as all of
    the step would."""
    other = _drop_copies(request)
    if isinstance(request.options.plan, Plan) or request.num_rounds > 1:
        return request if request.num_rounds > 1 else other

    def compare() -> str:
        ways = [replace(each, mesh=replace(request.mesh, pipe=1)) for each in (request, other)]
        judge = Judge(ways[0], captures, share_one_rank)
        copied, roomy = (_decide(each, captures, earlier) for each in ways)
        is_better, why = choose_copies(judge, copied, roomy, request.needed)
        return json.dumps([is_better, why])

    is_better, why = json.loads(everywhere("compare steps with copies of experts", compare))
    return replace(request if is_better else other, why_copies=why)


def _drop_copies(request: Request) -> Request:
    return replace(request, num_copies=0, needed=0.0, capacity=max(request.capacity, request.needed))


def _lay_out_in_rounds(
    request: Request, captures: Captures, earlier: Earlier | None, everywhere: Everywhere
) -> Captures:
    """The step in which ranks send each other rows of experts in ``num_rounds``.

    Raises:
        PlanError: they cannot be sent in rounds; on all ranks.
    """
    at_once = share_computation(replace(request, num_rounds=1), captures, earlier, everywhere)
    shardings = tuple(
        replace(each, num_rounds=request.num_rounds) if each.sends_rows else each for each in at_once.shardings
    )
    captures.share(shardings, request.mesh.model).rank_graph(captures.candidates[0])  # or fails on each rank alike
    return choose_products(request, apply_shardings(request, captures, shardings, everywhere), earlier, everywhere)


def lay_out(
    request: Request, captures: Captures, earlier: Earlier | None, everywhere: Everywhere
) -> Iterator[tuple[Captures, Balance]]:
    """``layouts``, each with stages that take alike, then with those that hold alike, where the first fit no budget.

    Stages that ``earlier`` has or a plan that is given, or that are none, are there in one way.
    """
    is_open = request.mesh.pipe > 1 and earlier is None and request.options.plan is None
    balances = BALANCES if is_open else BALANCES[:1]
    for one_rank in layouts(request, captures, earlier, everywhere):
        for balance in balances:
            yield one_rank, balance


def share_computation(
    request: Request,
    captures: Captures,
    earlier: Earlier | None,
    everywhere: Everywhere,
    *,
    within_budget: bool = False,
) -> Captures:
    """The step as one rank of the model axis runs it; ``captures`` where there is no such axis.

    ``within_budget``: whether memory has a price, as the budget asks, or only time counts: that of a step at stage 3.

    Raises:
        PlanError: no way to share it was found.
        UsageError: the number of micro-batches is left to the plan, or ``shardings`` asks for what cannot be.
    """
    if request.mesh.model == 1:
        return captures
    # Stages share their parts of it as all of it would be.
    request = replace(request, mesh=replace(request.mesh, pipe=1))
    _check(request, captures)
    shardings = everywhere(
        "share how ranks share the computation",
        lambda: to_json(_decide(request, captures, earlier, within_budget=within_budget)),
    )
    return apply_shardings(request, captures, from_json(ShardingDecision, shardings), everywhere)


def choose_products(request: Request, captures: Captures, earlier: Earlier | None, everywhere: Everywhere) -> Captures:
    """The step of one rank with those products in fp8 that are faster so; ``captures`` where none may be.

    They are chosen for the size of a micro-batch: for each number of them that there may be. ``earlier`` as for
    ``prepare``, ``everywhere`` as for ``share_computation``.
    """
    recipe = request.options.precision.fp8
    if recipe is None:
        return captures

    def decide(number: int) -> str:
        if isinstance(request.options.plan, Plan):
            return to_json(request.options.plan.products)
        known = None if earlier is None else earlier.shared.in_fp8
        whole, step = captures.whole_graph(number), captures.rank_graph(number)
        return to_json(decide_products(whole, step, captures.num_parts, request.machine, recipe, known))

    products = {
        number: from_json(ProductDecision, everywhere("choose products in fp8", functools.partial(decide, number)))
        for number in captures.candidates
    }
    every = list(itertools.chain(*products.values()))
    if request.verbose and earlier is None and not any(decision.in_fp8 for decision in every):
        reasons = first_few(dict.fromkeys(decision.reason for decision in every))
        notify(f"no product is taken in fp8: {reasons or 'there is none with a weight'}")
    return captures.multiply(products)


def products_in_fp8(plan: Plan) -> tuple[ProductKey, ...]:
    """The products of a plan that are in fp8, as all graphs of its model have them."""
    return tuple(dict.fromkeys((each.weight, each.gives) for each in plan.products if each.in_fp8))


def decide_alone(_purpose: str, decide: Callable[[], str]) -> str:
    """Decide without telling other ranks, as ``Everywhere`` for a step that is not to be run."""
    return decide()


def shardings_of(request: Request, captures: Captures) -> tuple[ShardingDecision, ...]:
    """The shardings of calls and values over ranks of the model axis, as ``share_computation`` has them decided, before
    overlaps are chosen; none without such an axis.

    Raises: as ``share_computation``.
    """
    if request.mesh.model == 1:
        return ()
    _check(request, captures)
    return _decide(request, captures, None, explained=False)


def apply_shardings(
    request: Request, captures: Captures, shardings: tuple[ShardingDecision, ...], everywhere: Everywhere = decide_alone
) -> Captures:
    """The step as one rank of the model axis runs it, whose calls are shared as ``shardings`` say."""
    if request.mesh.model == 1:
        return captures
    one_rank = captures.share(shardings, request.mesh.model)
    overlaps = everywhere("overlap what ranks send each other", lambda: to_json(_overlaps(request, one_rank)))
    return one_rank.reorder(from_json(MovedNodes, overlaps))


def share_one_rank(request: Request, captures: Captures, shardings: tuple[ShardingDecision, ...]) -> Captures:
    """The step as one rank runs it to be compared with others: shared as ``shardings`` say, with products in fp8."""
    shared = apply_shardings(request, captures, shardings)
    return choose_products(replace(request, verbose=False), shared, None, decide_alone)


def record_shardings(request: Request, captures: Captures, plan: Plan, placements: Mapping[str, Placement]) -> Shared:
    """The sharing of a step over ranks of the model axis in ``plan``, and its products in fp8, for ``Earlier``;
    ``placements`` are those of all parameters."""
    given = _step_key(request, captures) if request.mesh.model > 1 else ""
    return Shared(given, plan.shardings, placements, in_fp8=products_in_fp8(plan))


def digest_of(batch: Batch, mesh: Mesh) -> bytes:
    """A hash, of 16 bytes, of the batch that ranks which share a computation must have alike in each step.

    Of what is in the host's memory alone: to read what is on a device the host would wait for all that runs there.
    Empty where nothing is shared.
    """
    if mesh.num_together == 1:
        return b""
    readable = [hash_of(tensor) for tensor in batch.tensors if tensor.device.type == "cpu"]
    return xxhash.xxh3_128_digest("".join(readable).encode())


def check_digests(digests: Sequence[bytes], batch: Batch, mesh: Mesh, gather: GatherHashes) -> None:
    """See that the ``digest_of`` is the same on ranks that share a computation; otherwise as ``check_batches``.

    ``digests`` are those of all ranks. Collective.
    """
    if any(digests[rank] != digests[members[0]] for members in mesh.groups(TOGETHER) for rank in members):
        check_batches(batch, mesh, gather)


def check_batches(batch: Batch, mesh: Mesh, gather: GatherHashes) -> None:
    """See that the ranks that share a computation are given the same batch; ``gather``: ``Control.gather``. Collective.

    Raises:
        RankMismatchError: two of them are not, on all ranks; says which, and in what.
    """
    if mesh.num_together == 1:
        return
    hashes = gather({name: hash_of(t) for name, t in zip(batch.names, batch.tensors, strict=True)}, "compare batches")
    along = " and ".join(map(repr, mesh.axes_in_use(TOGETHER)))
    for members in mesh.groups(TOGETHER):
        for rank in members[1:]:
            unlike = [name for name, value in hashes[rank].items() if hashes[members[0]].get(name) != value]
            if unlike:
                raise RankMismatchError(
                    f"expected the same batch on ranks {', '.join(map(str, members))}, which share one computation "
                    f"(mesh {mesh}), found other values of {', '.join(unlike)} on rank {rank} than on rank "
                    f"{members[0]}: give each group of the axis {along} one batch, as a DistributedSampler with "
                    f"num_replicas={mesh.num_batches} and rank={batch_number(mesh)} does"
                )


def _check(request: Request, captures: Captures) -> None:
    """Raises:
    UsageError: the number of micro-batches is left to the plan.
    """
    if len(captures.candidates) > 1:
        raise UsageError(
            f"expected accumulate to be a number where the mesh has an axis 'model', found "
            f"accumulate={request.options.accumulate!r}: say how many micro-batches there are"
        )


def _decide(
    request: Request,
    captures: Captures,
    earlier: Earlier | None,
    *,
    explained: bool = True,
    within_budget: bool = False,
) -> tuple[ShardingDecision, ...]:
    if isinstance(request.options.plan, Plan):
        return _with_capacity(request.options.plan.shardings, request.capacity)
    step = captures.whole_graph(captures.candidates[0])
    if earlier is not None and earlier.shared.given == _step_key(request, captures):
        return _add_room(earlier.shared.shardings, request, step)  # another update of the same step
    asked = dict(request.options.shardings or {})
    if request.locations is not None:  # an evaluation, which gathers
        asked = {name: word for name, word in asked.items() if word != EXCHANGE}
    pins = pins_of(step, asked)
    if pins.ignored and request.verbose:
        notify(f"shardings: nothing follows from {first_few(pins.ignored)}")
    lent = _borrow_placements(request)
    given = {**lent, **(earlier.shared.placements if earlier else {})}
    names = {node: placeholder(node).name for node in step.placeholders(Role.PARAMETER)}
    lying = {node: given[name] for node, name in names.items() if name in given}
    obstacle = _obstacle_to_sending(request, step)
    sends = EXCHANGE in asked.values() and obstacle is None
    simulated = explained and request.locations is None and (earlier is None or within_budget)
    if not within_budget:
        request = replace(request, options=replace(request.options, **defaults_for(CompileOptions, "sharing")))

    @functools.cache
    def ways_with(capacity: float) -> ShardingWays:
        marks = {node: f"{pins.marks.get(node, '')} {lies}" for node, lies in lying.items()}
        ways = sharding_ways(step, request.mesh.model, {**pins.marks, **marks}, capacity)
        for node, lies in lying.items():  # whether or not what reads it here can
            possible = ways.placeholders[ways.classes.first[node]]
            possible += [] if lies in possible else [lies]
        return ways

    def decide_at(prices: Prices, kinds: Sequence[str] = (), *, explained: bool = False) -> Shardings:
        ways = apply_pins(ways_with(FIRST_CAPACITY if kinds or sends else 0.0), pins, kinds)
        return decide_shardings(ways, request.mesh, request.machine, prices, given, explained=explained)

    def decide() -> Shardings:
        prices = best_prices(request, captures, share_one_rank, decide_at, Prices()) if simulated else Prices()
        experts = [] if request.locations is not None else experts_of(ways_with(FIRST_CAPACITY if sends else 0.0))
        experts = [each for each in experts if not any(node in pins.parameters for node in each.weights)]
        offered = kinds_that_send(ways_with(FIRST_CAPACITY)) if experts and obstacle is None else ()
        trouble = {each.kind: obstacle or _obstacle_of(each, offered, lying) for each in experts}
        kinds, said = [kind for kind, why in trouble.items() if why is None], dict[str, str]()
        if kinds:
            judge = Judge(request, captures, share_one_rank)
            kinds, said = choose_sending(judge, lambda some: decide_at(prices, some), kinds)
        decided = decide_at(prices, kinds, explained=explained)
        how = {kind: f"rows are not sent to their experts: {why}" for kind, why in trouble.items()} | said
        more = {node.name: how[each.kind] for each in experts for node in each.weights} if explained else {}
        why = {node.name: f"as {', '.join(map(str, of_node))} asks" for node, of_node in pins.parameters.items()}
        why |= {node.name: "as the step has it that trains it" for node in lying if names[node] in lent}

        why |= {node.name: "" for each in experts if each.kind in kinds for node in each.weights}  # `more` tells

        def reason(decision: ShardingDecision) -> str:
            given = why.get(decision.node, decision.reason)
            return "; ".join(filter(None, (given, more.get(decision.node, ""))))

        return tuple(replace(decision, reason=reason(decision)) for decision in decided)

    said = [repr(sorted(request.options.shardings.items())), repr(sorted(given.items())), str(explained)]
    said += [str(obstacle), str(FIRST_CAPACITY)]
    if request.locations is None:  # layouts are simulated, which follows from all that a plan does
        said += [*request.options.texts("plan"), str(hyperparameter_texts(request.optimizers)), str(simulated)]
    with watch_progress("sharing the computation", show=request.verbose):
        return _add_room(decide_with_cache(request, step, ShardingDecision, decide, *said), request, step)


def _obstacle_to_sending(request: Request, step: StepGraph) -> str | None:
    """The reason why no rows of experts can be sent, if there is one: a step that is run again, with more room for
    them, begins with what it began with, and none of its updates are under way."""
    if request.locations is not None:
        return "evaluations gather"
    if request.options.delayed_update is not None:
        return "updates are delayed"
    changed = buffers_of_backward(step)
    return f"backward changes the buffer {changed[0]}" if changed else None


def _obstacle_of(experts: Experts, offered: Collection[str], lying: Mapping[fx.Node, Placement]) -> str | None:
    """The reason why rows of these experts cannot be sent, if there is one."""
    if experts.kind not in offered:
        return "their number, or that of tokens, is none that the ranks divide, or rows are not taken by one index"
    lies = next((lying[node] for node in experts.weights if lying.get(node, Sharded(0)) != Sharded(0)), None)
    return None if lies is None else f"they lie {placement_words(str(lies))}, as another step has them"


def _add_room(shardings: Sequence[ShardingDecision], request: Request, step: StepGraph) -> tuple[ShardingDecision, ...]:
    """The decisions, with the room, and the copies of experts, that are asked for; their weights' say why."""
    given = {each.node: each for each in _with_capacity(shardings, request.capacity)}
    for node, each in given.items():
        if each.sends_rows:
            given[node] = replace(each, num_copies=request.num_copies)
    if request.why_copies:
        products = (node for node in step.calls() if ends_of(node) and node.name in given)
        sending = (node for node in products if given[node.name].sends_rows)
        for name in dict.fromkeys(weight.name for node in sending for weight in weights_of(node)):
            given[name] = replace(given[name], reason="; ".join(filter(None, (given[name].reason, request.why_copies))))
    return tuple(given.values())


def _with_capacity(shardings: Sequence[ShardingDecision], capacity: float) -> tuple[ShardingDecision, ...]:
    """The decisions, with at least ``capacity`` for the rows that ranks send each other."""

    def widen(text: str) -> str:
        placement = placement_of(text)
        if isinstance(placement, Ragged) and 0 < placement.capacity < capacity:
            return str(replace(placement, capacity=capacity))
        return text

    def widen_all(decision: ShardingDecision) -> ShardingDecision:
        outputs = tuple(None if text is None else widen(text) for text in decision.outputs)
        return replace(decision, outputs=outputs, inputs=tuple(map(widen, decision.inputs)))

    return tuple(map(widen_all, shardings))


def _step_key(request: Request, captures: Captures) -> str:
    """Tells a captured step, and where what it reads of other steps lies, from others."""
    graph = captures.whole_graph(captures.candidates[0]).fingerprint()
    return f"{graph} {sorted(_borrow_placements(request).items())}"


def _borrow_placements(request: Request) -> dict[str, Placement]:
    return {name: lies for borrowed in request.borrowed for name, lies in borrowed.placements().items()}


def _overlaps(request: Request, one_rank: Captures) -> tuple[MovedNodes, ...]:
    if isinstance(request.options.plan, Plan):
        return request.options.plan.overlaps
    number = one_rank.candidates[0]
    whole = one_rank.whole_graph(number)
    return decide_with_cache(
        request, whole, MovedNodes, lambda: decide_overlaps(one_rank.rank_graph(number), request.machine),
        to_json(one_rank.shardings),
    )  # fmt: skip
