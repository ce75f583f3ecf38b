"""``zerofx opt``: rewrites run by name on saved graphs, one after the other, as texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor, nn

import zerofx
from tests.lib.graphs import DIM, ROWS, TwoBlocks, adagrad, difference, number_values, sgd
from zerofx.cli.commands import main
from zerofx.driver.opt import phase_passes, rewrite
from zerofx.driver.plan_only import graph_to_save
from zerofx.driver.saved_graph import SavedGraph
from zerofx.errors import PlanError, UsageError
from zerofx.ir.serialise import same_graph
from zerofx.pipeline import find
from zerofx.scheduler.plan.decisions import TileDecision
from zerofx.scheduler.plan.plan import Plan

Made = tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, ...]]
MAKE = "tests.plan.driver.test_opt:make"


def make() -> Made:
    """A model of two blocks with the optimizer of the shortest update."""
    model = TwoBlocks()
    return model, sgd(model), (torch.zeros(ROWS, DIM),)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, list(map(str, arguments)))


def texts(*arguments: object) -> str:
    result = run("opt", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.rstrip("\n")


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved graph; its plan is next to it."""
    folder = tmp_path_factory.mktemp("opt")
    given = ("--world-size", 2, "--machine", "cpu", "--save", folder / "plan.json")
    result = run("plan", MAKE, *given, "--save-graph", folder / "graph.json")
    assert result.exit_code == 0, result.output
    assert f"wrote {folder / 'graph.json'}" in result.stderr
    return folder / "graph.json"


def plan_of(graph: Path) -> Path:
    return graph.with_name("plan.json")


def test_one_pass_on_a_saved_graph(graph: Path, golden: Callable[..., None]) -> None:
    golden(number_values(texts(graph, "--passes", "simplify")))


@pytest.mark.parametrize("name", ["slice", "accumulate", "shard"])
def test_what_a_pass_changes(name: str, graph: Path, tmp_path: Path, golden: Callable[..., None]) -> None:
    sliced = TileDecision("layers.0.linear.weight", 2, 0, "by hand")
    edits: dict[str, dict[str, Any]] = {"slice": {"slices": (sliced,)}, "accumulate": {"num_micro_batches": 2}}
    replace(Plan.load(plan_of(graph)), **edits.get(name, {})).save(tmp_path / "plan.json")
    before = texts(graph, "--passes", "simplify")
    golden(difference(before, texts(graph, "--plan", tmp_path / "plan.json", "--passes", f"simplify,{name}")))


def test_a_pass_alone_on_the_graph_that_others_left(graph: Path, tmp_path: Path, golden: Callable[..., None]) -> None:
    plan, left = ("--plan", plan_of(graph)), tmp_path / "left.json"
    before = texts(graph, *plan, "--passes", "simplify,shard", "--save", left)
    golden(difference(before, texts(left, *plan, "--passes", "gather")))


def test_a_whole_phase(graph: Path, tmp_path: Path, golden: Callable[..., None]) -> None:
    plan, prepared, done = ("--plan", plan_of(graph)), tmp_path / "prepared.json", tmp_path / "done.json"
    texts(graph, *plan, "--phase", "prepare", "--save", prepared)
    text = texts(prepared, *plan, "--phase", "plan", "--save", done)
    golden(text)
    # The same at once, and what was saved is what was printed.
    assert texts(graph, *plan) == text == SavedGraph.load(done).step.text()


def test_every_pass_is_printed_after_its_name(graph: Path) -> None:
    plan = Plan.load(plan_of(graph))
    stages = texts(graph, "--plan", plan_of(graph), "--print-after-all").split("\n\n")
    assert [text.partition("\n")[0] for text in stages] == [
        f"# after {one.name}" for one in phase_passes(None, plan, SavedGraph.load(graph))
    ]


