"""The command line: plans, machines, and messages instead of tracebacks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor, nn

import zerofx
from tests.lib.checkout import ROOT
from tests.lib.distributed import PATIENCE_SECONDS
from tests.lib.graphs import DIM, prepare
from tests.lib.lowered import Deep
from zerofx.cli.arguments import find_function
from zerofx.cli.commands import main
from zerofx.scheduler.cost.catalog import list_machines
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.cost.probe import memory_bytes, read_kept_machine
from zerofx.scheduler.plan.plan import Plan
from zerofx.units import format_bytes

Made = tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, ...]]


def make() -> Made:
    """What a user would write: nothing in it says where tensors live."""
    model = Deep(4)
    assert next(model.parameters()).is_meta
    return model, torch.optim.AdamW(model.parameters()), (torch.zeros(4, DIM),)


def make_with_loss() -> tuple[nn.Module, torch.optim.Optimizer, tuple[Tensor, Tensor], object]:
    model = nn.Linear(8, 2)
    batch = torch.zeros(4, 8), torch.zeros(4, 2)
    return _Pair(model), torch.optim.SGD(model.parameters()), batch, _squared


class _Pair(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        found: Tensor = self.inner(x) - wanted
        return found


def _squared(outputs: Tensor, x: Tensor, wanted: Tensor) -> Tensor:
    return outputs.square().mean()


def make_two() -> object:
    return make()[:2]


def make_with_several() -> object:
    model, _, batch = make()
    first, *others = model.parameters()
    return model, [torch.optim.SGD([first]), torch.optim.AdamW(others)], batch


def make_bare_batch() -> object:
    return (*make()[:2], torch.zeros(4, DIM))


not_callable = 3


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def plan(*arguments: str, function: str = "make") -> Result:
    return run("plan", f"{__name__}:{function}", *arguments)


def test_plan_prints_summary_reasons_and_schedule() -> None:
    result = plan("--world-size", "8", "--precision", "bf16")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("stage 3 on 8 x h100-sxm: peak ")
    for text in ("8 ranks, bf16", "gathers", "layers.0 … layers.3  x4", "all_gather", "predicted, per rank: peak"):
        assert text in result.stdout


def test_plan_clips_delays_and_offloads_as_asked() -> None:
    clipped = plan("--max-grad-norm", "0.5")
    assert clipped.exit_code == 0 and "gradients clipped to a norm of 0.5" in clipped.stdout
    assert "during the next step" in plan("--delayed-update", "10", "--offload", "host").stdout
    assert "on nvme between micro-batches; as asked" in plan(
        "--accumulate", "2", "--offload", "gradients=nvme"
    ).stdout  # fmt: skip
    for arguments, message in (
        (("--max-grad-norm", "nan"), "expected max_grad_norm to be a number above 0"),
        (("--max-grad-norm", "1", "--delayed-update", "1"), "expected delayed_update or max_grad_norm"),
        (("--offload", "weights=host"), "found {'weights': 'host'}"),
    ):
        refused = plan(*arguments)
        assert refused.exit_code == 2 and message in refused.stderr


def test_plan_counts_states_and_gradients_in_the_dtypes_that_are_asked_for(tmp_path: Path) -> None:
    saved, found = tmp_path / "plan.json", []
    for arguments in ((), ("--state-dtype", "bf16"), ("--reduce-dtype", "fp32")):
        result = plan("--precision", "bf16", "--save", str(saved), *arguments)
        found.append(Plan.load(saved).model_state_bytes)
    assert "gradients reduced in float32" in result.stdout
    plain, low, full = found
    # 16 bytes for each parameter with AdamW: its own 2, 2 of its gradient, a master, two states.
    assert (low * 16, full * 16) == (plain * 12, plain * 18)


def test_full_writes_every_layer_out() -> None:
    folded, full = plan("--world-size", "8"), plan("--world-size", "8", "--full")
    assert len(full.stdout.splitlines()) > len(folded.stdout.splitlines())


def test_files(tmp_path: Path) -> None:
    saved, page, trace = tmp_path / "plan.json", tmp_path / "page.html", tmp_path / "trace.json"
    result = plan("--world-size", "4", "--save", str(saved), "--html", str(page), "--trace", str(trace))
    assert result.exit_code == 0, result.output
    assert Plan.from_json(saved.read_text()).num_ranks == 4
    assert "Deep with AdamW: stage 3 on 4 x h100-sxm" in page.read_text(encoding="utf-8")
    assert json.loads(trace.read_text())["traceEvents"]
    assert [line for line in result.stderr.splitlines() if line.startswith("wrote ")] == [
        f"wrote {path}" for path in (saved, page, trace)
    ]


def test_a_saved_plan_makes_the_page_that_planning_makes(tmp_path: Path) -> None:
    saved, page, again = tmp_path / "plan.json", tmp_path / "page.html", tmp_path / "again.html"
    made = plan("--world-size", "4", "--memory-budget", "1MiB", "--save", str(saved), "--html", str(page))
    assert made.exit_code == 0, made.output
    result = run("report", str(saved), "--html", str(again))
    assert result.exit_code == 0, result.output
    assert again.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
    # What is printed is the same, too, but for the line on the machine.
    assert result.stdout.partition("\n\n")[2] == made.stdout.partition("\n\n")[2]
    assert result.stdout.startswith("Deep with AdamW: stage 3 on 4 x h100-sxm\n")
    assert result.stderr == f"wrote {again}\n"
    full = run("report", str(saved), "--full").stdout
    assert len(full.splitlines()) > len(result.stdout.splitlines())


def test_files_that_make_no_report(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for text, message in (
        (None, f"expected a plan in the file {path}, found none"),
        ("{}", "expected the JSON of a zerofx plan"),
        (prepare().plan.to_json(), "found the plan alone: save it with step.save_plan(path)"),
        (json.dumps({**json.loads(prepare().plan.to_json()), "report": {"title": "x"}}), "found another: KeyError"),
    ):
        if text is not None:
            path.write_text(text)
        result = run("report", str(path))
        assert result.exit_code == 2 and "Traceback" not in result.output
        assert message in result.stderr


def test_a_step_saves_what_a_report_shows(tmp_path: Path) -> None:
    model, path = Deep(4), tmp_path / "plan.json"
    optimizer = torch.optim.AdamW(model.parameters())
    step = zerofx.compile(model, optimizer, backend="eager", example_batch=(torch.zeros(4, DIM),))
    step.save_plan(path)
    assert Plan.load(path) == step.plan
    result = run("report", str(path))
    assert result.stdout.startswith("Deep with AdamW: stage 3 on 1 x cpu\n")
    assert step.schedule().table() in result.stdout


def make_on_device() -> Made:
    """Each process makes the same model and batch."""
    torch.manual_seed(0)
    model = Deep(3)
    assert not next(model.parameters()).is_meta
    return model, torch.optim.AdamW(model.parameters()), (torch.zeros(4, DIM),)


@pytest.mark.days(3)
def test_tune_prints_the_candidates_and_saves_the_best(tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    arguments = ("--backend", "eager", "--num-steps", "2", "--memory-budget", "0.5", "--save", str(saved))
    result = run("tune", f"{__name__}:make_on_device", *arguments)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    # The machine was measured: half of the memory that it has.
    best = re.match(rf"(.*): the fastest within {format_bytes(memory_bytes() // 2)}, .* a step, peak ", lines[0])
    assert best is not None
    assert lines[2].split() == ["candidate", "peak", "measured", "time", "corrected", "measured"]
    assert lines[4].startswith("as asked ")
    assert [line.startswith(f"{best[1]} ") for line in lines[4:] if line.endswith(" best")] == [True]
    report = run("report", str(saved))
    assert report.stdout.startswith("Deep with AdamW, times from measured costs: stage 3 on 1 x cpu-measured\n")


def test_tune_refuses_models_without_values() -> None:
    result = run("tune", f"{__name__}:make", "--device", "meta", "--backend", "eager")
    assert result.exit_code == 2
    assert "on the meta device" in result.stderr


@pytest.mark.slow
def test_tune_on_two_processes(tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    root = str(ROOT)
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "zerofx",
            "tune", f"{__name__}:make_on_device", "--backend", "eager", "--num-steps", "2", "--save", str(saved),
        ],
        # As for pytest, what the tests import from the examples is found.
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root}/examples", "OMP_NUM_THREADS": "1"}, cwd=root,
        capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("candidate ") == 1 and "keep all gathered" in done.stdout
    assert Plan.load(saved).num_ranks == 2


def test_the_optimizer_may_be_a_list_of_several(tmp_path: Path) -> None:
    asked = ("--save", str(tmp_path / "plan.json"), "--save-graph", str(tmp_path / "graph.json"))
    result = plan("--world-size", "2", *asked, function="make_with_several")
    assert result.exit_code == 0, result.output
    assert "with SGD + AdamW" in (tmp_path / "plan.json").read_text(encoding="utf-8")
    assert (tmp_path / "graph.json").exists()


def test_a_loss_function_is_the_fourth_value() -> None:
    result = plan("--stage", "1", function="make_with_loss")
    assert result.exit_code == 0, result.output


def test_a_file_can_import_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "cli_sizes.py").write_text("WIDTH = 8\n")
    (tmp_path / "cli_model.py").write_text(
        "import torch\nfrom cli_sizes import WIDTH\n\n\ndef tiny():\n"
        "    model = torch.nn.Linear(WIDTH, 1)\n"
        "    batch = (torch.zeros(4, WIDTH),)\n"
        "    return model, torch.optim.SGD(model.parameters()), batch, lambda outputs, x: outputs.sum()\n"
    )
    result = run("plan", f"{tmp_path / 'cli_model.py'}:tiny")
    assert result.exit_code == 0, result.output


def test_a_machine_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(Machine.named("l4").to_json().replace('"l4"', '"mine"'))
    assert plan("--machine", str(path)).stdout.startswith("stage 3 on 1 x mine")


@pytest.mark.parametrize("budget", ["1GiB", "0.5", "1000000"])
def test_budgets(budget: str) -> None:
    result = plan("--memory-budget", budget)
    assert result.exit_code == 0, result.output
    assert "memory budget" in result.stdout


@pytest.mark.parametrize(("number", "words"), [("2", "2 micro-batches"), ("auto", "stage 3 on 1 rank, precision")])
def test_micro_batches(number: str, words: str) -> None:
    result = plan("--accumulate", number)
    assert result.exit_code == 0, result.output
    assert words in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([__name__], "expected MODULE:FUNCTION"),
        (["tests.nothing:make"], "there is no module 'tests.nothing'"),
        (["nothing.py:make"], "there is no file nothing.py"),
        ([f"{__name__}:mak"], "has no function 'mak'; its own are make,"),
        ([f"{__name__}:not_callable"], "has no function 'not_callable'"),
        ([f"{__name__}:make_two"], "to return (model, optimizer, batch)"),
        ([f"{__name__}:make_bare_batch"], "put a batch of one argument as (tensor,)"),
        ([f"{__name__}:make", "--machine", "h1000"], "did you mean"),
        ([f"{__name__}:make", "--machine", "nothing.json"], "nothing.json: No such file"),
        ([f"{__name__}:make", "--memory-budget", "80 potatoes"], "expected memory_budget to be a size"),
        ([f"{__name__}:make", "--memory-budget", "1.5"], "expected memory_budget to be a size"),
        ([f"{__name__}:make", "--mesh", "shard=2,shard=4"], "replicate=2,shard=8, found 'shard=4'"),
        ([f"{__name__}:make", "--memory-budget", "10B"], "10 B"),
        (
            [f"{__name__}:make", "--html", "no_such_folder/page.html"],
            "no_such_folder/page.html: No such file",
        ),
        ([f"{__name__}:make", "--stage", "4"], "--stage"),
        ([f"{__name__}:make", "--accumulate", "some"], "found 'some'"),
        ([f"{__name__}:make", "--accumulate", "0"], "1 or more, or 'auto', found 0"),
    ],
)
def test_errors_are_one_message(arguments: list[str], message: str) -> None:
    result = run("plan", *arguments)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_an_import_that_the_module_misses_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cli_broken.py").write_text("import no_such_library\n")
    result = run("plan", "cli_broken:make")
    assert isinstance(result.exception, ModuleNotFoundError)
    assert result.exception.name == "no_such_library"


def test_machines() -> None:
    lines = run("machines").stdout.splitlines()
    assert [line.split()[0] for line in lines[2:] if line][: len(list_machines())] == [
        machine.name for machine in list_machines()
    ]
    h100 = next(line for line in lines if line.startswith("h100-sxm"))
    assert all(text in h100 for text in ("80.0 GiB", "3350 GB/s", "989.4 TFLOP/s", "450 GB/s", "8 x"))


@pytest.mark.days(3)
def test_the_machine_at_hand_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROFX_CACHE_DIR", str(tmp_path))
    lines = run("machines", "--measure").stdout.splitlines()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    measured = read_kept_machine(device, 1)
    assert measured is not None and lines[2].startswith(measured.name) and not lines[3]
    assert "expected --nvme with --measure" in run("machines", "--nvme", str(tmp_path)).output
    assert "must be an existing folder" in run("machines", "--measure", "--nvme", str(tmp_path / "none")).output


@pytest.mark.slow
def test_the_example() -> None:
    pytest.importorskip("transformers")
    example = ROOT / "examples" / "plan_llama.py"
    result = run("plan", f"{example}:llama_8b", "--world-size", "8", "--machine", "h100-sxm", "--precision", "bf16")
    assert result.exit_code == 0, result.output
    assert "(fits)" in result.stdout and "model.layers.0 … model.layers.31  x32" in result.stdout


def test_ranks_lie_along_the_axes_of_a_mesh(tmp_path: Path) -> None:
    saved, graph = tmp_path / "plan.json", tmp_path / "graph.json"
    result = plan(
        "--mesh", "replicate=2,shard=8", "--states-over", "shard", "--save", str(saved), "--save-graph", str(graph)
    )
    assert result.exit_code == 0, result.output
    assert "16 ranks (replicate 2 x shard 8)" in result.stdout and "across nodes" in result.stdout
    assert "collective replicate" in result.stdout
    given = ("--plan", str(saved), "--phase")
    assert run("opt", str(graph), *given, "prepare", "--save", str(graph)).exit_code == 0
    carried_out = run("opt", str(graph), *given, "plan")
    assert carried_out.exit_code == 0 and "over=replicate" in carried_out.stdout, carried_out.output


def test_the_best_mesh_is_told_with_the_others() -> None:
    result = plan("--mesh", "auto", "--world-size", "2")
    assert result.exit_code == 0, result.output
    rows = [line.split("  ")[0] for line in result.stdout.splitlines()]
    assert {"replicate 2", "shard 2", "model 2"} <= set(rows[:5])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--mesh", "shard"), "such as replicate=2,shard=8, found 'shard'"),
        (("--mesh", "shards=2"), "expected axes of a mesh to be called"),
        (("--mesh", "shard=2", "--world-size", "4"), "expected a mesh of 4 rank"),
        (("--shardings", "column"), "expected NAME=WORD, such as 'layers.*.up=column', found 'column'"),
        (("--mesh", "model=2", "--shardings", "*=columns"), "expected shardings to say 'column', 'row'"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(given: tuple[str, ...], message: str) -> None:
    result = plan(*given)
    assert result.exit_code == 2 and message in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mean", "expected ema, ema=DECAY such as ema=0.999, or swa, found 'mean'"),
        ("swa=0.9", "or swa, found 'swa=0.9'"),
        ("0.9", "or swa, found '0.9'"),
        ("ema=", "or swa, found 'ema='"),
        ("ema=1.5", "expected decay of EMA to be a number from 0 to 1, found 1.5"),
    ],
)
def test_an_average_that_cannot_be_is_refused(text: str, message: str) -> None:
    result = plan("--average", text)
    assert result.exit_code == 2 and message in " ".join(result.output.split())


@pytest.mark.parametrize("text", ["ema", "ema=0.5", "swa"])
def test_averages_are_among_the_bytes_of_states(text: str) -> None:
    without, averaged = plan(), plan("--average", text)
    assert averaged.exit_code == 0 and averaged.output != without.output


def test_a_file_takes_the_place_of_no_module_that_is_called_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "json.py").write_text("def make():\n    return 1\n")
    assert find_function(f"{tmp_path / 'json.py'}:make")() == 1
    assert sys.modules["json"] is json
