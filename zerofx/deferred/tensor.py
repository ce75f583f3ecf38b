"""Deferred tensors have everything but memory. Every operation on one becomes a part of its recipe."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zerofx.deferred.recipe import Cell, Constant, Value, fills_first_argument, note, replay
from zerofx.errors import UsageError
from zerofx.ir.op_kernels.own_draws import generator_of
from zerofx.ir.tensor_parts import HELD_CLASS, class_of, is_record
from zerofx.torch_private.dispatch import TorchDispatchMode, class_being_made
from zerofx.torch_private.operators import pytree, schema_of
from zerofx.torch_private.tensors import IS_PARAMETER, make_wrapper, memory_of, version_of, without_torch_function

_aten = torch.ops.aten
_OWN = ("_value", IS_PARAMETER)  # attributes that make a deferred parameter one


class DeferredTensor(torch.Tensor):
    """A tensor with a recipe instead of values: it has shape, strides, dtype and device, and takes no memory.

    Operations on it, in place or not, inside ``empty_init`` or after it, are added to the recipe. Operations that need
    its values (``item()``, ``if w.max() > 1``) get them: they are made, and dropped again.
    """

    _value: Value

    @staticmethod
    def __new__(cls, value: Value) -> DeferredTensor:
        shadow = value.shadow
        wrapper: DeferredTensor = make_wrapper(
            cls,
            shadow.shape,
            strides=shadow.stride(),
            storage_offset=shadow.storage_offset(),
            dtype=shadow.dtype,
            layout=shadow.layout,
            device=value.device,
        )
        wrapper._value = value
        return wrapper

    __torch_function__ = without_torch_function  # type: ignore[assignment]  # no method, by its type

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types a default that does nothing
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = {leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        deferred = {tensor for tensor in tensors if isinstance(tensor, DeferredTensor)}
        reads_alone = deferred.isdisjoint(_tensors_written(func, args, kwargs))
        if reads_alone and tensors > deferred and all(tensor.recipe.cell.is_constant for tensor in deferred):
            # A table that a library keeps, made inside, which computes with what is real.
            args, kwargs = pytree.tree_map_only(DeferredTensor, DeferredTensor.materialise, (args, kwargs))
            return func(*args, **kwargs)
        result = _perform(func, args, kwargs, _Scratch())
        kind = class_being_made(inspect.currentframe()) if func is _aten.detach.default else None
        return result if kind is None or issubclass(kind, DeferredTensor) else _deferred_class(kind)(result.recipe)

    @property
    def recipe(self) -> Value:
        """The recipe of this tensor."""
        return self._value

    def materialise(self) -> torch.Tensor:
        """A real tensor with the values of this one, made again at each call."""
        return replay(self._value)

    @property
    def data(self) -> torch.Tensor:
        """The same as ``torch.Tensor.data``. A deferred parameter that is given real data becomes a real parameter."""
        data: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]  # typed as its value
        return data

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        if isinstance(new, DeferredTensor):
            torch.Tensor.data.__set__(self, new)  # type: ignore[attr-defined]  # typed as its value
            self._value = new._value
        else:
            replace_parameter(self, new)

    def tolist(self) -> Any:
        """The values as Python numbers, which exist for the time of the call."""
        return self.materialise().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Refuse: an array would share memory that does not exist.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "expected a deferred tensor to stay in torch, found numpy() called on it: it shares no memory with "
            "anybody; use tolist(), or build this part of the model outside empty_init()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied: Any = self.detach().clone()
        if (kind := class_of(self)) is not DeferredTensor:
            copied = _deferred_class(kind)(copied.recipe)
        elif isinstance(self, nn.Parameter):
            copied = nn.Parameter(copied, requires_grad=self.requires_grad)
        memo[id(self)] = copied
        for name, attribute in self.__dict__.items():
            if name not in copied.__dict__:
                owned = isinstance(attribute, torch.Tensor) or is_record(name, attribute)
                copied.__dict__[name] = copy.deepcopy(attribute, memo) if owned else attribute
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "expected a model whose parameters have values to be saved or pickled, found that they are deferred by "
            "empty_init(): use step.full_state_dict() once the first step has been prepared"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch leaves it untyped
        kind = "deferred parameter" if isinstance(self, nn.Parameter) else "deferred tensor"
        return f"<{kind} of shape {list(self.shape)}, {self.dtype}, on {self.device}>"


def defer(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, kind: type = DeferredTensor
) -> DeferredTensor:
    """A deferred tensor without values, which will be of class ``kind`` once it is given them."""
    kind = DeferredTensor if kind is DeferredTensor else _deferred_class(kind)
    return kind(Value(torch.empty(tuple(shape), dtype=dtype, device="meta"), Cell(), device))


@functools.cache
def _deferred_class(kind: type) -> type[DeferredTensor]:
    """The class of deferred tensors that stand for some of class ``kind``."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, HELD_CLASS: kind}
    deferred: type[DeferredTensor] = type(kind)(kind.__name__, (DeferredTensor, kind), names)
    return deferred


