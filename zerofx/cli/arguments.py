"""Arguments of the command line: the function that makes a training, machines, budgets."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, cast

import click

from zerofx.averages import EMA, SWA, Average
from zerofx.choices import AccumulateOption, OffloadOption
from zerofx.disk.own_files import read_named
from zerofx.errors import UsageError
from zerofx.option_table import FLAG, POSITIVE, SIZE, Entry, Kind, entries, texts
from zerofx.options import CompileOptions
from zerofx.precision import Precision
from zerofx.scheduler.cost.machine import Machine

if TYPE_CHECKING:
    from torch import nn


_NUMBER = re.compile(r"[0-9]{1,18}")


def find_function(where: str) -> Callable[[], Any]:
    """The function that ``MODULE:FUNCTION`` names.

    Raises:
        UsageError: there is none; says which there are.
    """
    source, _, name = where.rpartition(":")
    if not source or not name:
        raise UsageError(f"expected MODULE:FUNCTION, such as train.py:make or package.module:make, found {where!r}")
    module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    target = getattr(module, name, None)
    if callable(target):
        function: Callable[[], Any] = target
        return function
    offered = [key for key, value in vars(module).items() if callable(value) and _is_own(value, module)]
    hint = f"; its own are {', '.join(offered)}" if offered else ""
    raise UsageError(f"{source} has no function {name!r}{hint}")


def _is_own(value: object, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__ and not isinstance(value, type)


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    sys.path.insert(0, str(path.parent.resolve()))  # as when Python runs it: what lies next to it can be imported
    name = path.stem if path.stem not in sys.modules else f"_{path.stem}_"  # none is replaced by one that is called so
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
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


def make_training(where: str, device: str) -> tuple[nn.Module, Any, Any, Any, Any]:
    """Call the function that ``where`` names, with ``device`` as torch's default: returns model, optimizer or
    several, batch, loss function (or None) and forward (or None).

    Raises:
        UsageError: there is no such function, or it returns something else.
    """
    import torch  # takes seconds to import, which `zerofx --help` does without
    from torch import nn

    function = find_function(where)
    with torch.device(device):
        training = function()
    expected = f"expected {where} to return (model, optimizer, batch), and after them loss_fn, or None and forward"
    if not isinstance(training, tuple) or len(training) not in (3, 4, 5):
        shown = f"{len(training)} values" if isinstance(training, tuple) else type(training).__name__
        raise UsageError(f"{expected}, found {shown}")
    model, optimizer, batch = training[:3]
    several = isinstance(optimizer, list | tuple) and optimizer
    for name, value, kind in (
        ("model", model, nn.Module),
        ("optimizer", optimizer[0] if several else optimizer, torch.optim.Optimizer),
        ("batch", batch, (tuple, Mapping)),
    ):
        if not isinstance(value, kind):
            hint = ": put a batch of one argument as (tensor,)" if name == "batch" else ""
            raise UsageError(f"{expected}, found a {type(value).__name__} as {name}{hint}")
    loss_fn, forward = (*training[3:], None, None)[:2]
    return model, optimizer, batch, loss_fn, forward


def read_machine(name: str) -> Machine:
    """A built-in machine, or one from a .json file."""
    if not name.endswith(".json"):
        return Machine.named(name)
    try:
        return Machine.from_json(read_named(name))
    except UnicodeDecodeError as error:
        raise UsageError(f"expected the JSON of a machine in {name}, found no text: {error}") from error


def _parse_budget(_context: click.Context, _option: click.Parameter, text: str | None) -> str | float | None:
    """A fraction is a bare number up to one; everything else is a size."""
    try:
        fraction = float(text or "")
    except ValueError:
        return text
    return fraction if 0 < fraction <= 1 else text


def _parse_mesh(
    _context: click.Context, _option: click.Parameter, text: str | None
) -> dict[str, int] | Literal["auto"] | None:
    """Numbers of ranks by axis, from ``replicate=2,shard=8``."""
    if text is None or text == "auto":
        return text  # type: ignore[return-value]  # the word itself
    sizes: dict[str, int] = {}
    for entry in text.split(","):
        axis, _, size = entry.strip().partition("=")
        if not _NUMBER.fullmatch(size) or axis in sizes:
            raise click.BadParameter(
                f"expected axes, each once, with numbers of ranks, such as replicate=2,shard=8, found {entry!r}"
            )
        sizes[axis] = int(size)
    return sizes


def _parse_shardings(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> dict[str, str]:
    """Words by names, from ``layers.*.up=column``, one for each option."""
    entries = [text.rpartition("=") for text in texts]
    for (name, _, word), text in zip(entries, texts, strict=True):
        if not name or not word:
            raise click.BadParameter(f"expected NAME=WORD, such as 'layers.*.up=column', found {text!r}")
    return {name: word for name, _, word in entries}


def _parse_offload(_context: click.Context, _option: click.Parameter, text: str) -> OffloadOption:
    name, equals, tier = text.partition("=")
    return cast(OffloadOption, {name: tier} if equals else text)  # whether it can be is for `check_options` to say


def _parse_accumulate(_context: click.Context, _option: click.Parameter, text: str) -> AccumulateOption:
    if text == "auto":
        return "auto"
    if not _NUMBER.fullmatch(text):
        raise click.BadParameter(f"expected a number of micro-batches, or auto, found {text!r}")
    return int(text)


def _parse_average(_context: click.Context, _option: click.Parameter, text: str | None) -> Average | None:
    """An average of weights, from ``ema=0.999`` or ``swa``."""
    if text is None:
        return None
    if text in ("ema", "swa"):
        return EMA() if text == "ema" else SWA()
    name, _, decay = text.partition("=")
    try:
        number = float(decay if name == "ema" else "")
    except ValueError as error:
        raise click.BadParameter(f"expected ema, ema=DECAY such as ema=0.999, or swa, found {text!r}") from error
    try:
        return EMA(decay=number)
    except UsageError as error:
        raise click.BadParameter(str(error)) from error


# How options are written of which a value is no single word or number: the callback that reads them, and its form.
_WRITTEN: Mapping[str, Mapping[str, Any]] = {
    "average": {"callback": _parse_average, "metavar": "ema[=DECAY]|swa"},
    "offload": {"callback": _parse_offload, "metavar": "TIER|gradients=TIER"},
    "accumulate": {"type": str, "callback": _parse_accumulate, "metavar": "N|auto"},
    "mesh": {"callback": _parse_mesh, "metavar": "AXIS=N,...|auto"},
    "shardings": {"callback": _parse_shardings, "metavar": "NAME=WORD", "multiple": True},
}


def _click_arguments(name: str, entry: Entry) -> Mapping[str, Any] | None:
    """The click arguments of an option; None if the command line does not have it."""
    kind = entry.kind
    if name in _WRITTEN:
        return _WRITTEN[name]
    if kind.words:
        return {"type": click.Choice(kind.words)}
    if kind.least is not None:
        return {"type": click.IntRange(kind.least, kind.most)}
    forms: Mapping[Kind, Mapping[str, Any]] = {
        SIZE: {"callback": _parse_budget, "metavar": "SIZE"},
        POSITIVE: {"type": float},
        FLAG: {"is_flag": True},
    }
    return forms.get(kind)


def training_options(keywords: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that a function with these keywords has, by their names there."""
    known, of_each = entries(CompileOptions), {**texts(Precision), **texts(CompileOptions)}
    taken = {"stage": known["stage"]}
    for name in keywords.__annotations__:
        taken[name] = known[name]
        if name == "precision":  # the words that say more of it
            taken |= {field: entry for field, entry in entries(Precision).items() if field != "compute"}

    def add(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def called(**given: Any) -> None:
            of_precision = {name: given.pop(name) for name in entries(Precision) if name in given}
            said = {name: value for name, value in of_precision.items() if value is not None}
            given["precision"] = replace(Precision.of(given["precision"]), **said)
            command(**given)

        for name, entry in reversed(taken.items()):
            written = _click_arguments(name, entry)
            if written is not None:
                text = of_each[name]
                settings = {"default": entry.default, "help": text[0].upper() + text[1:], **written}
                flag, shown = f"--{name.replace('_', '-')}", entry.default not in (None, False)
                called = click.option(flag, name, show_default=shown, **settings)(called)
        return called

    return add


def _device_named(name: str) -> str:
    """Raises:
    UsageError: it is no device that is here.
    """
    import torch  # as above

    num_gpus = torch.cuda.device_count()
    match = re.fullmatch(r"(cpu|cuda|meta)(?::([0-9]{1,4}))?", name)  # with meta, what has no values says so itself
    is_here = match is not None and int(match[2] or 0) < (num_gpus if match[1] == "cuda" else 1)
    if not is_here:
        there = "cpu" + (f", cuda:0 to cuda:{num_gpus - 1}" if num_gpus else ", and no GPU that torch sees")
        raise UsageError(f"expected --device to be one that is here ({there}), found {name!r}")
    return name


@contextmanager
def world(device: str | None) -> Iterator[tuple[int, str]]:
    """This process's rank and device, joined with the others that ``torchrun`` has started, if there are any."""
    import torch  # as above
    import torch.distributed as dist

    rank, local = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
    here = _device_named(device) if device else f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield rank, here
        return
    on_gpu = here.startswith("cuda")
    if on_gpu:
        torch.cuda.set_device(here)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    yield rank, here
    # Where the block raises, others may wait for this rank, and a clean end would wait for them: the process just ends.
    dist.destroy_process_group()
