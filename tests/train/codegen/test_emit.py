"""The emitted file: readable, a program that Python runs, and it frees what it says it frees."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.lib.graphs import DIM, Averaging, Normed, Prepared, Tied, TwoBlocks, features, prepare, sgd, token_ids
from tests.lib.runs.offloads import offloading
from zerofx.codegen.emit import EmittedStep, emit
from zerofx.codegen.regions import cut
from zerofx.codegen.step_file import literal, load_source, wrap_line
from zerofx.errors import PlanError
from zerofx.ir.buckets import BucketLayout
from zerofx.ir.facts import Role, placeholder
from zerofx.runtime.executor import StepFunction
from zerofx.scheduler.cost.cpu.workspace import workspace_bytes
from zerofx.scheduler.cost.liveness import liveness
from zerofx.scheduler.plan.decisions import Absence
from zerofx.scheduler.plan.facts import Tier


def _emit(prepared: Prepared) -> EmittedStep:
    scalars = {index: program.scalars for index, program in prepared.programs.items()}
    live = liveness(prepared.step, on_cpu=True)
    return emit(prepared.step, cut(prepared.step), live, "A tiny step.", scalars)


def _function(source: str) -> StepFunction:
    function: StepFunction = load_source(source, "tiny_step.py")["step"]
    return function


class _OneRank:
    """The runtime that a step of one rank calls, with SGD's one scalar; what nobody wrote would show as NaN."""

    def __init__(self, layout: BucketLayout) -> None:
        self._layout = layout

    def hyperparameters(self, bucket: int) -> tuple[float, ...]:
        return (-0.1,)

    def empty_gradients(self, bucket: int) -> Tensor:
        return torch.full((self._layout.buckets[bucket].numel,), math.nan)


class _World:
    """What a step of one rank needs to run: its flat buffers, filled from the model."""

    def __init__(self, prepared: Prepared, model: nn.Module) -> None:
        values = {name: p.detach() for name, p in model.named_parameters()}
        self.buffers = {name: b.clone() for name, b in model.named_buffers()}
        self.flat: dict[int, Tensor] = {}
        self.prepared = prepared
        for bucket in prepared.layout.buckets:
            self.flat[bucket.index] = torch.zeros(bucket.numel)
            for slot in bucket.slots:
                slot.view(self.flat[bucket.index]).copy_(values[slot.name])
        self.runtime: Any = _OneRank(prepared.layout)

    def run(self, function: StepFunction, *batch: Tensor) -> Tensor:
        state = {}
        for node in self.prepared.step.placeholders():
            what = placeholder(node)
            if what.role is Role.FULL and what.bucket is not None:
                state[node.name] = self.flat[what.bucket]
            elif what.role is Role.BUFFER:
                state[node.name] = self.buffers[what.name]
        names = [node.name for node in self.prepared.step.placeholders(Role.INPUT)]
        with torch.no_grad():
            loss = function(self.runtime, state, dict(zip(names, batch, strict=True)))
        assert isinstance(loss, Tensor)
        return loss

    def parameters(self) -> dict[str, Tensor]:
        return {
            slot.name: slot.view(self.flat[bucket.index]).clone()
            for bucket in self.prepared.layout.buckets
            for slot in bucket.slots
        }


def _eager_step(model: nn.Module, *batch: Tensor) -> Tensor:
    optimizer = sgd(model)
    optimizer.zero_grad()
    loss: Tensor = model(*batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


class _FlatLoss(TwoBlocks):
    """Its loss is a view of the head's output."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(x[:1]).view(())
        return loss


def test_a_whole_step(golden: Callable[..., None]) -> None:
    golden(_emit(prepare().run()).source)


@pytest.mark.parametrize("update", ["device", "host"])
def test_a_step_with_tiers(golden: Callable[..., None], update: Tier) -> None:
    prepared = prepare(precision="bf16")
    plan = offloading(prepared, prepared.plan, ["host", "nvme"])
    prepared.plan = plan.replace_absences(
        states=[Absence(kind="states", bucket=i, tier="host", update=update, reason="") for i in range(3)]
    )
    golden(_emit(prepared.run()).source)


@pytest.mark.parametrize(
    ("make", "batch"),
    [(TwoBlocks, features), (Averaging, features), (Normed, features), (Tied, token_ids), (_FlatLoss, features)],
)
def test_the_file_trains_as_eager_mode_does(make: type[nn.Module], batch: Callable[[], tuple[Tensor, ...]]) -> None:
    model, given_batch = make(), batch()
    prepared = prepare(model, given_batch, num_ranks=1)
    world = _World(prepared, model)
    function = _function(_emit(prepared.run()).source)
    for _ in range(2):
        loss = world.run(function, *given_batch)
        assert torch.equal(loss, _eager_step(model, *given_batch))
    for name, parameter in model.named_parameters():
        assert torch.equal(world.parameters()[name], parameter), name
    for name, buffer in model.named_buffers():
        assert torch.equal(world.buffers[name], buffer), name


class _Storages(TorchDispatchMode):
    """The storages that operators make: which are alive, and the most bytes at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as torch has it
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given_storages = {t.untyped_storage()._cdata for t in _tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in given_storages:
                # An address may be used again after its storage has died.
                self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes())
        return result

    def live_bytes(self) -> int:
        return sum(size for ref, size in self.seen.values() if not ref.expired())


def _tensors(tree: Any) -> Iterator[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))


