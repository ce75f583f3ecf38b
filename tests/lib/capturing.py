"""What CUDA does when it captures, on a CPU: operators are noted with their tensors, and done when launched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Noted(TorchDispatchMode):
    """Notes every operator with what it was given and what it returned; undoes what it wrote."""

    def __init__(self, written: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._written = written

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        for argument, given in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._written += [(one, one.clone()) for one in tree_leaves(given) if isinstance(one, torch.Tensor)]
        if isinstance(keywords.get("out"), torch.Tensor):
            self._written.append((keywords["out"], keywords["out"].clone()))
        made = func(*args, **keywords)
        self.calls.append((func, args, keywords, made))
        return made


class EmulatedCapturer:
    """A ``Capturer`` that captures operators of a CPU. Like CUDA's, it computes nothing while it captures."""

    def __init__(self) -> None:
        self.num_warm_ups = 0
        self.num_sessions = 0
        self.fail_at: Callable[[Any], bool] = lambda func: False
        self._written: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._stack = contextlib.ExitStack()
        self._mode: _Noted | None = None

    @contextlib.contextmanager
    def warm_up(self) -> Iterator[None]:
        self.num_warm_ups += 1
        yield

    @contextlib.contextmanager
    def session(self, *, fresh: bool) -> Iterator[None]:
        self.num_sessions += 1
        drawn = torch.get_rng_state()
        self._written.clear()
        try:
            yield
        finally:
            for tensor, before in reversed(self._written):
                tensor.copy_(before)
            torch.set_rng_state(drawn)

    def begin(self) -> None:
        assert self._mode is None
        self._mode = self._stack.enter_context(_Noted(self._written))

    def end(self) -> Callable[[], None]:
        mode, self._mode = self._mode, None
        assert mode is not None
        self._stack.close()
        if any(self.fail_at(call[0]) for call in mode.calls):
            raise RuntimeError("operation not permitted when stream is capturing")
        return lambda: _launch(mode.calls)

    def give_up(self) -> None:
        self._mode = None
        self._stack.close()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()


def _launch(calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]]) -> None:
    for func, args, keywords, made in calls:
        again = func(*args, **keywords)
        for before, now in zip(tree_leaves(made), tree_leaves(again), strict=True):
            # What was made while capturing is what the next operators read.
            if isinstance(before, torch.Tensor) and before.numel() and before.data_ptr() != now.data_ptr():
                before.copy_(now)
