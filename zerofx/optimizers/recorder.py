"""Record the ATen operators and host scalars of one optimizer step while it runs on tiny real tensors.

Calls into torch come with tracked scalars, which are swapped for sentinels: finite doubles that occur nowhere else and
pass through the C++ of PyTorch unchanged. Among the arguments of the ATen operators that a call becomes, the sentinels
are recognised again, recorded as expressions, and replaced by present values to compute with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from zerofx.errors import OptimizerError
from zerofx.optimizers.blame import blame, not_elementwise, optimizer_frame
from zerofx.optimizers.elementwise import (
    fill_value,
    functional,
    in_place_target,
    is_creation,
    why_not_elementwise,
)
from zerofx.optimizers.scalars import (
    EXPR_TYPES,
    Cast,
    Expr,
    GuardTape,
    ItemOf,
    MakeTensor,
    PythonCall,
    StateScalar,
    TensorCall,
    TrackedScalar,
    is_constant,
    lost_scalar,
)
from zerofx.torch_private.operators import OpOverload, base_name, pytree, schema_of

# Keywords that say where or how memory is laid out; a flat shard has one answer to them all.
_PLACEMENT_KEYWORDS: Final = frozenset({"memory_format", "layout", "device", "pin_memory", "non_blocking"})
_FIRST_SENTINEL: Final = 0.6180339887498949
_SENTINEL_SPACING: Final = 2.0**-33


@dataclass(frozen=True)
class Ref:
    """A tensor value in the recorded update: an input by its name, or the result of an operator ("%3")."""

    name: str


@dataclass(frozen=True)
class OpRecord:
    """One operator on flat tensors; arguments are ``Ref``, scalar expressions, constants, or lists of these."""

    op: OpOverload[..., Any]
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    out: Ref


@dataclass
class KnownStorage:
    """What is known of one storage: a flat tensor (``ref``) or a 0-dim tensor on the host (``expr``).

    ``made_by`` is the index of the record that made the storage. The tensor is held so that its address stays its own.
    """

    tensor: torch.Tensor
    ref: Ref | None = None
    expr: Expr | None = None
    made_by: int | None = None


class UpdateRecorder:
    """The records of one traced step. ``numel`` is the length of the parameter that stands for the flat shard."""

    def __init__(self, optimizer: str, numel: int, tape: GuardTape, *, fused: bool) -> None:
        self.optimizer = optimizer
        self.numel = numel
        self.tape = tape
        self.fused = fused
        self.records: list[OpRecord] = []
        self.initial_scalars: dict[str, tuple[torch.dtype | None, float]] = {}
        self.known_states: set[str] = set()
        self.names: dict[Expr, str] = {}
        self._cells: dict[int, KnownStorage] = {}
        self._sentinels: dict[float, TrackedScalar] = {}
        self._arrived: set[float] = set()
        self.paused = False

    def bind(self, tensor: torch.Tensor, *, ref: Ref | None = None, expr: Expr | None = None) -> None:
        """Make ``tensor`` an input of the update."""
        self._cells[tensor.untyped_storage().data_ptr()] = KnownStorage(tensor, ref, expr)

    def cell(self, tensor: torch.Tensor) -> KnownStorage:
        """What is known of ``tensor``; an error if it came from outside the update."""
        cell = self._cells.get(tensor.untyped_storage().data_ptr())
        if cell is None:
            raise self.refuse(
                f"uses a tensor of shape {tuple(tensor.shape)} that is neither parameter, gradient, state nor made "
                "from them: keep it in optimizer.state[p]"
            )
        return cell

    def refuse(self, reason: str) -> OptimizerError:
        """The error for an update that cannot run on flat shards, with the source line to blame."""
        return not_elementwise(self.optimizer, f"{reason}{blame()}")

    def adopt_state(self, name: str, value: Any) -> Any:
        """What to store for ``state[name] = value``: a constant scalar becomes state that the program starts from."""
        if name in self.known_states:
            return value
        self.known_states.add(name)
        if isinstance(value, (int, float)) and not isinstance(value, (bool, TrackedScalar)):
            self.initial_scalars[name] = (None, value)
            return TrackedScalar(StateScalar(name, is_tensor=False), value, self.tape)
        if isinstance(value, torch.Tensor):
            cell = self._cells.get(value.untyped_storage().data_ptr())
            if cell is not None and cell.expr is not None and is_constant(cell.expr):
                self.initial_scalars[name] = (value.dtype, self.plain_item(value))
                cell.expr = StateScalar(name, is_tensor=True)
        return value

    def note_names(self) -> None:
        """Remember what the optimizer's code calls its scalars, for the sake of the people who read the program."""
        frame = optimizer_frame()
        for name, value in frame.f_locals.items() if frame is not None else ():
            if isinstance(value, TrackedScalar):
                self.names.setdefault(value.expr, name)

    # Scalars on their way through the C++ of PyTorch.

    def sentinel(self, scalar: TrackedScalar) -> float:
        """The plain float that stands for ``scalar`` until it arrives at an operator."""
        for number, known in self._sentinels.items():
            if known.expr == scalar.expr:
                return number
        number = _FIRST_SENTINEL + len(self._sentinels) * _SENTINEL_SPACING
        self._sentinels[number] = scalar
        return number

    def swap(self, value: Any, used: set[float]) -> Any:
        """``value`` with tracked scalars replaced by sentinels, which are added to ``used``."""
        if isinstance(value, TrackedScalar):
            used.add(self.sentinel(value))
            return self.sentinel(value)
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return type(value)(self.swap(x, used) for x in value)
        return value

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``func`` with sentinels in place of tracked scalars, and check that each arrives at an operator."""
        used: set[float] = set()
        args, kwargs = self.swap(args, used), {key: self.swap(x, used) for key, x in kwargs.items()}
        self._arrived.clear()
        result = func(*args, **kwargs)
        if lost := used - self._arrived:
            name = getattr(func, "__name__", str(func))
            raise lost_scalar(self._sentinels[lost.pop()].expr, f"torch's {name}()")
        return self._sentinels.get(result, result) if type(result) is float else result

    def _plain(self, value: Any) -> Any:
        """``value`` as the operator computes with it: the present value of a sentinel."""
        if isinstance(value, (list, tuple)):
            return [self._plain(x) for x in value]
        if type(value) is not float:
            return value
        if value != value:
            raise lost_scalar(None, "a function of math or numpy")
        if value in self._sentinels:
            self._arrived.add(value)
            return self._sentinels[value].value
        return value

    def _symbol(self, value: Any, *, on_host: bool) -> Any:
        """``value`` as it is recorded: a ``Ref``, an expression, or itself."""
        if isinstance(value, (list, tuple)):
            return tuple(self._symbol(x, on_host=on_host) for x in value)
        if isinstance(value, torch.Tensor):
            cell = self.cell(value)
            if cell.ref is not None:
                return cell.ref
            assert cell.expr is not None
            return cell.expr if on_host else ItemOf(cell.expr)
        if type(value) is float and value in self._sentinels:
            return self._sentinels[value].expr
        return value

    # Calls that are more than their operators.

    def make_scalar(self, func: Any, value: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """``torch.tensor(value)`` and its like, for one number."""
        if not isinstance(value, (int, float)):
            raise self.refuse(f"makes a tensor from {type(value).__name__}")
        tracked = value if isinstance(value, TrackedScalar) else None
        self.paused = True
        tensor: torch.Tensor = func(value if tracked is None else tracked.value, **kwargs)
        self.paused = False
        self.bind(tensor, expr=MakeTensor(value if tracked is None else tracked.expr, tensor.dtype))
        return tensor

    def truth(self, tensor: torch.Tensor) -> bool:
        """``bool(tensor)`` of a 0-dim host tensor, as a guard."""
        cell = self.cell(tensor)
        if cell.expr is None:
            raise self.refuse("branches on the values of a whole tensor")
        outcome = self.plain_item(tensor) != 0
        return self.tape.decide(PythonCall("ne", (ItemOf(cell.expr), 0)), outcome)

    def plain_item(self, tensor: torch.Tensor) -> int | float:
        """The present value of a 0-dim tensor, unrecorded."""
        self.paused = True
        number: int | float = tensor.detach().item()
        self.paused = False
        return number

    # Operators.

    def dispatch(self, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operator with present values and record it."""
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if self.paused or (not tensors and op.namespace != "aten"):
            return op(*args, **kwargs)
        plain_args, plain_kwargs = self._plain(args), {key: self._plain(x) for key, x in kwargs.items()}
        if is_creation(op):
            return self._create(op, args, op(*plain_args, **plain_kwargs))
        cells = [self.cell(tensor) for tensor in tensors]
        if base_name(op) == "_local_scalar_dense" and cells[0].expr is not None:
            return self._read_item(op, tensors[0])
        if all(cell.expr is not None for cell in cells):
            return self._on_host(op, args, kwargs, op(*plain_args, **plain_kwargs))
        if _is_view(op):
            return self._view(op, tensors[0], op(*plain_args, **plain_kwargs))
        reason = why_not_elementwise(op, fused=self.fused)
        if reason is not None:
            raise self.refuse(f"calls {op}, which {reason}")
        return self._on_shard(op, args, kwargs, cells)

    def _read_item(self, op: OpOverload[..., Any], tensor: torch.Tensor) -> Any:
        expr = self.cell(tensor).expr
        assert expr is not None
        number = self.sentinel(TrackedScalar(ItemOf(expr), op(tensor), self.tape))
        self._arrived.add(number)
        return number

    def _fill_symbol(self, op: OpOverload[..., Any], args: tuple[Any, ...]) -> Any:
        """What a creation operator fills with, as it is recorded."""
        return self._symbol(fill_value(op, args), on_host=True)

    def _create(self, op: OpOverload[..., Any], args: tuple[Any, ...], result: torch.Tensor) -> torch.Tensor:
        value = self._fill_symbol(op, args)
        if result.dim() == 0 and not self.fused:
            self.bind(result, expr=MakeTensor(0.0 if value is None else value, result.dtype))
        elif result.numel() == self.numel or result.dim() == 0:
            like = torch.ops.aten.empty_like.default if value is None else torch.ops.aten.full_like.default
            fill = () if value is None else (value,)
            self._record(like, (Ref("param"), *fill), {"dtype": result.dtype}, result)
        else:
            raise self.refuse(f"makes a tensor of shape {tuple(result.shape)}, unlike the parameter's")
        return result

    def _view(self, op: OpOverload[..., Any], base: torch.Tensor, result: Any) -> Any:
        if not isinstance(result, torch.Tensor) or result.numel() != base.numel() or not result.is_contiguous():
            raise self.refuse(f"calls {op}, which takes a tensor apart or turns it")
        return result

    def _on_host(
        self, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> torch.Tensor:
        """Record an operator on 0-dim host tensors as an expression, in functional form."""
        if not isinstance(result, torch.Tensor) or result.dim() != 0:
            raise self.refuse(f"calls {op} on a scalar of its state")
        target = in_place_target(op, args, kwargs)
        symbols = self._symbol(args, on_host=True)
        expr: Any
        if base_name(op) == "copy_":
            expr = symbols[1] if args[1].dtype == result.dtype else Cast(symbols[1], result.dtype)
        elif base_name(op) in ("fill_", "zero_"):
            value: Any = symbols[1] if len(symbols) > 1 else 0.0
            is_tensor = len(args) > 1 and isinstance(args[1], torch.Tensor)
            expr = Cast(value, result.dtype) if is_tensor else MakeTensor(value, result.dtype)
        elif base_name(op) in ("clone", "_to_copy", "lift_fresh", "detach", "alias"):
            expr = symbols[0] if args[0].dtype == result.dtype else Cast(symbols[0], result.dtype)
        else:
            keywords = {
                k: self._symbol(x, on_host=True)
                for k, x in kwargs.items()
                if k != "out" and k not in _PLACEMENT_KEYWORDS
            }
            expr = TensorCall(functional(op), symbols, tuple(keywords.items()))
            if target is not None and self._dtype_of(op, args, kwargs) != target.dtype:
                expr = Cast(expr, target.dtype)
        if target is not None:
            self.cell(target).expr = expr
        elif not _is_view(op) and result.untyped_storage().data_ptr() not in self._cells:
            self.bind(result, expr=expr)
        return result

    def _dtype_of(self, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
        keywords = {key: self._plain(x) for key, x in kwargs.items() if key != "out"}
        result: torch.Tensor = functional(op)(*self._plain(args), **keywords)
        return result.dtype

    def _on_shard(
        self, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], cells: list[KnownStorage]
    ) -> Any:
        """Record an elementwise operator on flat tensors; 0-dim host tensors become scalar inputs."""
        kwargs = {key: x for key, x in kwargs.items() if key not in _PLACEMENT_KEYWORDS}
        if any(cell.tensor.numel() != self.numel for cell in cells if cell.expr is None) and not self.fused:
            raise self.refuse(f"calls {op} on tensors of different shapes")
        out = kwargs.pop("out", None)
        run, run_args, run_kwargs = functional(op) if out is not None else op, args, kwargs
        if any(cell.expr is not None for cell in cells):
            run, run_args = self._scalars_for_tensors(run, args)
        result = run(*self._plain(run_args), **{key: self._plain(x) for key, x in run_kwargs.items()})
        if self.fused and result is None:
            return self._record(run, run_args, run_kwargs, None)
        if not isinstance(result, torch.Tensor) or (result.numel() != self.numel and not self.fused):
            raise self.refuse(f"calls {op}, whose result is not shaped like the parameter")
        self._record(run, run_args, run_kwargs, result)
        if out is None:
            return result
        self._record(torch.ops.aten.copy_.default, (out, result), {}, out.copy_(result))
        return out

    def _scalars_for_tensors(
        self, op: OpOverload[..., Any], args: tuple[Any, ...]
    ) -> tuple[OpOverload[..., Any], tuple[Any, ...]]:
        """The overload and arguments that take numbers where ``args`` have 0-dim host tensors."""
        on_host = [isinstance(x, torch.Tensor) and self.cell(x).expr is not None for x in args]
        numbers = tuple(self._item(x) if host else x for x, host in zip(args, on_host, strict=True))
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
                candidate(*(x.clone() if isinstance(x, torch.Tensor) else x for x in self._plain(numbers)))
            except (RuntimeError, TypeError):
                continue
            return candidate, numbers
        return op, tuple(self._spread(x, args) if host else x for x, host in zip(args, on_host, strict=True))

    def _spread(self, scalar: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
        """A flat tensor filled with a 0-dim host tensor, for operators that take no number in its place."""
        flat = next(x for x in args if isinstance(x, torch.Tensor) and self.cell(x).expr is None)
        dtype = flat.dtype if flat.is_floating_point() else scalar.dtype
        filled = torch.full_like(flat, scalar.item(), dtype=dtype)
        self._record(torch.ops.aten.full_like.default, (flat, self._item(scalar)), {"dtype": dtype}, filled)
        return filled

    def _item(self, tensor: torch.Tensor) -> float:
        """The sentinel of ``tensor.item()``."""
        expr = self.cell(tensor).expr
        assert expr is not None
        return self.sentinel(TrackedScalar(ItemOf(expr), tensor.item(), self.tape))

    def _record(
        self, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor | None
    ) -> None:
        keywords = tuple((key, self._symbol(x, on_host=False)) for key, x in kwargs.items())
        symbols = tuple(x if isinstance(x, (Ref, *EXPR_TYPES)) else self._symbol(x, on_host=False) for x in args)
        out = Ref(f"%{len(self.records)}")
        if result is not None:
            address = result.untyped_storage().data_ptr()
            if address in self._cells:
                self._cells[address].ref = out
            else:
                self._cells[address] = KnownStorage(result, ref=out, made_by=len(self.records))
        self.records.append(OpRecord(op, symbols, keywords, out))


def _is_view(op: OpOverload[..., Any]) -> bool:
    returns = schema_of(op).returns
    return not schema_of(op).is_mutable and bool(returns) and returns[0].alias_info is not None