@pytest.mark.parametrize("make", [TwoBlocks, Averaging, Normed])
def test_memory_is_held_as_long_as_the_comments_say(make: type[nn.Module]) -> None:
    model, batch = make(), features()
    prepared = prepare(model, batch, num_ranks=1)
    world = _World(prepared, model)
    function = _function(_emit(prepared.run()).source)
    live = liveness(prepared.step, on_cpu=True)
    with _Storages() as storages:
        loss = world.run(function, *batch)
    assert storages.live_bytes() == loss.nbytes, "only the loss outlives the step"
    # What a kernel takes for itself while it runs is not seen here.
    at_once = [max(live.during[node] - workspace_bytes(node), live.after[node]) for node in live.after]
    assert storages.peak_bytes == max(at_once) - live.persistent_bytes


def test_a_regions_inputs_die_inside_it() -> None:
    source = _emit(prepare().run()).source
    forward = load_source(source, "tiny_step.py")["layers_forward"]
    given_inputs = [torch.ones(2, DIM), torch.ones(32)]
    reference = StorageWeakRef(given_inputs[1].untyped_storage())
    alive: list[bool] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.relu.default:
                alive.append(not reference.expired())
            return func(*args, **(kwargs or {}))

    with Watch():  # type: ignore[no-untyped-call]  # as torch has it
        forward(given_inputs)
    assert not given_inputs and alive == [False]


@pytest.mark.parametrize("make", [TwoBlocks, Averaging, Normed])
def test_a_name_is_deleted_on_the_line_of_its_last_use(make: type[nn.Module]) -> None:
    source = _emit(prepare(make()).run()).source
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef) and function.args.args[0].arg in ("inputs", "runtime"):
            late = _deleted_late(function, source.splitlines())
            assert not late, (function.name, late)


def _deleted_late(function: ast.FunctionDef, lines: list[str]) -> list[str]:
    """Names that stay behind the line that reads them last, but for what a release line lets go of."""
    lines_of: dict[type[ast.expr_context], dict[str, int]] = {ast.Load: {}, ast.Store: {}, ast.Del: {}}
    kept = {"x"}  # the list that each region empties
    for statement in function.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                lines_of[type(node.ctx)][node.id] = node.lineno
                if isinstance(statement, ast.Return):
                    kept.add(node.id)
        if isinstance(statement, ast.Assign) and ast.unparse(statement.value).startswith(("state[", "batch[")):
            kept |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    read, stored, deleted = lines_of[ast.Load], lines_of[ast.Store], lines_of[ast.Del]
    return [
        name
        for name in stored.keys() - kept
        if name not in deleted
        or (deleted[name] != read.get(name, stored[name]) and "# release" not in lines[deleted[name] - 1])
    ]


def test_unused_outputs_of_an_operator_are_dropped_at_once() -> None:
    model = Normed()
    model.requires_grad_(False)
    last = model.layers[1]
    assert isinstance(last, nn.LayerNorm)
    last.bias.requires_grad_(True)
    source = _emit(prepare(model).run()).source
    compile(source, "<emitted>", "exec")
    # A forward and a backward, of whose three outputs one is read.
    dropping = [line for line in source.splitlines() if re.match(r" *(\w+, )*_(, \w+)* = ", line)]
    assert len(dropping) == 2 and all(re.search(r"; del .*\b_\b", line) for line in dropping)


_LITERALS = [
    1, -3, 0.1, -0.0, 1e300, math.inf, -math.inf, math.nan, True, False, None, "sum", 2 + 3j, (), (1,), [1, [2, (3,)]],
    [None, 0.5, [True]], torch.float32, torch.bfloat16, torch.channels_last, torch.strided, torch.device("cpu"),
]  # fmt: skip


@pytest.mark.parametrize("value", _LITERALS, ids=repr)
def test_a_literal_evaluates_to_itself(value: object) -> None:
    found = eval(literal(value), {"torch": torch})
    assert type(found) is type(value)
    assert repr(found) == repr(value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from([torch.int8, torch.preserve_format]),
        lambda children: st.lists(children, max_size=4) | st.lists(children, max_size=4).map(tuple),
        max_leaves=12,
    )
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_nested_literals_evaluate_to_themselves(value: object) -> None:
    assert repr(eval(literal(value), {"torch": torch})) == repr(value)


@given(st.lists(st.text("abcdefghij_", min_size=1, max_size=30).map(lambda s: f"v{s}"), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_wrapped_line_is_the_same_statement_in_lines_of_bounded_width(names: list[str]) -> None:
    line = f"({', '.join(names)},) = layers_forward([{', '.join(names)}])  # live 12 B | compute"
    lines = wrap_line(f"    {line}")
    text = "\n".join(lines)
    assert ast.dump(ast.parse(text.strip())) == ast.dump(ast.parse(line))
    assert max(map(len, lines)) <= 100 + 60  # a name and the comment after the last bracket stay whole


def test_an_edited_file_runs_as_edited() -> None:
    model, batch = TwoBlocks(), features()
    prepared = prepare(model, batch, num_ranks=1)
    world = _World(prepared, model)
    source = _emit(prepared.run()).source
    expected = 3 * world.run(_function(source), *batch)
    world = _World(prepared, model)
    edited = source.replace("    return sum_1\n", "    return 3 * sum_1\n")
    assert edited != source
    assert torch.equal(world.run(_function(edited), *batch), expected)


def test_a_file_that_does_not_load_is_refused() -> None:
    with pytest.raises(PlanError, match="SyntaxError"):
        load_source("def step(:", "broken.py")
    with pytest.raises(PlanError, match="expected a function step"):
        load_source("stop = 1", "empty.py")