def replace_parameter(parameter: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Turn a parameter, or a part of one, into one with ``data``, real or deferred: all references to it then refer to
    the new one.

    Returns what the old one was.
    """
    kind, other = class_of(parameter), data.detach()
    if kind not in (DeferredTensor, nn.Parameter) and not isinstance(data, DeferredTensor):
        other = torch.Tensor.as_subclass(other, kind)
    elif isinstance(parameter, nn.Parameter):
        other = nn.Parameter(data, requires_grad=parameter.requires_grad)
    other.__dict__.update({name: attribute for name, attribute in parameter.__dict__.items() if name not in _OWN})
    torch.utils.swap_tensors(parameter, other)
    return other


class _Scratch:
    """Memory for numbers that are drawn and dropped, reused from one tensor to the next.

    Freed blocks of many sizes, with recorded objects between them, would stay with the process.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8, device="cpu")

    def allocate(self, shadow: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A tensor with the shape and strides of ``shadow``, with arbitrary values."""
        if device.type != "cpu":
            return torch.empty_strided(shadow.shape, shadow.stride(), dtype=shadow.dtype, device=device)
        numel = 1 + sum((n - 1) * step for n, step in zip(shadow.shape, shadow.stride(), strict=True))
        num_bytes = max(0, numel) * shadow.itemsize
        if self._block.numel() < num_bytes:
            self._block = torch.empty(0, dtype=torch.uint8, device="cpu")  # the smaller one goes first
            self._block = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return self._block[:num_bytes].view(shadow.dtype).as_strided(shadow.shape, shadow.stride())


class DeferringMode(TorchDispatchMode):
    """While on, new tensors are deferred, except those on ``meta``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._scratch = _Scratch()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func is _aten.lift_fresh.default and type(args[0]) is torch.Tensor and not args[0].is_meta:
            return hold(func(*args))
        makes = not tensors and any(isinstance(entry.type, torch.TensorType) for entry in schema_of(func).returns)
        on_meta = torch.device(kwargs.get("device") or "cpu").type == "meta"
        if any(isinstance(tensor, DeferredTensor) for tensor in tensors) or (makes and not on_meta):
            return _perform(func, args, kwargs, self._scratch)
        return func(*args, **kwargs)


def hold(real: torch.Tensor) -> DeferredTensor:
    """A deferred tensor with the values of ``real``, which nobody else may change."""
    shadow = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
    value = Value(shadow, Cell(), real.device)
    note(_aten.clone.default, (Constant(real, version_of(real)),), {}, [value], [], None)
    return DeferredTensor(value)


def _perform(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], scratch: _Scratch) -> Any:
    """Run an operation on deferred tensors: on their shadows at once, on their values when they are needed."""
    written_tensors = _tensors_written(function, args, kwargs)
    for tensor in written_tensors:
        if not isinstance(tensor, DeferredTensor):
            raise UsageError(
                f"expected only deferred tensors to be given values from deferred ones, found {function} into a real "
                f"tensor of shape {list(tensor.shape)}: make that tensor inside empty_init() too"
            )
    wrappers: dict[Value, DeferredTensor] = {}

    def unwrap(leaf: Any) -> Any:
        if isinstance(leaf, DeferredTensor):
            wrappers[leaf._value] = leaf
            return leaf._value
        return Constant(leaf, version_of(leaf)) if isinstance(leaf, torch.Tensor) else leaf

    noted_args, noted_kwargs = pytree.tree_map(unwrap, (args, kwargs))
    device = _device_of(function, noted_args, noted_kwargs)
    if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(function.tags):
        return _evaluate(function, noted_args, noted_kwargs)
    random_state = _draw(function, noted_args, noted_kwargs, device, scratch)
    by_shadow = {id(value.shadow): value for value in wrappers}
    before = {value: (value.shadow.shape, value.shadow.stride()) for value in wrappers}
    try:
        result = function(*_to_meta(noted_args), **_to_meta(_drop_generator(noted_kwargs)))
    except NotImplementedError:
        if written_tensors or random_state is not None:
            raise
        return _evaluate(function, noted_args, noted_kwargs)
    if any((value.shadow.shape, value.shadow.stride()) != old for value, old in before.items()):
        raise UsageError(
            f"expected a deferred tensor to keep its shape and strides, found {function} changing them in place: use "
            f"the form that returns a tensor"
        )
    cells = {memory_of(value.shadow): value.cell for value in wrappers}
    outputs: list[Value] = []

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        value = by_shadow.get(id(leaf))
        if value is None:
            cell = cells.setdefault(memory_of(leaf), Cell())
            value = Value(leaf, cell, device)
            wrappers[value] = DeferredTensor(value)
        outputs.append(value)
        return wrappers[value]

    wrapped = pytree.tree_map(wrap, result)
    written = [tensor._value for tensor in written_tensors if isinstance(tensor, DeferredTensor)]
    note(function, noted_args, noted_kwargs, outputs, written, random_state)
    return wrapped


