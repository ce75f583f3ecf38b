"""The command line: ``zerofx plan`` and ``zerofx machines``. Neither needs a device or a process group."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import click
import torch
from tabulate import tabulate
from torch import nn

import zerofx
from zerofx.errors import UsageError, ZeroFXError
from zerofx.options import Accumulate, Precision, Recompute
from zerofx.planning import PlannedStep
from zerofx.report.units import format_bytes, format_seconds
from zerofx.scheduler.machine import Link, Machine
from zerofx.scheduler.machines import built_in_machines


class _Refused(click.ClickException):
    """An error of zerofx: its message says what to do, a traceback would only hide it."""

    exit_code = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Train models that do not fit: one planned, compiled graph per training step."""


@main.command("plan")
@click.argument("where", metavar="MODULE:FUNCTION")
@click.option("--world-size", type=click.IntRange(min=1), default=1, show_default=True, help="Number of ranks.")
@click.option(
    "--machine", default="h100-sxm", show_default=True, help="See `zerofx machines`; or a .json of a Machine."
)
@click.option("--memory-budget", metavar="SIZE", help="On the device: '24GiB', '80GB', or a fraction such as 0.9.")
@click.option("--stage", type=click.IntRange(0, 3), default=3, show_default=True, help="What is sharded (ZeRO).")
@click.option("--precision", type=click.Choice(get_args(Precision)), help="What is computed in; else as the model is.")
@click.option("--prefetch", type=click.IntRange(min=0), default=1, show_default=True, help="Gathers issued ahead.")
@click.option("--recompute", type=click.Choice(get_args(Recompute)), default="auto", show_default=True)
@click.option("--accumulate", default="1", show_default=True, help="Micro-batches before each update, or 'auto'.")
@click.option("--full", is_flag=True, help="Write out every layer of the schedule, not one of those that are alike.")
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan, for compile(plan=...).")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page for a browser.")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="Write a trace for ui.perfetto.dev.")
def plan_command(
    where: str,
    world_size: int,
    machine: str,
    memory_budget: str | None,
    stage: int,
    precision: Precision | None,
    prefetch: int,
    recompute: Recompute,
    accumulate: str,
    full: bool,
    save: Path | None,
    html: Path | None,
    trace: Path | None,
) -> None:
    """Plan a training step for ranks and a machine that need not exist.

    MODULE is a dotted module or a path to a .py file. FUNCTION takes nothing and returns (model, optimizer, batch) or
    (model, optimizer, batch, loss_fn); the batch is that of one rank, a tuple of positional arguments or a dict of
    keywords. It is called with torch's default device set to "meta": shapes are all a plan needs.
    """
    with _clean_errors():
        model, optimizer, batch, loss_fn = _call(_find(where), where)
        planned = zerofx.plan(
            model,
            optimizer,
            batch,
            stage,
            world_size=world_size,
            machine=_machine(machine),
            memory_budget=_budget(memory_budget),
            recompute=recompute,
            loss_fn=loss_fn,
            precision=precision,
            prefetch=prefetch,
            accumulate=_accumulate(accumulate),
        )
        schedule = planned.schedule()
        click.echo(f"{planned}\n\n{planned.plan}\n\n{schedule.table(fold=not full)}")
        if save is not None:
            save.write_text(planned.plan.to_json(), encoding="utf-8")
        if html is not None:
            title = f"{type(model).__name__} with {type(optimizer).__name__}: {_short(planned)}"
            schedule.to_html(html, title, limits=_limits(planned), notes=str(planned.plan))
        if trace is not None:
            schedule.to_chrome_trace(trace)
    for path in filter(None, (save, html, trace)):
        click.echo(f"wrote {path}", err=True)


@main.command("machines")
def machines_command() -> None:
    """List the built-in machines: datasheet numbers, of one device unless it says otherwise."""
    headers = ("machine", "memory", "bandwidth", "float32", "bfloat16", "float16", "within node", "between", "a node")
    rows = [_machine_row(machine) for machine in built_in_machines()]
    align = ("left", *["right"] * (len(headers) - 1))
    click.echo(tabulate(rows, headers, colalign=align, disable_numparse=True, tablefmt="simple"))
    click.echo(
        "\nbandwidth: memory, read plus written. float32, bfloat16, float16: dense peaks of matrix multiplication, in\n"
        "FLOP/s. within node, between: links in one direction, and seconds a hop; between nodes, one device's share.\n"
        "a node: devices, and host memory that they share."
    )


