"""Record the ATen operators of one optimizer step on flat tensors, and the numbers that the step gives them."""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import torch

from zerofx.errors import OptimizerError
from zerofx.optimizers.blame import blame, not_elementwise
from zerofx.optimizers.elementwise import (
    elementwise_obstacle,
    fill_value,
    functional,
    is_creation,
    is_filled_with_argument,
)
from zerofx.torch_private.operators import OpOverload, base_name, pytree, schema_of

# Keywords that say where or how memory is laid out; a flat shard has one answer to them all.
_PLACEMENT_KEYWORDS: Final = frozenset({"memory_format", "layout", "device", "pin_memory", "non_blocking"})


@dataclass(frozen=True)
class Ref:
    """A tensor value in the recorded update: an input by its name, or the result of an operator ("%3")."""

    name: str


@dataclass(frozen=True)
class Heard:
    """The ``index``-th number that the step gives to operators, as the argument ``use``."""

    index: int
    use: str


@dataclass(frozen=True)
class OpRecord:
    """One operator on flat tensors; arguments are ``Ref``, ``Heard``, constants, or tuples of these."""

    op: OpOverload[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    out: Ref


@dataclass
class KnownStorage:
    """Facts about one storage: a flat tensor (``ref``), or a number on the host (None).

    ``made_by`` is the index of the record that made the storage. The tensor is held so that its address stays its own.
    """

    tensor: torch.Tensor
    ref: Ref | None = None
    made_by: int | None = None


class Recorder:
    """The operators of one step on flat tensors of ``numel`` elements, and its numbers; what is on the host just runs.

    In ``fused`` steps 0-dim tensors are states that the kernel reads, and as flat as the others.
    """

    def __init__(self, optimizer: str, numel: int, *, fused: bool) -> None:
        self.optimizer = optimizer
        self.numel = numel
        self.fused = fused
        self.records: list[OpRecord] = []
        self.numbers: list[int | float] = []
        self.uses: list[str] = []
        self.paused = False
        self._cells: dict[int, KnownStorage] = {}

    def bind(self, tensor: torch.Tensor, ref: Ref | None = None) -> None:
        """Make ``tensor`` an input of the update, or a number on the host."""
        self._cells[tensor.untyped_storage().data_ptr()] = KnownStorage(tensor, ref)

    def bind_numbers(self, value: Any) -> None:
        """Let the step compute with the tensors of one element in ``value``, which are copies."""
        if isinstance(value, torch.Tensor):
            if value.numel() == 1 and not value.requires_grad:
                self.bind(value)
        elif isinstance(value, (dict, list, tuple, deque)):
            for item in value.values() if isinstance(value, dict) else value:
                self.bind_numbers(item)

    def cell(self, tensor: torch.Tensor) -> KnownStorage:
        """The facts about ``tensor``; an error if it came from outside the update."""
        cell = self._cells.get(tensor.untyped_storage().data_ptr())
        if cell is None:
            raise self.refuse(
                f"uses a tensor of shape {tuple(tensor.shape)} that is neither parameter, gradient, state nor made "
                "from them: keep it in optimizer.state[p]"
            )
        return cell

    def is_flat(self, value: Any) -> bool:
        """True if ``value`` is one of the update's tensors, and no number."""
        cell = self._cells.get(value.untyped_storage().data_ptr()) if isinstance(value, torch.Tensor) else None
        return cell is not None and cell.ref is not None

    def refuse(self, reason: str) -> OptimizerError:
        """The error for an update that cannot run on flat shards, with the source line to blame."""
        return not_elementwise(self.optimizer, f"{reason}{blame()}")

    def make_scalar(self, func: Any, value: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """``torch.tensor(value)`` and its like, for one number."""
        self.paused = True
        tensor: torch.Tensor = func(value, **kwargs)
        self.paused = False
        if tensor.numel() != 1:
            raise self.refuse(f"makes a tensor of shape {tuple(tensor.shape)} from numbers")
        self.bind(tensor)
        return tensor

    def dispatch(self, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator and record it."""
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if self.paused or (not tensors and op.namespace != "aten"):
            return op(*args, **kwargs)
        if is_creation(op):
            return self._create(op, args, op(*args, **kwargs))
        cells = [self.cell(tensor) for tensor in tensors]
        if all(cell.ref is None for cell in cells):
            return self._check_host_result(op, op(*args, **kwargs))
        if _is_view(op):
            return self._view(op, tensors[0], op(*args, **kwargs))
        reason = elementwise_obstacle(op, fused=self.fused)
        if reason is not None:
            raise self.refuse(f"calls {op}, which {reason}")
        return self._record_on_shard(op, args, kwargs, cells)

    def _create(self, op: OpOverload[..., Any], args: tuple[Any, ...], result: torch.Tensor) -> torch.Tensor:
        if result.numel() == 1 and not (self.fused and result.dim() == 0):
            self.bind(result)
            return result
        if result.numel() != self.numel and result.dim() > 0:
            raise self.refuse(f"makes a tensor of shape {tuple(result.shape)}, unlike the parameter's")
        value = fill_value(op, args)
        if is_filled_with_argument(op):
            value = self._hear(value, "full_like.fill_value")
        like = torch.ops.aten.empty_like.default if value is None else torch.ops.aten.full_like.default
        fill = () if value is None else (value,)
        self._append(like, (Ref("param"), *fill), {"dtype": result.dtype}, result)
        return result

    def _view(self, op: OpOverload[..., Any], base: torch.Tensor, result: Any) -> Any:
        if not isinstance(result, torch.Tensor) or result.numel() != base.numel() or not result.is_contiguous():
            raise self.refuse(f"calls {op}, which takes a tensor apart or turns it")
        return result

    def _check_host_result(self, op: OpOverload[..., Any], result: Any) -> Any:
        if torch.Tag.nondeterministic_seeded in op.tags:
            raise self.refuse(f"calls {op}, which draws random numbers")
        if isinstance(result, torch.Tensor) and result.numel() == 1:
            if result.untyped_storage().data_ptr() not in self._cells:
                self.bind(result)
        elif isinstance(result, torch.Tensor):
            raise self.refuse(
                f"calls {op}, which makes a tensor of shape {tuple(result.shape)}, unlike the parameter's"
            )
        return result  # a number, or a truth value such as that of torch.equal

    def _record_on_shard(
        self, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], cells: list[KnownStorage]
    ) -> Any:
        """Record an elementwise operator on flat tensors; 0-dim host tensors become scalar inputs."""
        kwargs = {key: x for key, x in kwargs.items() if key not in _PLACEMENT_KEYWORDS}
        if any(cell.tensor.numel() != self.numel for cell in cells if cell.ref is not None) and not self.fused:
            raise self.refuse(f"calls {op} on tensors of different shapes")
        out = kwargs.pop("out", None)
        run = functional(op) if out is not None else op
        if any(cell.ref is None for cell in cells):
            run, args = self._pass_numbers(run, args)
        result = run(*args, **kwargs)
        if self.fused and result is None:
            return self._record(run, args, kwargs, None)
        if not isinstance(result, torch.Tensor) or (result.numel() != self.numel and not self.fused):
            raise self.refuse(f"calls {op}, whose result is not shaped like the parameter")
        self._record(run, args, kwargs, result)
        if out is None:
            return result
        self._record(torch.ops.aten.copy_.default, (out, result), {}, out.copy_(result))
        return out

    def _pass_numbers(
        self, op: OpOverload[..., Any], args: tuple[Any, ...]
    ) -> tuple[OpOverload[..., Any], tuple[Any, ...]]:
        """The overload and arguments that take numbers where ``args`` have 0-dim host tensors."""
        on_host = [isinstance(x, torch.Tensor) and self.cell(x).ref is None for x in args]
        numbers = tuple(self.item(x) if host else x for x, host in zip(args, on_host, strict=True))
        name = base_name(op)
        if name == "copy_":
            return torch.ops.aten.fill_.Scalar, numbers
        if name == "where":
            overload = {(True, False): "ScalarSelf", (False, True): "ScalarOther"}.get(
                (on_host[1], on_host[2]), "Scalar"
            )
            return getattr(torch.ops.aten.where, overload), numbers
        if name in ("add", "mul") and on_host[0]:
            numbers = (numbers[1], numbers[0], *numbers[2:])
        for overload in (schema_of(op).overload_name or "default", "Scalar", "Tensor_Scalar"):
            candidate: OpOverload[..., Any] | None = getattr(op.overloadpacket, overload, None)
            if candidate is None:
                continue
            try:
                candidate(*(x.clone() if isinstance(x, torch.Tensor) else x for x in numbers))
            except (RuntimeError, TypeError):
                continue
            return candidate, numbers
        return op, tuple(self._spread(x, args) if host else x for x, host in zip(args, on_host, strict=True))

    def _spread(self, scalar: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
        """A flat tensor filled with a 0-dim host tensor, for operators that take no number in its place."""
        flat = next(x for x in args if isinstance(x, torch.Tensor) and self.cell(x).ref is not None)
        number = self.item(scalar)
        filled = torch.full_like(flat, number, dtype=flat.dtype if flat.is_floating_point() else scalar.dtype)
        arguments = (flat, self._hear(number, "full_like.fill_value"))
        self._append(torch.ops.aten.full_like.default, arguments, {"dtype": filled.dtype}, filled)
        return filled

    def item(self, tensor: torch.Tensor) -> int | float:
        """The number in a tensor, unrecorded."""
        self.paused = True
        number: int | float = tensor.detach().item()
        self.paused = False
        return number

    def _record(
        self, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor | None
    ) -> None:
        # Numbers for tensors of integers decide the dtype of what comes out; exponents which kernel runs. What counts
        # steps for a fused kernel is that kernel's own.
        flats = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
        counts = self.fused and all(x.dim() == 0 for x in flats)
        if not is_creation(op) and not counts and all(x.is_floating_point() for x in flats):
            name, arguments = base_name(op), schema_of(op).arguments
            use = {a.name: f"{name}.{a.name}" for a in arguments if _is_number(op, str(a.type))}
            args = tuple(
                self._hear(x, use[a.name]) if a.name in use else x for x, a in zip(args, arguments, strict=False)
            )
            kwargs = {key: self._hear(x, use[key]) if key in use else x for key, x in kwargs.items()}
        self._append(op, args, kwargs, result)

    def _hear(self, value: Any, use: str) -> Any:
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return value
        self.numbers.append(value)
        self.uses.append(use)
        return Heard(len(self.numbers) - 1, use)

    def _append(
        self, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor | None
    ) -> None:
        keywords = tuple((key, self._symbol(x)) for key, x in kwargs.items())
        out = Ref(f"%{len(self.records)}")
        record = OpRecord(op, self._symbol(args), keywords, out)
        if result is not None:
            address = result.untyped_storage().data_ptr()
            if address in self._cells:
                self._cells[address].ref = out
            else:
                self._cells[address] = KnownStorage(result, out, len(self.records))
        self.records.append(record)

    def _symbol(self, value: Any) -> Any:
        """``value`` as it is recorded."""
        if isinstance(value, (list, tuple)):
            return tuple(map(self._symbol, value))
        if isinstance(value, torch.Tensor):
            ref = self.cell(value).ref
            return self._hear(self.item(value), "number") if ref is None else ref
        return value


@functools.cache
def _is_number(op: OpOverload[..., Any], kind: str) -> bool:
    """True for arguments of a type that the operator computes with as numbers; exponents are none."""
    return kind.removeprefix("Optional[").rstrip("]") in ("number", "float", "Tensor") and not base_name(op).startswith(
        "pow"
    )


def _is_view(op: OpOverload[..., Any]) -> bool:
    returns = schema_of(op).returns
    return not schema_of(op).is_mutable and bool(returns) and returns[0].alias_info is not None