def _tensors_written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation changes in place."""
    schema = schema_of(function).arguments
    given = dict(zip((element.name for element in schema), args, strict=False)) | kwargs
    changed = [given.get(entry.name) for entry in schema if entry.alias_info is not None and entry.alias_info.is_write]
    return [leaf for leaf in pytree.tree_leaves(changed) if isinstance(leaf, torch.Tensor)]


def _resolve_device(device: torch.device) -> torch.device:
    """A device as real tensors name it: ``"cuda"`` is the current one."""
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _device_of(function: Any, args: Any, kwargs: Any) -> torch.device:
    """The device of an operation's result: the requested one, or that of its first tensor with dimensions."""
    if kwargs.get("device") is not None:
        return _resolve_device(torch.device(kwargs["device"]))
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Value | Constant)]
    ranked = sorted(tensors, key=lambda value: not (value.shadow if isinstance(value, Value) else value.tensor).dim())
    for value in ranked:
        return value.device if isinstance(value, Value) else value.tensor.device
    return torch.device("cpu")


def _to_meta(tree: Any) -> Any:
    """Replace tensors by shadows, and any device by meta."""

    def shadow(leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return leaf.shadow
        if isinstance(leaf, Constant):
            tensor = leaf.tensor
            # A number in a tensor is a number to torch's promotion rules wherever it is.
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    mapped = pytree.tree_map(shadow, tree)
    if isinstance(mapped, dict) and "device" in mapped:
        mapped["device"] = torch.device("meta")
    return mapped


def _drop_generator(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {
        name: None if name == "generator" else argument for name, argument in kwargs.items() if name != "pin_memory"
    }


def _draw(function: Any, args: Any, kwargs: Any, device: torch.device, scratch: _Scratch) -> torch.Tensor | None:
    """Draw the random numbers of an operation and drop them: generators advance as if the tensor existed.

    Returns the state of the generator before, or None for an operation that draws none.
    """
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return None
    generator = kwargs.get("generator") or generator_of(device)
    state: torch.Tensor = generator.get_state()
    first = [scratch.allocate(args[0].shadow, device)] if fills_first_argument(function) else []
    rest, kwargs = _real((args[len(first) :], kwargs))
    with torch.no_grad():
        function(*first, *rest, **kwargs)
    return state


def _evaluate(function: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation that needs values on real tensors, at once; its resulting tensors are held."""
    real_args, real_kwargs = _real((args, kwargs))
    with torch.no_grad():
        result = function(*real_args, **real_kwargs)
    return pytree.tree_map(lambda leaf: hold(leaf) if isinstance(leaf, torch.Tensor) else leaf, result)


def _real(tree: Any) -> Any:
    def real(leaf: Any) -> Any:
        if isinstance(leaf, Constant):
            return leaf.tensor
        return replay(leaf) if isinstance(leaf, Value) else leaf

    return pytree.tree_map(real, tree)
