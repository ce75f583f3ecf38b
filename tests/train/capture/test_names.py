"""Operators, modules, parameters, buffers and arguments of a model may have any name, those that zerofx uses too."""

from __future__ import annotations

import ast
import builtins
import functools
import keyword
import random
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.lib.checkout import ROOT
from tests.lib.graphs import DIM, Prepared, TwoBlocks, adagrad, prepare
from tests.lib.plans import merged
from tests.lib.runs.offloads import offloading, parameters_away, recomputing
from zerofx.codegen.step_file import load_source
from zerofx.errors import InvalidGraphError
from zerofx.passes.verify import verify
from zerofx.scheduler.search.problem import BudgetMissedError

# What no identifier can be called, but a module, a parameter or a keyword of a batch can.
HOSTILE = ("3x3", "a b", "²", "ünits", "_", "__", "quote'\"", "line\nbreak = 1", "#", "\\", "{x}", "%s")
KINDS = ("parameter", "buffer", "module", "operator", "argument")


@functools.cache
def _names() -> tuple[str, ...]:
    """Every name that passes give to nodes or that emitted source uses, every keyword and builtin, and hostile ones."""
    model = TwoBlocks()
    prepared = [
        prepare(model, optimizer=adagrad(model), num_micro_batches=2),
        prepare(stage=0, precision="bf16"),
        merged(1, 2),
        _with(prepare(num_ranks=1), lambda p: parameters_away(p, "nvme", ("nvme", "device"))),
        _with(prepare(), lambda p: parameters_away(p, "host", ("host", "host"))),
        _with(prepare(), recomputing),
        _with(prepare(), lambda p: offloading(p, p.plan, ["host", "nvme"])),
    ]
    found = set(keyword.kwlist) | set(keyword.softkwlist) | set(dir(builtins)) | set(HOSTILE)
    for one in prepared:
        before = {node.name for node in one.step.graph.nodes}
        one.run()
        found |= {node.name for node in one.step.graph.nodes} - before
    planned = zerofx.plan(model, adagrad(model), (torch.ones(2, DIM),), 3, world_size=2, machine="cpu")
    for node in ast.walk(ast.parse(planned.lowered.emitted.source)):
        found |= {value for _, value in ast.iter_fields(node) if isinstance(value, str) and value.isidentifier()}
    own = dir(nn.Module())
    # Operators are numbered from the second call on.
    return tuple(sorted({text for name in found for text in (name, _stem(name))} - {*own, "", "self"}))


def _with(prepared: Prepared, planner: Any) -> Prepared:
    prepared.plan = planner(prepared)
    return prepared


