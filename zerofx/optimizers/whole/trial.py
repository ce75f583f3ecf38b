"""Try an optimizer's step on whole parameters: what it keeps and takes, and that it treats each parameter by itself."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry

from zerofx.errors import OptimizerError
from zerofx.ir.operators.elementwise import OPERATORS
from zerofx.ir.operators.table import facts_of
from zerofx.optimizers.blame import blame
from zerofx.optimizers.outside import OptimizerRest, plain_attributes, same
from zerofx.optimizers.program import StateTensor, WholeParameter
from zerofx.optimizers.shadow import choose_implementation, run_step, sample
from zerofx.optimizers.whole.combined import Combined, Share, check_apart, set_owner
from zerofx.optimizers.whole.states import join_tensors, kinds_in, paths_in_subclasses, split_tensors
from zerofx.torch_private.capture import fake_mode, is_fake
from zerofx.torch_private.dispatch import TorchDispatchMode
from zerofx.torch_private.operators import OpOverload, base_name, flop_count, pytree
from zerofx.torch_private.tensors import storage_key

# RAdam, of those that decide by a count, is the last to change its update: in the sixth step.
STEPS_AHEAD: Final = 12
_CPU: Final = torch.device("cpu")
# Matrices are tried with at most so many rows or columns.
_MOST_ROWS: Final = 12
# Numbers of heads, and sizes of these, have no other divisors; below the second, sizes stay as they are.
_DIVISORS: Final = 2**7 * 3 * 5 * 7
_DIVISORS_WHOLE: Final = 2**7
# Elements of a parameter that is tried with values, where it cannot be without.
_MOST_VALUES: Final = 1 << 26
_READS_VALUES: Final = frozenset({"_local_scalar_dense", "is_nonzero", "equal"})
# Of linear algebra, in operations per n^3 of an n x n matrix (Golub and Van Loan, Matrix Computations, 4th edition).
_PER_CUBE: Final[Mapping[str, int]] = {
    "linalg_eigh": 9, "_linalg_eigh": 9, "_linalg_svd": 21, "linalg_qr": 2, "linalg_cholesky_ex": 1,
    "linalg_inv_ex": 2, "linalg_solve_triangular": 1, "_linalg_solve_ex": 2, "cholesky_inverse": 1,
}  # fmt: skip


class _Costs(TorchDispatchMode):
    """Counts floating-point operations of a step, and bytes that are alive in it; without values, reads give one.

    Storages are known by weak references, which keep their addresses from being taken by others.
    """

    def __init__(self, name: str, *, has_values: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._name, self._has_values = name, has_values
        self.begin([], [])

    def begin(self, outside: Sequence[torch.Tensor], states: Sequence[torch.Tensor]) -> None:
        """Count a step that begins with ``states``; the memory of ``outside`` is left out."""
        self.flops: Counter[torch.dtype] = Counter()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._hold(outside, num_bytes=0)
        self._hold(states)
        self.before = self.peak = self._live()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _draws(self._name, f"calls {func}{blame()}")
        if base_name(func) in _READS_VALUES and not self._has_values:
            dtype = args[0].dtype
            return True if base_name(func) != "_local_scalar_dense" or dtype == torch.bool else _one(dtype)
        result = func(*args, **(kwargs or {}))
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        outputs = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        if outputs:
            self.flops[outputs[0].dtype] += _flops_of(func, args, kwargs or {}, result, inputs, outputs)
        self._hold(outputs)
        self.peak = max(self.peak, self._live())
        return result

    def _hold(self, tensors: Sequence[torch.Tensor], num_bytes: int | None = None) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = storage.nbytes() if num_bytes is None else num_bytes
            self._alive.setdefault(storage_key(tensor), (StorageWeakRef(storage), size))

    def _live(self) -> int:
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        return sum(num_bytes for _, num_bytes in self._alive.values())


@contextlib.contextmanager
def refuse_draws(name: str, device: torch.device) -> Iterator[None]:
    """Refuse random numbers: while it is open, the generators of the CPU and of ``device`` are not to be used.

    Raises:
        OptimizerError: some have been drawn.
    """
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    # As bytes, which are no tensors that a peak would count.
    before = [bytes(generator.get_state().numpy()) for generator in generators]
    yield
    if before != [bytes(generator.get_state().numpy()) for generator in generators]:
        raise _draws(name)


def _draws(name: str, call: str = "") -> OptimizerError:
    return OptimizerError(
        f"expected an optimizer whose step draws no random numbers, found that {name} {call or 'does'}: ranks that own "
        f"different parameters would draw others than one process does"
    )


def try_shape(
    rest: OptimizerRest, group: int, shape: tuple[int, ...], dtype: torch.dtype, entry: Any
) -> tuple[WholeParameter, dict[str, type[Any]]]:
    """Facts of the update of one parameter of ``shape``, found without values; ``entry``: the states it begins with.

    Also gives the tensor subclasses among the states, by name.

    Raises:
        OptimizerError: the step cannot be run, or keeps what can be neither saved nor moved.
    """
    try:
        with fake_mode():
            return _try_shape(rest, group, shape, dtype, entry, has_values=False)
    except OptimizerError:
        if torch.Size(shape).numel() > _MOST_VALUES:
            raise
    try:  # what it calls may depend on values, or not know tensors without
        return _try_shape(rest, group, shape, dtype, entry, has_values=True)
    except OptimizerError:
        # Where it compiles what it calls, no mode can be open.
        return _try_shape(rest, group, shape, dtype, entry, has_values=True, sees_calls=False)


def _try_shape(
    rest: OptimizerRest,
    group: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    entry: Any,
    *,
    has_values: bool,
    sees_calls: bool = True,
) -> tuple[WholeParameter, dict[str, type[Any]]]:
    costs, alone = _Costs(rest.kind.__name__, has_values=has_values), rest.select_group(group)
    states: dict[str, StateTensor] = {}
    kinds: dict[str, type[Any]] = {}
    # A step begins with a look at the generators (refuse_draws).
    flops, scratch = Counter[torch.dtype](), torch.default_generator.get_state().numel()
    param = torch.nn.Parameter(sample(shape, dtype, -1.0, 1.3))
    tree, tensors = split_tensors(entry)
    zeros = {path: torch.zeros_like(tensor, device="cpu") for path, tensor in tensors.items()}
    entry_now = join_tensors(tree, zeros)
    for _ in range(STEPS_AHEAD):
        shadow = make_shadow(alone, [param])
        if entry_now:
            shadow.state[param] = entry_now
        param.grad = torch.full_like(param, 0.01)
        costs.begin([param, param.grad], list(split_tensors(entry_now, all_tensors=True)[1].values()))
        try:
            with costs if sees_calls else refuse_draws(rest.kind.__name__, _CPU):
                run_step(shadow)
        except OptimizerError:
            raise
        except Exception as error:
            raise OptimizerError(
                f"expected {rest.kind.__name__}.step() to run on a parameter of shape {list(shape)}, found "
                f"{type(error).__name__}: {error}"
            ) from error
        flops, scratch = max(flops, costs.flops, key=Counter.total), max(scratch, costs.peak - costs.before)
        entry_now = shadow.state.get(param, {})
        tree, tensors = split_tensors(entry_now)
        kinds |= kinds_in(tree)
        inner = paths_in_subclasses(tree)
        states |= {path: _state_tensor(path, tensor, path in inner) for path, tensor in tensors.items()}
        alone = alone.after(shadow)
        del shadow
    flops_in = max(flops, key=flops.__getitem__, default=dtype)
    if not sees_calls:  # a compiled update is elementwise, by blocks
        flops[dtype] += OPERATORS["_fused_adam_"].per_element * param.numel()
    return WholeParameter(shape, tuple(states.values()), flops.total(), flops_in, scratch), kinds


def _state_tensor(path: str, tensor: torch.Tensor, in_subclass: bool) -> StateTensor:
    dense = tensor if tensor.numel() and _is_dense(tensor) else tensor.new_empty(tensor.shape)
    return StateTensor(path, tuple(tensor.shape), tuple(dense.stride()), tensor.dtype, in_subclass)


def _is_dense(tensor: torch.Tensor) -> bool:
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return elements == tensor.numel()


def make_shadow(alone: OptimizerRest, params: list[torch.Tensor]) -> torch.optim.Optimizer:
    """A shadow of an optimizer of one group over ``params``, which works tensor by tensor."""
    shadow = alone.shadow([params])
    for group in shadow.param_groups:
        choose_implementation(alone.kind, group)
    return shadow


def check_separable(rest: OptimizerRest, samples: Samples, starts: Starts = MappingProxyType({})) -> None:
    """Check that a step treats each parameter by itself: bit for bit, for some steps ahead.

    ``samples``: shapes and dtypes of parameters by group. ``starts``: the states that they begin with.

    Raises:
        CombinesError: it combines parameters.
        OptimizerError: it draws random numbers, or cannot be run.
    """
    together, after = _Trained(samples, starts), rest
    alone = [
        (index, number, _Trained({0: [each]}, starts, index, number))
        for index, listed in samples.items()
        for number, each in enumerate(listed)
    ]
    for step in range(1, STEPS_AHEAD + 1):
        before, after = after, together.step(after, step)
        for index, number, single in alone:
            left = single.step(before.select_group(index), step)
            alike = _same_values(single.value(0, 0), together.value(index, number))
            if not alike or not left.is_like(after.select_group(index)):
                raise CombinesError(
                    f"expected an optimizer that updates each parameter by itself, found that {rest.kind.__name__} "
                    f"does something else to several: it combines them"
                )


def check_combined(rest: OptimizerRest, samples: Samples, starts: Starts = MappingProxyType({})) -> None:
    """Check that a step over parameters that lie on two ranks gives what it gives on one, for some steps ahead.

    Both ranks are played here: what they send each other is taken down where all parameters have values.

    Raises:
        OptimizerError: it combines parameters by more than numbers, or hides what it depends on.
    """
    plain, noted, after = _Trained(samples, starts), _Trained(samples, starts), rest
    ranks = [_Trained(samples, starts, rank=rank) for rank in range(2)]
    for step in range(1, STEPS_AHEAD + 1):
        before, after = after, plain.step(after, step)
        sent: list[torch.Tensor] = []

        def note(tensor: torch.Tensor, _: int, sent: list[torch.Tensor] = sent) -> torch.Tensor:
            sent.append(tensor.detach().clone())
            return sent[-1].clone()

        lefts = [noted.step(before, step, note)]
        for rank in ranks:
            coming = iter(sent)
            lefts.append(rank.step(before, step, lambda *_, coming=coming: next(coming).clone()))
        for trained, left in zip([noted, *ranks], lefts, strict=True):
            alike = all(_same_values(trained.value(*place), plain.value(*place)) for place in trained.places())
            if not alike or not left.is_like(after):
                raise OptimizerError(
                    f"expected {rest.kind.__name__} to do with parameters on two ranks what it does on one, found "
                    f"other values: it combines them by more than it computes with torch"
                )


class CombinesError(OptimizerError):
    """The optimizer combines parameters."""


class DoesNotRunError(OptimizerError):
    """The optimizer's step raises an error."""


