"""Ways in which scripts log what they read from tensors while a loss is computed."""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
import math
import queue
import statistics
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Forward = Callable[[nn.Module, Tensor, Tensor], Tensor]
Seen = Callable[[], Any]
Make = Callable[[Path], tuple[Forward, Seen]]
"""Makes a forward, and what gives all that has been logged, in a folder of its own."""


@dataclass(frozen=True)
class Way:
    """One way to log. ``refused``: whether a step is refused, as it would be another one by what is read."""

    name: str
    make: Make
    refused: bool = False


_WAYS: list[Way] = []
OPENED: list[Any] = []
"""Files that scripts leave open, to be closed."""


def log_ways() -> list[Way]:
    """All ways."""
    return _WAYS


def way(name: str, *, refused: bool = False) -> Callable[[Make], Make]:
    """Add a way to the net."""

    def add(make: Make) -> Make:
        _WAYS.append(Way(name, make, refused))
        return make

    return add


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of a model, and their loss."""
    outputs = model(x)
    return outputs, F.mse_loss(outputs, y)


def _logging(log: Callable[[Tensor, Tensor, Tensor], object], seen: Seen) -> tuple[Forward, Seen]:
    """A forward that calls ``log(loss, outputs, targets)``."""

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        outputs, loss = loss_of(model, x, y)
        log(loss.detach(), outputs.detach(), y)
        return loss

    return forward, seen


@way("append to a list")
def append(_: Path) -> Any:
    log: list[float] = []
    return _logging(lambda loss, outputs, y: log.append(loss.item()), lambda: log)


@way("lists in a dictionary")
def dict_of_lists(_: Path) -> Any:
    log: dict[str, list[float]] = {"loss": [], "norm": []}

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        log["loss"].append(float(loss))
        log["norm"].append(outputs.norm().item())

    return _logging(note, lambda: log)


@way("lists in a defaultdict")
def default(_: Path) -> Any:
    log: defaultdict[str, list[float]] = defaultdict(list)
    return _logging(lambda loss, outputs, y: log["loss"].append(loss.item()), lambda: dict(log))


@way("a defaultdict by mode")
def nested_default(_: Path) -> Any:
    log: dict[str, defaultdict[str, list[float]]] = {"train": defaultdict(list), "eval": defaultdict(list)}
    return _logging(lambda loss, outputs, y: log["train"]["loss"].append(loss.item()), lambda: dict(log["train"]))


@way("the latest value in a dictionary")
def latest(_: Path) -> Any:
    log: dict[str, float] = {}
    return _logging(lambda loss, outputs, y: log.update(loss=loss.item()), lambda: dict(log))


@way("an attribute")
def attribute(_: Path) -> Any:
    log = SimpleNamespace(loss=0.0)
    return _logging(lambda loss, outputs, y: setattr(log, "loss", loss.item()), lambda: log.loss)


@way("a running mean in an attribute")
def running_mean(_: Path) -> Any:
    log = SimpleNamespace(mean=0.0, count=0)

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        log.count += 1
        log.mean += (loss.item() - log.mean) / log.count

    return _logging(note, lambda: (log.mean, log.count))


@way("an exponential mean in a dictionary, none at first")
def exponential(_: Path) -> Any:
    log: dict[str, float | None] = {"mean": None}

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        now, mean = loss.item(), log["mean"]
        log["mean"] = now if mean is None else 0.9 * mean + 0.1 * now

    return _logging(note, lambda: dict(log))


@way("a deque of the last three")
def last_three(_: Path) -> Any:
    log: deque[float] = deque(maxlen=3)
    return _logging(lambda loss, outputs, y: log.append(loss.item()), lambda: list(log))


@way("a mean over the last three")
def mean_of_three(_: Path) -> Any:
    last: deque[float] = deque(maxlen=3)
    log: list[float] = []

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        last.append(loss.item())
        log.append(sum(last) / len(last))

    return _logging(note, lambda: log)


@way("the best so far")
def best(_: Path) -> Any:
    log = {"best": math.inf, "steps": 0}

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        if (now := loss.item()) < log["best"]:
            log["best"], log["steps"] = now, 0
        else:
            log["steps"] += 1

    return _logging(note, lambda: dict(log))


@way("max and min of numbers")
def extremes(_: Path) -> Any:
    log: list[tuple[float, float]] = []

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        values = [outputs.mean().item(), loss.item(), y.max().item()]
        log.append((max(values), min(values)))

    return _logging(note, lambda: log)


@way("a counter of classes")
def counter(_: Path) -> Any:
    log: Counter[int] = Counter()
    return _logging(lambda loss, outputs, y: log.update(outputs.argmax(-1).tolist()), lambda: dict(log))


@way("an ordered dictionary by step, numbered by itertools")
def by_step(_: Path) -> Any:
    log: OrderedDict[int, float] = OrderedDict()
    number = itertools.count()
    return _logging(lambda loss, outputs, y: log.__setitem__(next(number), loss.item()), lambda: dict(log))


@way("an f-string with a format")
def f_string(_: Path) -> Any:
    log: list[str] = []
    return _logging(lambda loss, outputs, y: log.append(f"loss {loss.item():.4f}, {loss:.3e}"), lambda: log)


@way("old formatting with %")
def percent(_: Path) -> Any:
    log: list[str] = []
    return _logging(lambda loss, outputs, y: log.append("%.5f of %d" % (loss.item(), (y > 0).sum())), lambda: log)  # noqa: UP031


@way("print to standard output")
def printed(_: Path) -> Any:
    log = io.StringIO()

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        print(f"loss {loss.item():.5f}")
        print("mean", outputs.mean().item())

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        outputs, loss = loss_of(model, x, y)
        note(loss.detach(), outputs.detach(), y)
        return loss

    forward.stdout = log  # type: ignore[attr-defined]  # where it is to go
    return forward, log.getvalue


@way("the logging module, to a handler of its own")
def logger(_: Path) -> Any:
    log: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            log.append(record.getMessage())

    own = logging.getLogger("tests.nets.cases.logs")
    own.handlers[:], own.propagate = [Handler()], False
    own.setLevel(logging.INFO)
    return _logging(lambda loss, outputs, y: own.info("loss %.4f", loss.item()), lambda: log)


class Writer:
    """As a writer of TensorBoard's: rows of tag, value and step."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.rows.append((tag, float(value), step))


