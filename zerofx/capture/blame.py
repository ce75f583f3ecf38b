"""Find the user's line that caused an error while a model was traced."""

from __future__ import annotations

import inspect
import linecache
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import torch
from torch import fx

from zerofx.errors import CaptureError
from zerofx.ir.batch import Batch

_TORCH_ROOT = f"{Path(torch.__file__).parent}/"
_ZEROFX_ROOT = f"{Path(__file__).parents[1]}/"
_CALLER = str(Path(__file__).parent / "objective" / "loss.py")


# Where torch itself reads values, and what keeps it from doing so.
_READERS = {
    "nn/modules/transformer.py": "torch compares the mask with a causal one where it is not told: pass is_causal=True "
    "or False (tgt_is_causal and memory_is_causal to nn.Transformer and its decoder)",
    "nn/modules/batchnorm.py": "torch counts batches for the mean of all of them, which momentum=None asks for: give "
    "the norm a momentum",
}


def user_line(stack: traceback.StackSummary) -> str | None:
    """The innermost line that is neither torch's nor zerofx's."""
    frame = next(_user_frames(stack), None)
    return f"{frame.filename}:{frame.lineno}: {frame.line}" if frame else None


def line_of_caller() -> str | None:
    """The innermost of the lines that are running that is neither torch's nor zerofx's."""
    frame = _users_frame(inspect.currentframe())
    return frame and f"{frame.f_code.co_filename}:{frame.f_lineno}: {_line_of(frame)}"


def user_lines(stack: traceback.StackSummary) -> list[str]:
    """All user lines within the model and its loss, the innermost first.

    File names are given without the part that depends on where they are installed.
    """
    called = max((i for i, frame in enumerate(stack) if frame.filename == _CALLER), default=-1)
    frames = [("/".join(Path(frame.filename).parts[-2:]), frame) for frame in _user_frames(stack[called + 1 :])]
    return [f"{file}:{frame.lineno}: {frame.line}" for file, frame in frames]


def describe_user_line(frame: FrameType | None) -> str:
    """Describe the innermost user line of ``frame`` and its callers: file, function and code.

    There is no line number: the text stays the same while the line does, wherever edits move it.
    """
    frame = _users_frame(frame)
    return (
        "" if frame is None else f"{Path(frame.f_code.co_filename).name}, {frame.f_code.co_qualname}: {_line_of(frame)}"
    )


def _users_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _line_of(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals).strip()


def _is_users(filename: str) -> bool:
    return not filename.startswith((_TORCH_ROOT, _ZEROFX_ROOT, "<")) and "/contextlib.py" not in filename


def _user_frames(stack: Sequence[traceback.FrameSummary]) -> Iterator[traceback.FrameSummary]:
    for frame in reversed(stack):
        if _is_users(frame.filename):
            yield frame