@contextmanager
def _clean_errors() -> Iterator[None]:
    try:
        yield
    except ZeroFXError as error:
        raise _Refused(str(error)) from error
    except OSError as error:
        if error.filename is None:  # not about a file that was asked for
            raise
        raise _Refused(f"{error.filename}: {error.strerror}") from error


def _find(where: str) -> Callable[[], Any]:
    """The function that ``MODULE:FUNCTION`` names."""
    source, _, name = where.rpartition(":")
    if not source or not name:
        raise UsageError(f"expected MODULE:FUNCTION, such as train.py:make or package.module:make, found {where!r}")
    module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    found = getattr(module, name, None)
    if callable(found):
        function: Callable[[], Any] = found
        return function
    offered = [key for key, value in vars(module).items() if callable(value) and _is_own(value, module)]
    hint = f"; its own are {', '.join(offered)}" if offered else ""
    raise UsageError(f"{source} has no function {name!r}{hint}")


def _is_own(value: object, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__ and not isinstance(value, type)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    sys.path.insert(0, str(path.parent.resolve()))  # as when Python runs it: what lies beside it can be imported
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickles look their module up
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only a module that was asked for: one that the user's module misses needs the traceback.
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        raise UsageError(
            f"there is no module {error.name!r} in {Path.cwd()} or among those installed; a file is named by its path, "
            f"with .py"
        ) from error


def _call(function: Callable[[], Any], where: str) -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    with torch.device("meta"):
        made = function()
    expected = f"expected {where} to return (model, optimizer, batch) or (model, optimizer, batch, loss_fn)"
    if not isinstance(made, tuple) or len(made) not in (3, 4):
        found = f"{len(made)} values" if isinstance(made, tuple) else type(made).__name__
        raise UsageError(f"{expected}, found {found}")
    model, optimizer, batch = made[:3]
    for name, value, kind in (
        ("model", model, nn.Module),
        ("optimizer", optimizer, torch.optim.Optimizer),
        ("batch", batch, (tuple, Mapping)),
    ):
        if not isinstance(value, kind):
            hint = ": put a batch of one argument as (tensor,)" if name == "batch" else ""
            raise UsageError(f"{expected}, found a {type(value).__name__} as {name}{hint}")
    return model, optimizer, batch, made[3] if len(made) == 4 else None


def _machine(name: str) -> Machine:
    return Machine.from_json(Path(name).read_text(encoding="utf-8")) if name.endswith(".json") else Machine.named(name)


def _budget(text: str | None) -> str | float | None:
    """A fraction is a bare number up to one; everything else is a size."""
    try:
        fraction = float(text or "")
    except ValueError:
        return text
    return fraction if 0 < fraction <= 1 else text


def _accumulate(text: str) -> Accumulate:
    if text == "auto":
        return "auto"
    if not text.isdigit():
        raise UsageError(f"expected --accumulate to be a number of micro-batches, or auto, found {text!r}")
    return int(text)


def _limits(planned: PlannedStep) -> dict[str, int]:
    budget = planned.plan.memory_budget
    limits = {} if budget is None else {"memory budget": budget}
    return {**limits, "memory of the device": planned.machine.device.memory_bytes}


def _short(planned: PlannedStep) -> str:
    plan = planned.plan
    precision = f", {plan.precision}" if plan.precision else ""
    return f"stage {plan.stage} on {plan.num_ranks} x {planned.machine.name}{precision}"


def _machine_row(machine: Machine) -> list[str]:
    peak = machine.device.peak
    return [
        machine.name,
        format_bytes(machine.device.memory_bytes),
        _bandwidth(machine.device.memory_bandwidth),
        *(f"{rate / 1e12:.4g} TFLOP/s" if rate else "" for rate in (peak.float32, peak.bfloat16, peak.float16)),
        _link(machine.intra_node),
        _link(machine.inter_node),
        f"{machine.ranks_per_node} x, {format_bytes(machine.host.memory_bytes)}",
    ]


def _bandwidth(rate: float) -> str:
    """Bandwidths are decimal, as datasheets have them."""
    return f"{rate / 1e9:.4g} GB/s"


def _link(link: Link) -> str:
    return f"{_bandwidth(link.bandwidth)}, {format_seconds(link.latency)}"
