"""Record the Python code that runs while a forward is traced: a step may depend on everything the code names."""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Self

from zerofx.torch_private.modules import OF_STATE_DICTS

# Packages whose code computes by its arguments alone, as far as a step can see.
_LIBRARIES = frozenset(
    {"torch", "torchgen", "zerofx", "numpy", "scipy", "sympy", "triton", "_pytest", "pytest", "pluggy"}
)
_OPAQUE = _LIBRARIES | sys.stdlib_module_names
_MODULES, _INTEGRATIONS = "torch.nn.modules.", "zerofx.integrations."


def is_opaque(module: str | None) -> bool:
    """True if code and classes of ``module`` belong to Python, torch or a library that keeps no state of the user's."""
    name = module or ""
    if name == "__main__" or name.startswith(_INTEGRATIONS):
        return False
    return name.partition(".")[0] in _OPAQUE or name.startswith("namedtuple_")


_STORES = frozenset({"STORE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR"})
_WRITERS = frozenset({"next", "append", "appendleft", "extend", "insert", "update", "add", "pop", "setattr", "clear"})


@functools.cache
def names_read(code: CodeType) -> frozenset[str]:
    """The names that code loads: globals and attributes; names that it only stores are not included."""
    names = frozenset(code.co_names)
    stored = {step.argval for step in dis.get_instructions(code) if step.opname.startswith("STORE_")}
    if not names & stored:
        return names
    return frozenset(
        step.argval
        for step in dis.get_instructions(code)
        if step.argval in names and not step.opname.startswith(("STORE_", "DELETE_"))
    )


@functools.cache
def _may_write(code: CodeType) -> bool:
    if _WRITERS.intersection(code.co_names):
        return True
    return any(
        step.opname in _STORES or (step.opname == "STORE_DEREF" and step.argval in code.co_freevars)
        for step in dis.get_instructions(code)
    )


class ExecutedCode:
    """While open, records each piece of the user's code that runs, with its globals and the objects that it runs on.

    Attributes:
        globals: the globals of each piece of code.
        attributes: names that torch's modules read of themselves (``p`` of a dropout).
        owners: the objects that methods ran on, while they live.
        outer: the trace function that was there before.
    """

    def __init__(self) -> None:
        self.globals: dict[CodeType, dict[str, Any]] = {}
        self.attributes: set[str] = set()
        self.owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._known: dict[CodeType, bool] = {}  # whether it is the user's
        self._depth = 0
        self.outer: Any = None

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth == 1:
            self.outer = sys.gettrace()
            sys.settrace(self._note_call)
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            sys.settrace(self.outer)
            self.outer = None

    def may_write(self) -> bool:
        """True if some of the code stores anything outside of its own variables, or may call code that does."""
        return any(map(_may_write, self.globals))

    def _note_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        is_users = self._known.get(code)
        if is_users is None:
            is_users = self._learn(code, frame)
        if is_users and code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            if not is_opaque(type(owner).__module__):
                with contextlib.suppress(TypeError):  # of a class whose instances cannot be referred to weakly
                    self.owners[id(owner)] = owner
        return self.outer(frame, event, argument) if self.outer is not None else None

    def _learn(self, code: CodeType, frame: FrameType) -> bool:
        module = frame.f_globals.get("__name__")
        self._known[code] = is_users = not is_opaque(module)
        if is_users:
            self.globals[code] = frame.f_globals
        elif module is not None and module.startswith(_MODULES):
            self.attributes.update(name for name in code.co_names if name != OF_STATE_DICTS)
        return is_users


def pause_recording(dispatch: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``ExecutedCode`` ignore a ``__torch_dispatch__``: no code of the user's runs in it, and Python runs all code
    several times slower while any of it is traced."""

    @functools.wraps(dispatch)
    def dispatch_unrecorded(*args: Any, **options: Any) -> Any:
        watching = sys.gettrace()
        watcher = getattr(watching, "__self__", None)
        if not isinstance(watcher, ExecutedCode):
            return dispatch(*args, **options)
        sys.settrace(watcher.outer)
        try:
            return dispatch(*args, **options)
        finally:
            sys.settrace(watching)

    return dispatch_unrecorded