@way("a writer with add_scalar")
def writer(_: Path) -> Any:
    log, state = Writer(), {"step": 0}

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        state["step"] += 1
        log.add_scalar("loss", loss.item(), state["step"])
        log.add_scalar("mean", float(outputs.mean()), state["step"])

    return _logging(note, lambda: log.rows)


class FileWriter:
    """Writes lines to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.open("w", buffering=1)
        OPENED.append(self.file)

    def add_scalar(self, tag: str, value: float) -> None:
        self.file.write(f"{tag} {value:.6f}\n")


@way("a writer that writes to a file")
def file_writer(folder: Path) -> Any:
    log = FileWriter(folder / "log")
    return _logging(lambda loss, outputs, y: log.add_scalar("loss", loss.item()), log.path.read_text)


@way("a file that a closure has")
def closed_over(folder: Path) -> Any:
    file = (folder / "log").open("w", buffering=1)
    OPENED.append(file)
    return _logging(lambda loss, outputs, y: file.write(f"{loss.item():.6f}\n"), (folder / "log").read_text)


@way("a file that is opened for each line", refused=True)
def opened(folder: Path) -> Any:
    path = folder / "log"
    path.write_text("")

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        value = loss.item()
        with open(path, "a") as file:  # as scripts do
            file.write(f"{value:.6f}\n")

    return _logging(note, path.read_text)


@way("rows of a csv file")
def rows(folder: Path) -> Any:
    file = (folder / "log").open("w", buffering=1)
    OPENED.append(file)
    log = csv.writer(file)
    return _logging(lambda loss, outputs, y: log.writerow([loss.item(), 1]), (folder / "log").read_text)


@way("json lines in a file")
def json_lines(folder: Path) -> Any:
    file = (folder / "log").open("w", buffering=1)
    OPENED.append(file)

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        json.dump({"loss": loss.item(), "all": outputs[0].tolist()}, file)
        file.write("\n")

    return _logging(note, (folder / "log").read_text)


@way("json as a text")
def json_text(_: Path) -> Any:
    log: list[str] = []
    return _logging(lambda loss, outputs, y: log.append(json.dumps({"loss": loss.item()})), lambda: log)


@way("a queue to another thread")
def queued(_: Path) -> Any:
    log: queue.Queue[float] = queue.Queue()
    return _logging(lambda loss, outputs, y: log.put(loss.item()), lambda: list(log.queue))


@way("every third step of the loop")
def every_third_of_loop(_: Path) -> Any:
    log: list[float] = []
    state = {"step": 0}

    def seen() -> list[float]:
        state["step"] += 1  # as a loop does, before each step
        return log

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        if state["step"] % 3 == 0:
            log.append(loss.item())

    return _logging(note, seen)


@way("every third call, which the forward counts", refused=True)
def every_third(_: Path) -> Any:
    log: list[float] = []
    state = {"step": 0}

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        state["step"] += 1
        if state["step"] % 3 == 0:
            log.append(loss.item())
        if state["step"] % 2:
            log.append(-1.0)

    return _logging(note, lambda: log)


@way("a branch between logged values")
def branch(_: Path) -> Any:
    log: list[float] = []

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        total = (y > 0.5).sum()
        log.append((outputs.sum() / total).item() if total > 0 else 0.0)
        log.append(loss.item() if loss.item() > 1 else 0.0)

    return _logging(note, lambda: log)


@way("a comparison of what is read")
def comparison(_: Path) -> Any:
    log: list[bool] = []
    return _logging(lambda loss, outputs, y: log.append(loss.item() > outputs.mean().item()), lambda: log)


@way("a list of a tensor's values")
def values(_: Path) -> Any:
    log: list[list[float]] = []
    return _logging(lambda loss, outputs, y: log.append(outputs[0].tolist()), lambda: log)


@way("a numpy array of a tensor")
def array(_: Path) -> Any:
    log: list[Any] = []
    return _logging(
        lambda loss, outputs, y: log.append(outputs[0].cpu().numpy().copy()), lambda: np.array(log).tolist()
    )


@way("an element of a numpy array of the script's")
def numpy_element(_: Path) -> Any:
    log, state = np.zeros(32), {"step": 0}

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        log[state["step"]] = loss.item()
        state["step"] += 1

    return _logging(note, lambda: log.tolist())


@way("functions of math")
def functions(_: Path) -> Any:
    log: list[float] = []
    return _logging(lambda loss, outputs, y: log.append(round(math.exp(loss.item()), 4)), lambda: log)


@way("whole numbers")
def whole(_: Path) -> Any:
    log: list[float] = []

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        log.append(int((y > 0).sum()) // 2 + (outputs > 0).sum().item() % 3)

    return _logging(note, lambda: log)


@way("statistics of all so far")
def of_all(_: Path) -> Any:
    log: list[float] = []
    means: list[float] = []

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        log.append(loss.item())
        means.append(statistics.fmean(log) + statistics.pstdev(log))

    return _logging(note, lambda: means)


@dataclass
class Meter:
    """Value, sum and count, as scripts of torch's examples have them."""

    val: float = 0.0
    sum: float = 0.0
    count: int = 0
    history: list[float] = field(default_factory=list)

    def update(self, val: float, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.history.append(self.sum / self.count)


@way("a meter of a data class")
def meter(_: Path) -> Any:
    log = Meter()
    return _logging(lambda loss, outputs, y: log.update(loss.item(), len(y)), lambda: log)


@way("a class attribute")
def class_attribute(_: Path) -> Any:
    class Log:
        total = 0.0
        rows: ClassVar[list[float]] = []

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        Log.total += loss.item()
        Log.rows.append(Log.total)

    return _logging(note, lambda: (Log.total, Log.rows))


@way("a variable of an outer function")
def outer(_: Path) -> Any:
    total = 0.0

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        nonlocal total
        total += loss.item()

    return _logging(note, lambda: total)


@way("a list, cleared when it is long")
def cleared(_: Path) -> Any:
    recent: list[float] = []
    log: list[float] = []

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        recent.append(loss.item())
        if len(recent) == 3:
            log.append(sum(recent) / 3)
            recent.clear()

    return _logging(note, lambda: (recent, log))


@way("callbacks")
def callbacks(_: Path) -> Any:
    log: list[Any] = []
    calls: list[Callable[[dict[str, float]], object]] = [
        lambda metrics: log.append(dict(metrics)),
        lambda metrics: log.append(sorted(metrics.values())),
    ]

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        metrics = {"loss": loss.item(), "norm": float(outputs.norm())}
        for call in calls:
            call(metrics)

    return _logging(note, lambda: log)


@way("the mean of the elements that a mask names")
def masked(_: Path) -> Any:
    log: list[float] = []
    return _logging(lambda loss, outputs, y: log.append(outputs[y > 0].mean().item()), lambda: log)


@way("the least and largest of what a mask names, where it names any")
def masked_extremes(_: Path) -> Any:
    log: list[Any] = []

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        chosen = y > 0
        if (~chosen).all():
            log.append("none")
            return
        log.append((outputs[chosen].min().item(), torch.max(outputs[chosen]).item()))

    return _logging(note, lambda: log)


@way("a reduction over ranks")
def reduced(_: Path) -> Any:
    log: list[float] = []

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        total = loss.clone()
        if dist.is_initialized():
            dist.all_reduce(total)
        log.append(total.item())

    return _logging(note, lambda: log)


@way("accelerate's gather")
def gathered(_: Path) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    log: list[float] = []

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        log.append(accelerator.gather((y > 0).sum()).sum().item())
        log.append(accelerator.gather_for_metrics(outputs.sum(-1)).mean().item())

    return _logging(note, lambda: log)


@way("a module's own attribute")
def in_module(_: Path) -> Any:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.means = 0, list[float]()

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.means.append(x.detach().mean().item())
            return x

    counting = Counting()

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(counting(model(x)), y)

    return forward, lambda: (counting.calls, counting.means)


@way("a tensor in a list", refused=True)
def tensor(_: Path) -> Any:
    log: list[Any] = []

    def note(loss: Tensor, outputs: Tensor, y: Tensor) -> None:
        log.append(outputs.mean().item())
        log.append(loss)

    return _logging(note, lambda: log)


@way("a branch that scales the loss", refused=True)
def scaled(_: Path) -> Any:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        _, loss = loss_of(model, x, y)
        return loss * 0.5 if loss.item() > 1 else loss

    return forward, lambda: None


@way("a loss of the elements that a mask names, after a log", refused=True)
def masked_loss(_: Path) -> Any:
    log: list[float] = []

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        outputs: Tensor = model(x)
        log.append(outputs.mean().item())
        return F.mse_loss(outputs, y) + outputs[y > 0].mean()

    return forward, lambda: log


def _into_loss(name: str, weigh: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Add a way in which what is read gets into the loss by a tensor that is made of it."""

    def make(_: Path) -> Any:
        def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            outputs, loss = loss_of(model, x, y)
            weighed: Tensor = loss * weigh(outputs, loss)
            return weighed

        return forward, lambda: None

    way(name, refused=True)(make)


def _filled(value: float) -> Tensor:
    weights = torch.zeros(3)
    weights[0] = value
    return weights.sum()


_into_loss("a tensor made of what is read", lambda outputs, loss: torch.tensor([loss.item()]).sum())
_into_loss("a tensor over an array that is read", lambda outputs, _: torch.from_numpy(outputs.detach().numpy()).mean())
_into_loss("a tensor filled with what is read", lambda outputs, loss: torch.zeros(()).fill_(loss.item()))
_into_loss("an element set to what is read", lambda outputs, loss: _filled(loss.item()))
_into_loss("a factor that is read", lambda outputs, loss: torch.add(loss, loss, alpha=loss.item()))


@way("a loss that is multiplied by what is read", refused=True)
def multiplied(_: Path) -> Any:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        outputs, loss = loss_of(model, x, y)
        return loss * outputs.std().item()

    return forward, lambda: None


@way("a loss that is divided by a running mean", refused=True)
def by_mean(_: Path) -> Any:
    log = {"mean": 1.0}

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        _, loss = loss_of(model, x, y)
        scaled = loss / log["mean"]
        log["mean"] = 0.9 * log["mean"] + 0.1 * loss.item()
        return scaled

    return forward, lambda: log


@way("a loss that changes once a list is long", refused=True)
def by_length(_: Path) -> Any:
    log: list[float] = []

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        _, loss = loss_of(model, x, y)
        log.append(loss.item())
        return loss * 2 if len(log) > 4 else loss

    return forward, lambda: None


@way("layers as many as values say", refused=True)
def layers(_: Path) -> Any:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        outputs = model(x)
        for _ in range(int((y > 0).sum())):
            outputs = torch.tanh(outputs)
        return F.mse_loss(outputs, y)

    return forward, lambda: None


@way("a branch that changes a buffer", refused=True)
def buffer(_: Path) -> Any:
    state = nn.BatchNorm1d(3)

    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        _, loss = loss_of(model, x, y)
        if loss.item() > 1:
            state.running_mean.add_(1)  # type: ignore[union-attr]  # it has one
        return loss + state.running_mean.sum() * 0  # type: ignore[union-attr]

    return forward, lambda: None