Samples = Mapping[int, Sequence[tuple[tuple[int, ...], torch.dtype]]]
# The states that a constructor has made for parameters, by their group and shape.
Starts = Mapping[tuple[int, tuple[int, ...]], Any]


def shrink_entry(entry: Any, shape: tuple[int, ...], small: tuple[int, ...]) -> Any:
    """An entry for the shape ``small`` in the place of one for ``shape``, of whose tensors it has the first elements;
    without the states of an optimizer, the only one or a member of a nest, that has tensors of other shapes."""
    others = {
        _member_of(name) for name, state in entry.items()
        if any(tuple(tensor.shape) != shape for tensor in split_tensors(state)[1].values())
    }  # fmt: skip
    tree, tensors = split_tensors({name: state for name, state in entry.items() if _member_of(name) not in others})
    corner = tuple(map(slice, small))
    return join_tensors(tree, {path: tensor[corner].to("cpu", copy=True) for path, tensor in tensors.items()})


def _member_of(name: object) -> str:
    """The part of a state's name that says which member of a nest has it."""
    return str(name).rpartition("__")[0]


class _Trained:
    """Small parameters that an optimizer trains step by step, from group ``first`` and its parameter ``skipped`` on.

    Where parameters are shared by two ranks, they are theirs in turn; those that are not of ``rank``, if it is one of
    them, have no values.
    """

    def __init__(
        self, samples: Samples, starts: Starts, first: int = 0, skipped: int = 0, rank: int | None = None
    ) -> None:
        self._first, self._skipped, self._rank = first, skipped, rank
        self._fakes = fake_mode()
        order = [(index, place) for index, listed in samples.items() for place in range(len(listed))]
        self._owners = {key: number % 2 for number, key in enumerate(order)}
        self.params: dict[tuple[int, int], torch.Tensor] = {}
        for index, place in order:
            low, high = -1.1 - 0.1 * (place + skipped), 1.2 + 0.05 * (index + first)
            values = self._own((index, place), sample(*samples[index][place], low, high))
            self.params[index, place] = torch.nn.Parameter(values)
        self._states: dict[tuple[int, int], Any] = {}
        for index, place in order:
            tree, tensors = split_tensors(starts.get((index + first, samples[index][place][0]), {}))
            if tree:
                own = {path: self._own((index, place), tensor.clone()) for path, tensor in tensors.items()}
                self._states[index, place] = join_tensors(tree, own)

    def step(self, rest: OptimizerRest, number: int, share: Share | None = None) -> OptimizerRest:
        """Step once; returns the groups and attributes after it. ``share``: between ranks, if they share parameters."""
        by_group = [[p for (index, _), p in self.params.items() if index == group] for group in range(len(rest.groups))]
        shadow = rest.shadow(by_group)
        for group in shadow.param_groups:
            choose_implementation(rest.kind, group)
        for key, param in self.params.items():
            index, place = key
            param.grad = self._own(key, _gradient(param, index + self._first, place + self._skipped, number))
            if key in self._states:
                shadow.state[param] = self._states[key]
            if share is not None:
                _, tensors = split_tensors(self._states.get(key, {}), all_tensors=True)
                for tensor in (param, param.grad, *tensors.values()):
                    set_owner(tensor, self._owners[key])
        name = rest.kind.__name__
        try:
            with refuse_draws(name, _CPU), contextlib.nullcontext() if share is None else Combined(name, share):
                run_step(shadow)
        except OptimizerError:
            raise
        except Exception as error:
            raise DoesNotRunError(
                f"expected {name}.step() to run on parameters alone, found {type(error).__name__}: {error}; use an "
                f"optimizer that steps without a closure"
            ) from error
        self._states = {key: shadow.state[param] for key, param in self.params.items() if param in shadow.state}
        after = rest.after(shadow)
        check_apart([after.groups, plain_attributes(shadow), after.own], name)
        return after

    def places(self) -> list[tuple[int, int]]:
        """The groups and numbers of the parameters that have values."""
        return [key for key, owner in self._owners.items() if self._rank in (None, owner)]

    def value(self, group: int, number: int) -> tuple[torch.Tensor, Any]:
        """A parameter and its states."""
        return self.params[group, number].detach(), self._states.get((group, number), {})

    def _own(self, key: tuple[int, int], tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, without values if it is another rank's."""
        return tensor if self._rank in (None, self._owners[key]) else self._fakes.from_tensor(tensor)


def _gradient(param: torch.Tensor, group: int, place: int, number: int) -> torch.Tensor:
    """Values of both signs that make no matrix of rank one."""
    rows = torch.arange(param.numel(), dtype=torch.float64, device="cpu")
    wave = torch.sin(rows * (1.3 + 0.11 * number) + 0.7 * place + group) * (0.4 + 0.1 * (number % 3))
    return wave.reshape(param.shape).to(param.dtype)


def _same_values(first: tuple[torch.Tensor, Any], other: tuple[torch.Tensor, Any]) -> bool:
    (tree, tensors), (other_tree, others) = split_tensors(first[1]), split_tensors(other[1])
    tensors, others = {**tensors, " ": first[0]}, {**others, " ": other[0]}
    return (
        tensors.keys() == others.keys()
        and same(tree, other_tree)
        and not any(map(is_fake, (*tensors.values(), *others.values())))  # made of what another rank has
        and all(torch.equal(_bits(value), _bits(others[path])) for path, value in tensors.items())
    )


def _bits(value: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, by which NaN equals itself."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def shrink(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A small shape in the place of ``shape``: as many dimensions, in the same order of sizes."""
    sizes = sorted({size for size in shape if size > 1})
    small = {size: min(size, 4 + 3 * place) for place, size in enumerate(sizes)}
    return tuple(min(small.get(size, size), _MOST_ROWS) for size in shape)


def keep_divisors(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A smaller shape in the place of ``shape``, whose sizes groups of rows or columns still divide: heads, say."""
    small = shrink(shape)
    sizes = [math.gcd(size, _DIVISORS) if size > _DIVISORS_WHOLE else size for size in shape]
    return tuple(each if each > 3 else least for each, least in zip(sizes, small, strict=True))


def _one(dtype: torch.dtype) -> Any:
    return 1.0 if dtype.is_floating_point else 1


def _flops_of(
    func: OpOverload[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: Any,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> int:
    if func.overloadpacket in flop_registry:
        return flop_count(func.overloadpacket, args, kwargs, result)
    if not inputs:
        return 0
    if base_name(func) in _PER_CUBE:
        first = inputs[0]
        batch = first.numel() // max(1, first.shape[-1] * first.shape[-2])
        return _PER_CUBE[base_name(func)] * batch * first.shape[-2] * first.shape[-1] * min(first.shape[-2:])
    facts = facts_of(func)
    if facts.flops is not None:
        return facts.flops(inputs, outputs)
    return facts.per_element * max(tensor.numel() for tensor in (*inputs, *outputs))