class _Deep(nn.Module):
    """Blocks, and a loss that a plan tiles."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))
        self.head = nn.Linear(16, 64, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 0, "max_grad_norm": 1.0},
        {"stage": 1, "precision": "fp16", "accumulate": 2},
        {"stage": 3, "precision": "fp16", "max_grad_norm": 1.0},
        {
            "stage": 2,
            "precision": zerofx.Precision("bf16", reduce_dtype="fp32"),
            "accumulate": 2,
            "offload": {"gradients": "host"},
        },
        {"stage": 1, "precision": zerofx.Precision("bf16", state_dtype="bf16")},
        {"stage": 3, "memory_budget": 200_000, "backend": "eager", "machine": "h100-sxm"},
        {"stage": 3, "memory_budget": 165_000, "backend": "eager", "machine": "h100-sxm"},
        {"stage": 3, "wire": "int4", "world_size": 4},
    ],
    ids=str,
)
def test_a_graph_and_a_plan_from_files_give_what_planning_gives(options: dict[str, Any], tmp_path: Path) -> None:
    model, batch = _Deep(), (torch.zeros(8, 16, dtype=torch.long),)
    optimizer = adagrad(model)
    planned = zerofx.plan(model, optimizer, batch, **{"world_size": 2, "machine": "cpu", **options})
    planned.plan.save(tmp_path / "plan.json")
    backend = options.get("backend", "inductor")
    graph_to_save(model, optimizer, batch, planned.plan, machine=planned.machine, backend=backend).save(
        tmp_path / "graph.json"
    )
    plan, saved = Plan.load(tmp_path / "plan.json"), SavedGraph.load(tmp_path / "graph.json")
    expected = planned.lowered.graph.text()
    passes = phase_passes(None, plan, saved)
    result = rewrite(saved, passes, plan, lambda *_: None)
    assert result.step.text() == expected


def test_an_optimizer_that_has_stepped_has_the_update_of_its_next_step() -> None:
    model, batch = _Deep(), (torch.zeros(8, 16, dtype=torch.long),)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    model(*batch).backward()
    optimizer.step()
    planned = zerofx.plan(model, optimizer, batch, world_size=2, machine="cpu", stage=1)
    saved = graph_to_save(model, optimizer, batch, planned.plan, machine=planned.machine)
    passes = phase_passes(None, planned.plan, saved)
    assert rewrite(saved, passes, planned.plan, lambda *_: None).step.text() == planned.lowered.graph.text()


def test_a_graph_comes_back_from_its_file_after_any_pass(tmp_path: Path) -> None:
    model, batch, path = _Deep(), (torch.zeros(8, 16, dtype=torch.long),), tmp_path / "graph.json"
    optimizer = torch.optim.AdamW(model.parameters())
    planned = zerofx.plan(
        model,
        optimizer,
        batch,
        world_size=2,
        memory_budget=165_000,
        backend="eager",
        max_grad_norm=1.0,
        precision=zerofx.Precision(loss_scale=1.0),
    )
    plan, saved = (
        planned.plan,
        graph_to_save(model, optimizer, batch, planned.plan, machine=planned.machine, backend="eager"),
    )
    passes = phase_passes(None, plan, saved)
    for one in passes:
        saved = rewrite(saved, [one], plan, lambda *_: None)
        saved.save(path)
        read = SavedGraph.load(path)
        assert same_graph(read.step, saved.step) and read.layout == saved.layout
        read.save(tmp_path / "again.json")
        assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
        saved = read


def _halved() -> Iterator[Any]:
    @torch.library.custom_op("test_opt::halved", mutates_args=())
    def halved(x: Tensor) -> Tensor:
        return x / 2

    halved.register_fake(torch.empty_like)
    halved.register_autograd(lambda ctx, grad: grad / 2)
    yield halved


class _Foreign(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, 1)
        self.halved = next(_halved())

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.halved(self.linear(x)).sum()
        return loss


def test_a_graph_of_foreign_operators_is_not_saved(tmp_path: Path) -> None:
    model = _Foreign()
    batch = (torch.zeros(ROWS, DIM),)
    plan = zerofx.plan(model, sgd(model), batch, machine="cpu").plan
    with pytest.raises(UsageError, match=r"expected a graph of torch's own operators, .* found test_opt\.halved"):
        graph_to_save(model, sgd(model), batch, plan, machine="cpu").save(tmp_path / "graph.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected GRAPH.json, found no argument"),
        (("PLAN",), "it is a plan, not a graph): save one with `zerofx plan MODULE:FUNCTION --save-graph FILE`"),
        (("none.json",), "expected a graph in the file none.json, found none (FileNotFoundError"),
        (("GRAPH", "--passes", "tile"), "expected a plan for tile, found none: give --plan PLAN.json, which"),
        (("GRAPH", "--phase", "plan"), "expected a plan for the phase plan, found none"),
        (("GRAPH", "--passes", "slice"), "expected a plan for slice, found none: give --plan PLAN.json, which `zerofx"),
        (("GRAPH", "--passes", "tiles"), "expected the name of a pass (check_results, bring_forward, set_origins"),
        (("GRAPH", "--passes", "refuse"), "found refuse, which is for one that is being traced: `zerofx opt --list"),
        (("GRAPH", "--passes", "simplify{hard=true}"), "expected the name of a pass"),
        (("GRAPH", "--passes", "hoist_views,simplify"), "found simplify after one of those"),
        (
            ("GRAPH", "--plan", "PLAN", "--passes", "gather"),
            "expected a graph that the passes before gather have left, ",
        ),
        (("GRAPH", "--plan", "PLAN", "--passes", "shard,shard"), "expected a graph that the passes before shard have"),
        (("GRAPH", "--passes", "simplify", "--phase", "plan"), "expected --passes or --phase, found both"),
        (("GRAPH", "--plan", "GRAPH"), "expected the JSON of a zerofx plan, found something else"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments: tuple[str, ...], message: str, graph: Path) -> None:
    files = {"GRAPH": graph, "PLAN": plan_of(graph)}
    refused = run("opt", *(files.get(one, one) for one in arguments))
    assert refused.exit_code == 2 and message in refused.stderr


def test_a_plan_for_other_buckets_is_refused(graph: Path) -> None:
    model = nn.Linear(DIM, 1)
    other = zerofx.plan(
        model, sgd(model), (torch.zeros(ROWS, DIM),), machine="cpu", world_size=2, loss_fn=lambda out, x: out.sum()
    ).plan
    with pytest.raises(PlanError, match=r"expected a graph with the buckets that the plan is for \(.*\), found layers"):
        rewrite(SavedGraph.load(graph), [find("simplify"), find("shard")], other, lambda *_: None)


def test_the_list_is_that_of_the_documentation() -> None:
    page = Path(zerofx.__file__).parents[1] / "docs" / "passes.md"
    assert f"```\n{texts('--list')}\n```" in page.read_text(encoding="utf-8")


def test_a_plan_of_a_part_of_what_trains_is_refused(graph: Path, tmp_path: Path) -> None:
    plan = Plan.load(plan_of(graph))
    lent = replace(plan, buckets=(replace(plan.buckets[0], lent=True), *plan.buckets[1:]))
    for partial, name, found in (
        (replace(plan, pipe=2), "plan-1-of-2.json", "one of a stage"),
        (lent, "plan.json", "one that reads parameters of other"),
    ):
        partial.save(tmp_path / "plan.json")
        result = run("opt", graph, "--plan", tmp_path / name)
        assert result.exit_code != 0 and f"found {found}" in result.output
