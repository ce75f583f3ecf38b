"""The command line: ``zerofx plan``, ``report``, ``opt`` and ``machines`` need no device, ``tune`` runs on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

import zerofx
from zerofx.cli.arguments import make_training, read_machine, training_options, world
from zerofx.disk.own_files import escape_for_utf8
from zerofx.errors import UsageError, ZeroFXError
from zerofx.options import PlanKeywords, TuneKeywords
from zerofx.scheduler.cost.catalog import list_machines
from zerofx.scheduler.cost.machine import Link, Machine
from zerofx.units import format_bytes, format_seconds, parse_bytes, text_table


def _say(text: str, *, err: bool = False) -> None:
    """Print a text, or say why that cannot be."""
    try:
        click.echo(escape_for_utf8(text), err=err)
    except BrokenPipeError:
        raise  # who reads has seen enough
    except OSError as error:
        raise _Refused(f"standard output: {error.strerror}") from error


class _Refused(click.ClickException):
    """An error of zerofx: its message says what to do, a traceback would only hide it."""

    exit_code = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(zerofx.__version__, prog_name="zerofx")
def main() -> None:
    """Train models that do not fit: one planned, compiled graph per training step."""


@main.command("plan")
@click.argument("where", metavar="MODULE:FUNCTION")
@click.option("--world-size", type=click.IntRange(min=1), help="Number of ranks; else those of the mesh, or one.")
@click.option(
    "--machine", default="h100-sxm", show_default=True, help="See `zerofx machines`; or a .json of a Machine."
)
@training_options(PlanKeywords)
@click.option("--full", is_flag=True, help="Write out every layer of the schedule, not one of those that are alike.")
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Write the plan, for compile(plan=...).")
@click.option("--save-graph", type=click.Path(dir_okay=False, path_type=Path), help="Write the graph, for zerofx opt.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page for a browser.")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="Write a trace for ui.perfetto.dev.")
def plan_command(
    where: str,
    machine: str,
    full: bool,
    save: Path | None,
    save_graph: Path | None,
    html: Path | None,
    trace: Path | None,
    **options: Any,
) -> None:
    """Plan a training step for ranks and a machine that need not exist.

    MODULE is a dotted module or a path to a .py file. FUNCTION takes nothing and returns (model, optimizer, batch), and
    after them loss_fn, or None and forward, if zerofx.compile is given one; the batch is that of one rank, a tuple of
    positional arguments or a dict of keywords. It is called with torch's default device set to "meta": shapes
    are all a plan needs.
    """
    from zerofx.driver.plan_only import graph_to_save  # needs torch, which takes seconds to import
    from zerofx.optimizers import Optimizers

    with _clean_errors():
        model, optimizer, batch, loss_fn, forward = make_training(where, "meta")
        planned = zerofx.plan(
            model, optimizer, batch, machine=read_machine(machine), loss_fn=loss_fn, forward=forward, **options
        )
        schedule = planned.schedule()
        _say(f"{planned}\n\n{planned.plan}\n\n{schedule.table(fold=not full)}")
        what = f"{type(model).__name__} with {Optimizers.from_user(optimizer).name}"
        report = planned.report(what)
        if save is not None:
            planned.save(save, what)
        if save_graph is not None:
            graph_to_save(
                model, optimizer, batch, planned.plan, machine=planned.machine, loss_fn=loss_fn, forward=forward
            ).save(save_graph)
        if html is not None:
            report.to_html(html)
        if trace is not None:
            schedule.to_chrome_trace(trace)
    _say_written(save, save_graph, html, trace)


@main.command("tune")
@click.argument("where", metavar="MODULE:FUNCTION")
@click.option("--device", help="Where the model is made and run; else the GPU if there is one.")
@training_options(TuneKeywords)
@click.option("--num-steps", type=click.IntRange(min=2), default=5, show_default=True, help="Steps of each candidate.")
@click.option("--num-candidates", type=click.IntRange(min=1), default=4, show_default=True, help="Plans run at first.")
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Write the best, for compile(plan=...).")
def tune_command(where: str, device: str | None, save: Path | None, **options: Any) -> None:
    """Run plans on the device at hand, and keep the fastest that fits.

    MODULE:FUNCTION is as for `zerofx plan`; it is called with torch's default device set to the one to run on. Several
    processes tune together: torchrun --nproc-per-node 2 -m zerofx tune MODULE:FUNCTION.
    """
    with _clean_errors(), world(device) as (rank, here):
        model, optimizer, batch, loss_fn, forward = make_training(where, here)
        result = zerofx.tune(model, optimizer, batch, save=save, loss_fn=loss_fn, forward=forward, **options)
    if rank == 0:
        _say(f"{result}\n\n{result.plan}")
        _say_written(save)


@main.command("report")
@click.argument("plan_file", metavar="PLAN.json", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--full", is_flag=True, help="Write out every layer of the schedule, not one of those that are alike.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page for a browser.")
def report_command(plan_file: Path, full: bool, html: Path | None) -> None:
    """Show a plan that `zerofx plan --save` or `zerofx tune --save` has written: decisions, reasons and schedule."""
    from zerofx.report.saved import SavedPlan  # needs torch, which takes seconds to import

    with _clean_errors():
        saved = SavedPlan.load(plan_file)
        _say(f"{saved.title}\n\n{saved.plan}\n\n{saved.schedule.table(fold=not full)}")
        if html is not None:
            saved.to_html(html)
    _say_written(html)


@main.command("opt")
@click.argument("source", metavar="[GRAPH.json]", required=False)
@click.option("--plan", "plan_file", type=click.Path(dir_okay=False, path_type=Path), help="What passes carry out.")
@click.option("--passes", metavar="NAMES", help="Those to run, in order: 'simplify,slice'.")
@click.option("--phase", type=click.Choice(("prepare", "plan", "region")), help="All passes of a phase.")
@click.option("--print-after-all", is_flag=True, help="Print the graph after each pass, not after the last alone.")
@click.option("--list", "list_all", is_flag=True, help="Print every rewrite there is, by phase, instead.")
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), help="Write the graph, to go on from there.")
def opt_command(
    source: str | None,
    plan_file: Path | None,
    passes: str | None,
    phase: str | None,
    print_after_all: bool,
    list_all: bool,
    save: Path | None,
) -> None:
    """Run rewrites on a saved graph, one after the other, and print the graph that they leave.

    GRAPH.json is what `zerofx plan --save-graph` or --save has written. Without --passes and --phase, all preparations
    are run, and with --plan the passes that carry it out. Nothing but what is asked for is run.
    """
    from zerofx.driver.opt import list_rewrites, rewrite_file
    from zerofx.scheduler.plan.plan import Plan

    with _clean_errors():
        plan = None if plan_file is None else Plan.load(plan_file)
        if list_all:
            _say("\n".join(list_rewrites()))
        elif source is None:
            raise UsageError(
                "expected GRAPH.json, found no argument: `zerofx plan ... --save-graph GRAPH.json` makes it"
            )
        else:
            _say(rewrite_file(source, passes, phase, plan, save, every=print_after_all))
            _say_written(save)


@main.command("export")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--format", "form", type=click.Choice(("safetensors", "dcp")), default="safetensors", show_default=True,
    help="For transformers, or all of it for torch.distributed.checkpoint, whose files are pickles.",
)  # fmt: skip
@click.option("--dtype", type=click.Choice(("float32", "bfloat16", "float16")), help="Of numbers that are not whole.")
@click.option("--shard-size", metavar="SIZE", default="5GB", show_default=True, help="The most bytes in one file.")
def export_command(checkpoint: Path, out: Path, form: str, dtype: str | None, shard_size: str) -> None:
    """Write the model of a checkpoint as others read it, a tensor at a time, into a folder that is not there yet.

    CHECKPOINT is what step.save_checkpoint was given, for the latest one there, or what it returned. In OUT are
    safetensors files with an index, and config.json where the model had one, as from_pretrained opens them.
    """
    from zerofx.checkpoints.export import export_distributed, export_model  # as there

    with _clean_errors():
        most_bytes = parse_bytes(shard_size)
        if form == "dcp":
            if dtype is not None:
                raise UsageError("expected no --dtype with --format dcp, which has all values as they were saved")
            export_distributed(checkpoint, out)
        else:
            export_model(checkpoint, out, dtype=dtype, most_bytes=most_bytes)
    _say_written(out)


@main.command("machines")
@click.option("--measure", is_flag=True, help="Measure the one at hand, and keep the numbers for steps that run on it.")
@click.option("--nvme", metavar="FOLDER", help="Measure reads and writes in this folder too.")
def machines_command(measure: bool, nvme: str | None) -> None:
    """List the built-in machines: datasheet numbers, of one device unless it says otherwise.

    With --measure the machine at hand, of as many ranks as torchrun has started, in some ten seconds.
    """
    if nvme is not None and not measure:
        raise click.UsageError(
            "expected --nvme with --measure, found it alone: built-in machines have drives of their own"
        )
    headers = ("machine", "memory", "bandwidth", "float32", "bfloat16", "float16", "within node", "between", "a node")
    machines = list_machines()
    if measure:
        with _clean_errors(), world(None) as (rank, here):
            machines = (Machine.measure(here, nvme_path=nvme),)
        if rank > 0:
            return
    rows = [_machine_row(machine) for machine in machines]
    _say(text_table(rows, headers))
    _say(
        "\nbandwidth: memory, read plus written. float32, bfloat16, float16: dense peaks of matrix multiplication, in\n"
        "FLOP/s. within node, between: links in one direction, and seconds a hop; between nodes, one device's share.\n"
        "a node: devices, and host memory that they share."
    )


@main.command("doctor")
def doctor_command() -> None:
    """Say what zerofx finds here, as text for a report of a bug: versions, compiler, devices, folders, switches."""
    from zerofx.cli.doctor import examine  # as there

    for line in examine():
        _say(line)


def _say_written(*paths: Path | None) -> None:
    for path in filter(None, paths):
        _say(f"wrote {path}", err=True)


@contextmanager
def _clean_errors() -> Iterator[None]:
    try:
        yield
    except ZeroFXError as error:
        raise _Refused(escape_for_utf8(str(error))) from error
    except OSError as error:
        if error.filename is None:  # not about a file that was asked for
            raise
        raise _Refused(f"{error.filename}: {error.strerror}") from error


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