def _stem(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


@functools.cache
def _operator(name: str) -> Any:
    """An operator called ``name``, which halves what it is given."""

    def halve(x: Tensor) -> Tensor:
        return x / 2

    made = torch.library.custom_op(f"test_names::{name}", halve, mutates_args=(), schema="(Tensor x) -> Tensor")
    made.register_fake(torch.empty_like)
    made.register_autograd(lambda ctx, grad: grad / 2)
    return made


class _Named(nn.Module):
    """A model with a thing of every name."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        super().__init__()
        self.__dict__["uses"] = [(name, kind) for name, kind in kinds.items() if kind != "argument"]
        for name, kind in self.__dict__["uses"]:
            if kind == "parameter":
                self.register_parameter(name, nn.Parameter(torch.randn(DIM) / 8 + 1))
            elif kind == "buffer":
                self.register_buffer(name, torch.randn(DIM) / 8)
            elif kind == "module":
                self.add_module(name, nn.Linear(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        for name, kind in self.__dict__["uses"]:
            if kind == "parameter":
                x = x * getattr(self, name)
            elif kind == "buffer":
                held: Tensor = getattr(self, name)
                x = x + held
                held.mul_(0.5)
            elif kind == "module":
                x = F.normalize(getattr(self, name)(x), dim=-1)
            else:
                x = _operator(name)(x) * 2
        return x


class _Model(nn.Module):
    """Two equal layers with a thing of every name, and what of the batch has a name."""

    def __init__(self, kinds: Mapping[str, str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Named(kinds) for _ in range(2))
        self.head = _Named(kinds)

    def forward(self, **batch: Tensor) -> Tensor:
        x = torch.stack(list(batch.values())).mean(0)
        for layer in self.layers:
            x = layer(x)
        index = torch.arange(DIM).expand(x.shape[0], DIM)
        picked: Tensor = self.head(x).gather(1, index).gather(1, index.flip(1))
        return picked.square().mean()


def _kinds(names: Iterable[str], seed: int) -> dict[str, str]:
    drawn = random.Random(seed)
    kinds = {name: drawn.choice(KINDS if name.isidentifier() else KINDS[:3]) for name in names}
    # Schemas of operators are parsed: what is a word there, or the name of a method, is no operator's.
    taken = {name for name, kind in kinds.items() if kind == "operator" and not _can_be_operator(name)}
    return {name: "parameter" if name in taken else kind for name, kind in kinds.items()}


def _can_be_operator(name: str) -> bool:
    return not (keyword.iskeyword(name) or name.startswith("__") or name in dir(builtins))


def _batch(kinds: Mapping[str, str]) -> dict[str, Tensor]:
    names = [name for name, kind in kinds.items() if kind == "argument"] or ["x"]
    return {name: torch.randn(4, DIM) for name in names}


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


@pytest.fixture(autouse=True)
def _verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROFX_VERIFY", "2")


def _least(model: nn.Module, batch: dict[str, Tensor], **options: Any) -> int:
    with pytest.raises(BudgetMissedError) as refused:
        zerofx.plan(model, _sgd(model), batch, memory_budget=1, machine="cpu", backend="eager", **options)
    return int(refused.value.least_bytes)


def _chosen(seed: int, number: int) -> dict[str, str]:
    """Some names of each kind, all of which come up after a few seeds."""
    return _kinds(random.Random(seed).sample(_names(), number), seed)


SEEDS = [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 40))]


@pytest.mark.days(3)
@pytest.mark.sweep(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_one_process_trains_like_eager_mode(seed: int) -> None:
    _compare(seed, {"stage": 0}, torch.equal)
    away = {"stage": 3, "accumulate": 2, "offload": {"gradients": "host"}}
    _compare(seed, away, torch.equal)
    _compare(seed, {**away, "max_grad_norm": 1.0}, torch.allclose)  # the norm is summed bucket by bucket


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_one_process_trains_like_eager_mode_with_as_little_memory_as_can_be(seed: int) -> None:
    least = {"stage": 3, "offload": "host", "memory_budget": 0}
    _compare(seed, {**least, "tile": "none"}, torch.equal)
    _compare(seed, least, torch.allclose)  # products with slices of a weight are summed


def _compare(seed: int, options: dict[str, Any], alike: Callable[[Tensor, Tensor], bool]) -> None:
    kinds = _chosen(seed, 8)
    torch.manual_seed(seed)
    batches = [_batch(kinds) for _ in range(2)]
    models = []
    for compiled in (False, True):
        torch.manual_seed(seed)
        model = _Model(kinds)
        _train(model, batches, compiled, **options)
        models.append(model.state_dict())
    for name, tensor in models[0].items():
        assert alike(tensor, models[1][name]), (options, name)


def _train(model: nn.Module, batches: list[dict[str, Tensor]], compiled: bool, **options: Any) -> None:
    optimizer, parts = _sgd(model), options.get("accumulate", 1)
    if compiled:
        if "memory_budget" in options:
            others = {name: value for name, value in options.items() if name != "memory_budget"}
            options = {**others, "memory_budget": _least(model, batches[0], **others)}
        step = zerofx.compile(model, optimizer, backend="eager", **options)
        for batch in batches:
            step(**batch)
        step.close()
        return
    for batch in batches:
        for number in range(parts):
            part = {name: given.chunk(parts)[number] for name, given in batch.items()}
            (model(**part) / parts).backward()
        if "max_grad_norm" in options:
            nn.utils.clip_grad_norm_(model.parameters(), options["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("stage", [0, 3])
def test_two_ranks_are_planned(stage: int, seed: int) -> None:
    kinds = _chosen(seed, 16)
    model = _Model(kinds)
    planned = zerofx.plan(
        model, _sgd(model), _batch(kinds), stage, world_size=2, machine="cpu", backend="eager", accumulate=2,
        max_grad_norm=1.0, offload={"gradients": "host"},
    )  # fmt: skip
    load_source(planned.lowered.emitted.source, "names")
    assert {task.job for task in planned.lowered.graph.tasks()} >= ({"gather"} if stage == 3 else {"reduction"})


@pytest.mark.parametrize("seed", SEEDS[2:])
def test_two_ranks_are_planned_with_as_little_memory_as_can_be(seed: int) -> None:
    kinds = _chosen(seed, 8)
    model, batch = _Model(kinds), _batch(kinds)
    options: dict[str, Any] = {"stage": 3, "world_size": 2, "offload": "host"}
    least = _least(model, batch, **options)
    zerofx.plan(model, _sgd(model), batch, machine="cpu", backend="eager", memory_budget=least, **options)


class _Dpo(nn.Module):
    """The loss of direct preference optimization (2305.18290), whose gathers have names of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(11, DIM), nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 11))

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -F.logsigmoid(self._log_likelihood(chosen) - self._log_likelihood(rejected)).mean()

    def _log_likelihood(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x[:, :-1]).log_softmax(-1).gather(-1, x[:, 1:, None]).sum((1, 2))
        return found