def explain(error: Exception, batch: Batch) -> CaptureError:
    """The error to show the user for ``error``, which tracing a call with ``batch`` raised."""
    line = user_line(traceback.extract_tb(error.__traceback__))
    kind = type(error).__name__
    if is_read_of_values(error):
        return CaptureError(
            f"expected a forward whose path does not depend on values, found one that reads a tensor's value at\n"
            f"  {line or '(line not found)'}\n"
            f"A step is one graph, planned before it runs: replace .item(), float(tensor), or an if on a tensor by "
            f"torch.where or a Python value, name an argument of the batch that has the same values in every step "
            f"(constant=('mask',)), or take that part out of the training step.{_reader(error, line)}"
        )
    if "DynamicOutputShape" in kind:
        return CaptureError(
            f"expected a forward whose shapes do not depend on values, found {error}, which gives as many elements as "
            f"values say, at\n  {line or '(line not found)'}\n"
            f"A step is planned for one shape: compute with all elements and leave out what does not count by "
            f"torch.where or a weight of 0, make the tensor where the batch is made, or name an argument of the batch "
            f"that has the same values in every step: constant=('edge_index',)."
        )
    if held := re.search(r"no rule registered for HigherOrderOperator (\w+)", str(error)):
        return CaptureError(
            f"expected a forward of operators alone, found {held[1]}, which holds functions of its own, at\n"
            f"  {line or '(line not found)'}\n"
            f"A step is one graph, planned before it runs: compute both sides and choose by torch.where, write a loop "
            f"in Python, or take that part out of the training step."
        )
    if written := re.search(r"entirely functional graph, but found .*aten\.(\w+)", str(error)):
        return CaptureError(
            f"expected a forward that changes nothing but its own buffers in place, found {written[1]} on a tensor "
            "that the model has elsewhere: register it as a buffer, which is a part of the step"
        )
    if ".numpy() is not supported" in str(error):
        return CaptureError(
            f"expected a forward of torch's operators alone, found one that makes a numpy array of a tensor, at\n"
            f"  {line or '(line not found)'}\n"
            f"What numpy computes is no part of a graph, and has no gradient: compute it with torch, or where the "
            f"batch is made and pass it in the batch."
        )
    if reads_leaked_tensor(error):
        return CaptureError(
            f"expected a forward that reads no tensors of its earlier calls but those of its modules, found one that a "
            f"trace has left in a dict or the like{f', at {line}' if line else ''}: call the model once in a fresh "
            f"process, before zerofx.compile, so that what it remembers has values"
        )
    advice = "replace the operator."
    if "NoneType" in str(error):
        advice = (
            "a library took another way because torch.compiler.is_compiling() is true while tracing, and left out "
            "what eager mode makes by itself, such as an attention mask: pass it in the batch."
        )
    args, kwargs = batch.call
    places = [*([f"at {line}"] if line else []), *getattr(error, "__notes__", [])]
    place = "".join(f"\n  {place}" for place in places)
    is_one_dict = len(args) == 1 and isinstance(args[0], Mapping) and not kwargs
    by_name = " (the batch is one dict: step(**batch) gives its entries by name)" if is_one_dict else ""
    if _is_theirs(error) and "NoneType" not in str(error):
        return CaptureError(
            f"expected model and loss to run on this batch, found that their own code raises {kind}: {error}{place}\n"
            f"Correct the call, or what is called{by_name}; eager mode raises it too, unless that line asks whether a "
            f"model is being compiled."
        )
    failure = "torch refuses an operation" if places and kind in _REFUSALS else "the model could not be traced"
    return CaptureError(
        f"{failure}; {kind}: {error}{place}\n"
        f"If the same call fails in eager mode, correct the call{by_name}; if it does not, {advice}"
    )


_REFUSALS = frozenset({"RuntimeError", "ValueError", "IndexError", "TypeError", "AssertionError"})


def _is_theirs(error: Exception) -> bool:
    """True if a line of the model or the loss raised the error, not torch."""
    stack = traceback.extract_tb(error.__traceback__)
    return bool(stack) and next(_user_frames(stack[-1:]), None) is not None


def is_read_of_values(error: Exception) -> bool:
    """True if torch raised ``error`` because the forward reads the value of a traced tensor, which has none."""
    kind = type(error).__name__
    return "DataDependent" in kind or "UserError" in kind or "value out of a tracing tensor" in str(error)


def reads_leaked_tensor(error: Exception) -> bool:
    """True if torch raised ``error``, or its cause, because a tensor of an earlier trace was read."""
    return bool(re.search("Unexpected fake buffer|FunctionalTensor on its own", f"{error}{error.__cause__}"))


def depends_on_values(error: Exception) -> bool:
    """True if torch raised ``error`` for a value, or for a shape that depends on values."""
    return is_read_of_values(error) or "DynamicOutputShape" in type(error).__name__


def _reader(error: Exception, line: str | None) -> str:
    """Advice for reads of values in torch's own Python code, and for layers that are skipped at random."""
    if re.search("layer_?drop|skip_the_layer", line or "", re.IGNORECASE):
        return "\nHere layers are left out at random: set the probability of that (layerdrop) to 0."
    files = {frame.filename.removeprefix(_TORCH_ROOT) for frame in traceback.extract_tb(error.__traceback__)}
    advices = [advice for place, advice in _READERS.items() if any(file.startswith(place) for file in files)]
    return f"\nHere {advices[0]}." if advices else ""


def unknown_input(graph: fx.Graph, described: object) -> CaptureError:
    """The error for an input of a traced graph that is neither the model's nor the batch's.

    Torch orders operators that do more than give results by tokens, which come in as inputs.
    """
    effects = {str(n.args[1]) for n in graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects)}
    if not effects:
        return CaptureError(f"the model has an input of a kind that cannot be captured: {described}")
    return CaptureError(
        f"expected a forward of operators that only give results, found {', '.join(sorted(effects))}, which also "
        f"raises errors, prints or the like: leave it out of the training step"
    )
