"""Run an optimizer's own step on tensors of a few elements that stand for a bucket, and record its operators.

The step's Python runs as it is, on copies of the groups and of the optimizer's attributes, with plain numbers: whatever
it computes with ``math`` or numpy, counts in a group or decides by a counter comes out as the operators that it calls
and the numbers that it gives them.
"""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from zerofx.errors import OptimizerError
from zerofx.optimizers.blame import does_not_step
from zerofx.optimizers.elementwise import fill_value, is_creation, is_filled_with_argument
from zerofx.optimizers.outside import OptimizerRest, attributes, entries_after, shadow_of
from zerofx.optimizers.recorder import OpRecord, Ref, UpdateRecorder
from zerofx.optimizers.scalars import GuardTape, Heard, MakeTensor
from zerofx.optimizers.shadow import keep_to_single_tensors, run_step, sample
from zerofx.optimizers.trace import DispatchRecorder, FlatState, FunctionMode
from zerofx.torch_private.operators import OpOverload, base_name, schema_of

_HOST: Final = MakeTensor(0.0, torch.float32)
_READS_MEMORY: Final = frozenset(
    {"numpy", "__array__", "tolist", "data_ptr", "untyped_storage", "storage", "__dlpack__"}
)


@dataclass(frozen=True)
class StandIn:
    """What the update of some buckets starts from: their group, dtype, flat states and the values of other states.

    ``has_gradient`` is False for what stands for a group of which nothing is trained.
    """

    group: int
    dtype: torch.dtype
    flat: tuple[tuple[str, torch.dtype], ...] = ()
    scalars: tuple[tuple[str, Any], ...] = ()
    has_gradient: bool = True

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for stand-ins that are updated alike."""
        return (self.group, self.dtype, self.flat, repr(self.scalars), self.has_gradient)


@dataclass(frozen=True)
class Skeleton:
    """What a step did, but for the numbers in it: its operators, and which values its flat states have after it."""

    records: tuple[OpRecord, ...]
    flat: tuple[tuple[str, FlatState], ...]


@dataclass(frozen=True)
class StandInOutcome:
    """A step on a stand-in: what it did, with which numbers, and the changes that it leaves."""

    skeleton: Skeleton
    numbers: tuple[int | float, ...]
    scalars: dict[str, Any]
    group: dict[str, Any]
    attributes: dict[str, Any]


class _Listener(UpdateRecorder):
    """Records operators on flat tensors with the numbers that come with them; what is on the host just runs."""

    def __init__(self, optimizer: str, numel: int) -> None:
        super().__init__(optimizer, numel, GuardTape(), fused=False)
        self.numbers: list[int | float] = []

    def hear(self, number: int | float) -> Heard:
        self.numbers.append(number)
        return Heard(len(self.numbers) - 1)

    def bind_numbers(self, value: Any) -> None:
        """Let the step compute with the tensors of one element in ``value``, which are copies."""
        if isinstance(value, torch.Tensor):
            if value.numel() == 1 and not value.requires_grad:
                self.bind(value, expr=_HOST)
        elif isinstance(value, (dict, list, tuple, deque)):
            for item in value.values() if isinstance(value, dict) else value:
                self.bind_numbers(item)

    def make_scalar(self, func: Any, value: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        self.paused = True
        tensor: torch.Tensor = func(value, **kwargs)
        self.paused = False
        if tensor.numel() != 1:
            raise self.refuse(f"makes a tensor of shape {tuple(tensor.shape)} from numbers")
        self.bind(tensor, expr=_HOST)
        return tensor

    def _plain(self, value: Any) -> Any:
        return value

    def _read_item(self, op: OpOverload[..., Any], tensor: torch.Tensor) -> Any:
        return op(tensor)

    def _item(self, tensor: torch.Tensor) -> Any:
        return self.plain_item(tensor)

    def _spread(self, scalar: torch.Tensor, args: tuple[Any, ...]) -> torch.Tensor:
        flat = next(x for x in args if isinstance(x, torch.Tensor) and self.cell(x).expr is None)
        number = self.plain_item(scalar)
        filled = torch.full_like(flat, number, dtype=flat.dtype if flat.is_floating_point() else scalar.dtype)
        super()._record(torch.ops.aten.full_like.default, (flat, self.hear(number)), {"dtype": filled.dtype}, filled)
        return filled

    def _create(self, op: OpOverload[..., Any], args: tuple[Any, ...], result: torch.Tensor) -> torch.Tensor:
        if result.numel() == 1:
            self.bind(result, expr=_HOST)
            return result
        return super()._create(op, args, result)

    def _fill_symbol(self, op: OpOverload[..., Any], args: tuple[Any, ...]) -> Any:
        value = fill_value(op, args)
        return self.hear(value) if is_filled_with_argument(op) else value

    def _on_host(
        self, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> torch.Tensor:
        if torch.Tag.nondeterministic_seeded in op.tags:
            raise self.refuse(f"calls {op}, which draws random numbers")
        if isinstance(result, torch.Tensor) and result.numel() == 1:
            if result.untyped_storage().data_ptr() not in self._cells:
                self.bind(result, expr=_HOST)
        elif isinstance(result, torch.Tensor):
            raise self.refuse(
                f"calls {op}, which makes a tensor of shape {tuple(result.shape)}, unlike the parameter's"
            )
        return result  # type: ignore[no-any-return]  # a truth value, such as that of torch.equal

    def _record(
        self, op: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor | None
    ) -> None:
        # Numbers for tensors of integers decide the dtype of what comes out; exponents which kernel runs.
        flats = [x for x in args if isinstance(x, torch.Tensor)]
        if not is_creation(op) and all(x.is_floating_point() for x in flats):
            positions, names = _numbers_of(op)
            args = tuple(self._heard(x) if i in positions else x for i, x in enumerate(args))
            kwargs = {key: self._heard(x) if key in names else x for key, x in kwargs.items()}
        super()._record(op, args, kwargs, result)

    def _heard(self, value: Any) -> Any:
        return self.hear(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


@functools.cache
def _numbers_of(op: OpOverload[..., Any]) -> tuple[frozenset[int], frozenset[str]]:
    """The positions and names of arguments that may be numbers to compute with; exponents are none."""
    scalars = [
        (index, argument.name)
        for index, argument in enumerate(schema_of(op).arguments)
        if str(argument.type).removeprefix("Optional[").rstrip("]") in ("number", "float", "Tensor")
        and not base_name(op).startswith("pow")
    ]
    return frozenset(index for index, _ in scalars), frozenset(name for _, name in scalars)


class _Functions(FunctionMode):
    """Refuses calls that read whole tensors in other ways than by operators."""

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS_MEMORY and self.recorder.cell(args[0]).expr is None:
            raise self.recorder.refuse(f"calls {name}() on a whole tensor, whose values are not those of the shard")
        return func(*args, **kwargs)


def run_on_stand_in(
    optimizer: torch.optim.Optimizer, state: OptimizerRest, stand_in: StandIn, shape: tuple[int, ...] = (7,)
) -> StandInOutcome:
    """One step of a shadow of ``optimizer`` that has one parameter, of ``shape``, in ``stand_in``'s group alone.

    Neither the optimizer nor ``state`` is changed.

    Raises:
        OptimizerError: the step does what cannot be done on a flat shard, or cannot be run.
    """
    name = type(optimizer).__name__
    listener = _Listener(name, torch.Size(shape).numel())
    param = sample(shape, stand_in.dtype, -1.0, 1.3).requires_grad_()
    listener.bind(param, ref=Ref("param"))
    if stand_in.has_gradient:
        param.grad = sample(shape, stand_in.dtype, 0.7, -0.9)
        listener.bind(param.grad, ref=Ref("grad"))
    alone = OptimizerRest((state.groups[stand_in.group],), state.attributes)
    shadow = shadow_of(optimizer, alone, [[param]])
    keep_to_single_tensors(shadow)
    before: dict[str, Any] = {}
    for key, dtype in stand_in.flat:
        before[key] = sample(shape, dtype, 0.1, 0.9)
        listener.bind(before[key], ref=Ref(key))
    before |= copied_scalars(dict(stand_in.scalars))
    listener.bind_numbers([before, shadow.param_groups, attributes(shadow)])
    if before:
        shadow.state[param] = before
    try:
        with _Functions(listener), DispatchRecorder(listener):
            run_step(shadow)
    except OptimizerError:
        raise
    except Exception as error:
        raise does_not_step(name, before, error) from error
    for owner, entries in shadow.state.items():
        if owner is not param and entries:
            raise listener.refuse("keeps state for something other than a parameter")
    flat, scalars = _states_after(listener, shadow.state.get(param, {}))
    after = entries_after(shadow.param_groups[0], alone.groups[0])
    skeleton = Skeleton(tuple(listener.records), tuple(flat.items()))
    return StandInOutcome(skeleton, tuple(listener.numbers), scalars, after, attributes(shadow))


def copied_scalars(scalars: Mapping[str, Any]) -> dict[str, Any]:
    """States that are no flat tensors, copied, on the host."""
    return {
        name: value.to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)
        for name, value in scalars.items()
    }


def _states_after(listener: _Listener, state: Mapping[str, Any]) -> tuple[dict[str, FlatState], dict[str, Any]]:
    flat: dict[str, FlatState] = {}
    scalars: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            if not _is_plain(value):
                raise listener.refuse(
                    f'keeps a {type(value).__name__} in state["{name}"], where a tensor or numbers were expected'
                )
            scalars[name] = value
            continue
        cell = listener.cell(value)
        if cell.ref is None:
            scalars[name] = value.detach()
        elif value.numel() != listener.numel:
            raise listener.refuse(f'keeps a tensor of shape {tuple(value.shape)} in state["{name}"]')
        else:
            flat[name] = FlatState(cell.ref, cell.made_by, value.dtype, is_scalar=False)
    return flat, scalars


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