@pytest.mark.parametrize(
    "options", [{"world_size": 2}, pytest.param({"offload": "host", "memory_budget": 0}, marks=pytest.mark.slow)]
)
def test_a_model_with_gathers_of_its_own_is_planned(options: dict[str, Any]) -> None:
    model, batch = _Dpo(), (torch.arange(12).view(2, 6) % 11, torch.arange(12).view(2, 6) % 7)
    if "memory_budget" in options:
        with pytest.raises(BudgetMissedError) as refused:
            zerofx.plan(model, _sgd(model), batch, machine="cpu", **{**options, "memory_budget": 1})
        options["memory_budget"] = refused.value.least_bytes
    assert zerofx.plan(model, _sgd(model), batch, machine="cpu", **options).plan.gathers


def test_two_nodes_of_one_name_are_found() -> None:
    prepared = prepare()
    first, second, *_ = prepared.step.calls()
    second.name = first.name
    with pytest.raises(InvalidGraphError, match=f"names: {first.name} is the name of another node too"):
        verify(prepared.step, "none")


def _sources() -> dict[Path, ast.Module]:
    files = [path for folder in ("passes", "scheduler", "codegen", "zerofx") for path in (ROOT / folder).rglob("*.py")]
    return {path: ast.parse(path.read_text()) for path in files}


@pytest.mark.days(3)
def test_no_name_of_a_node_is_put_together_to_find_it() -> None:
    """What passes call their nodes (``f"gather_{number}"``) is written where they are made, and nowhere else."""
    makers, texts = set[str](), list[tuple[Path, ast.JoinedStr]]()
    made: set[int] = set()
    for path, tree in _sources().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("insert_call", "add_placeholder")):
                given = [*node.args[:1], *(word.value for word in node.keywords if word.arg == "name")]
                # A name may be handed to what makes it that of a micro-batch.
                for text in (part for one in given for part in ast.walk(one) if isinstance(part, ast.JoinedStr)):
                    made.add(id(text))
                    makers.add(_beginning(text))
            if isinstance(node, ast.JoinedStr):
                texts.append((path, node))
    makers.discard("")
    assert {"gather_", "grad_", "reduce_", "read_", "reload_", "full_"} <= makers
    lookups = [f"{p.name}:{t.lineno}" for p, t in texts if id(t) not in made and _beginning(t) in makers]
    assert [one for one in lookups if not one.startswith(_MADE_ELSEWHERE)] == []


# Names that are given to what makes the node, in variables.
_MADE_ELSEWHERE = ("gather.py:", "offload.py:", "gradients.py:", "reduce.py:", "reductions.py:", "whole_updates.py:")


def _beginning(text: ast.JoinedStr) -> str:
    first = text.values[0]
    return str(first.value) if isinstance(first, ast.Constant) else ""
