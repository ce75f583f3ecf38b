"""Statements of the Python file that Inductor generates: straight-line code that allocates, runs kernels, frees.

They are those of torch 2.11 to 2.15. Readers of such a file raise ``unknown_statement`` for all others: to skip a
statement that may allocate would give a peak that is too low.
"""

from __future__ import annotations

import ast
import math
from dataclasses import dataclass
from typing import Any

import torch

from zerofx.errors import InternalError
from zerofx.torch_private.operators import OpOverload, OpOverloadPacket

EMPTY = "empty_strided_"
"""What allocates begins with this, and the device's type; it is given size, stride and dtype."""

ALLOCATORS = (f"{EMPTY}cpu", f"{EMPTY}cuda")
"""Those of devices that steps run on."""

VIEW = "reinterpret_tensor"
"""A view, by tensor, size, stride and offset."""

SAME_MEMORY = "copy_if_misaligned"
"""Gives what it is given, where that begins as kernels for CUDA expect it."""

DEVICE = "device"
"""Gives a device, by its type and index."""

WRITING_METHODS = frozenset({"copy_", "zero_"})
"""Methods of tensors that write into them."""

REDUCING_METHODS = frozenset({"view", "sum", "prod", "amin", "amax", "to"})
"""Methods that add up what a reduction's programs have each left in a workspace, and give it a shape and a dtype."""

NUMBERS = {"inf": math.inf, "nan": math.nan}
"""Names for numbers that Python has no words for."""

_TAKING_NOTHING = frozenset({
    "args.clear", "assert_size_stride", "assert_size_stride_grouped", "assert_tensor_metadata", "assert_alignment",
    "get_raw_stream", "torch.cuda.set_device",
})  # fmt: skip
_GUARDS = frozenset({"torch.cuda._DeviceGuard"})
# Kernels that are no operators of ATen's, or of others, and write into what is given as ``out``: they are made of two.
_WRITING_KERNELS = frozenset({"extern_kernels.bias_addmm", "extern_kernels._mm_plus_mm"})


@dataclass(frozen=True)
class Wrapper:
    """The content of a generated file: the body of its function, and the names of kernels that it has built."""

    body: tuple[ast.stmt, ...]
    kernels: frozenset[str]

    @staticmethod
    def parse(source: str) -> Wrapper:
        """Read a generated file."""
        tree = ast.parse(source)
        (call,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "call")
        kernels = {
            ast.unparse(statement.targets[0])
            for statement in tree.body
            if isinstance(statement, ast.Assign) and ast.unparse(statement.value).startswith("async_compile.")
        }
        return Wrapper(tuple(call.body), frozenset(kernels))

    def takes_nothing(self, call: ast.Call) -> bool:
        """True if a call neither allocates memory nor returns a holder of memory."""
        name = ast.unparse(call.func)
        is_writing = name in _WRITING_KERNELS and any(keyword.arg == "out" for keyword in call.keywords)
        return name in _TAKING_NOTHING or name.removesuffix(".run") in self.kernels or is_writing


def is_guard(statement: ast.With) -> bool:
    """True if a block only sets the device for its statements."""
    return all(
        isinstance(item.context_expr, ast.Call) and ast.unparse(item.context_expr.func) in _GUARDS
        for item in statement.items
    )


def operator_called(name: str) -> OpOverload[..., Any] | None:
    """The operator of that name: ``torch.ops.aten.x.default``, ``aten.x_``, or ``extern_kernels.x``."""
    space, _, rest = name.partition(".")
    if space == "torch" and rest.startswith("ops."):
        path = rest.removeprefix("ops.")
    elif space in ("aten", "extern_kernels"):
        path = f"aten.{rest}"
    else:
        return None
    named: Any = torch.ops
    for part in path.split("."):
        named = getattr(named, part, None)
    if isinstance(named, OpOverloadPacket):
        named = getattr(named, "default", None)
    return named if isinstance(named, OpOverload) else None


def unknown_statement(statement: ast.AST) -> InternalError:
    """The error for a statement whose meaning is not known."""
    return InternalError(
        f"expected Inductor to write the statements that torch 2.11 to 2.15 have for allocating, running kernels and "
        f"deleting, found `{ast.unparse(statement)}` with torch {torch.__version__}: what it allocates is not known, "
        f"and a peak would be too low. Use backend='eager', and please report it with this line"
    )
