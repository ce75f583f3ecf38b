"""The state that an optimizer's step uses besides ``state[p]``: entries of its groups, and its own attributes."""

from __future__ import annotations

import copy
import enum
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from zerofx.errors import OptimizerError
from zerofx.optimizers.nested import NestedOptimizer
from zerofx.optimizers.shadow import IMPLEMENTATION_FLAGS
from zerofx.torch_private.optimizers import has_hooks, is_torchs_own, members_of

_HANDLED_APART: Final = frozenset(
    {"state", "states_away", "param_groups", "defaults", "step", "grad_scale", "found_inf"}
)
PLAIN: Final = frozenset({type(None), bool, int, float, str})  # most of all there is
_ATOMS: Final = (
    type(None), bool, int, float, complex, str, bytes, range, slice, enum.Enum, type, torch.dtype, torch.device,
    types.FunctionType, types.BuiltinFunctionType, types.ModuleType,
)  # fmt: skip
_ABSENT: Final = object()


@dataclass(frozen=True)
class OptimizerRest:
    """An optimizer without its states: the entries of each group but its parameters, and the attributes.

    ``kind`` is the optimizer's class, and ``shared`` are attributes that torch gives to all optimizers, without hooks.
    ``own``: entries of ``optimizer.state`` that are of no parameter.
    """

    kind: type[torch.optim.Optimizer]
    groups: tuple[dict[str, Any], ...]
    attributes: dict[str, Any]
    shared: dict[str, Any]
    own: dict[Any, Any] = field(default_factory=dict)

    def select_group(self, group: int) -> OptimizerRest:
        """The same optimizer with one of its groups."""
        return replace(self, groups=(self.groups[group],))

    def shadow(self, params: Iterable[list[Any]]) -> torch.optim.Optimizer:
        """An optimizer of the same class, with copies of all this, these parameters in its groups, and no hooks.

        Raises:
            OptimizerError: there is what can be neither copied nor shared, such as a module.
        """
        shadow = object.__new__(self.kind)
        own = vars(shadow)
        own.update(self.shared)
        own.update(_copy_attributes(self.attributes, shadow, in_nest=issubclass(self.kind, NestedOptimizer)))
        shadow.state = defaultdict(dict, {key: _copy(value, shadow, "state") for key, value in self.own.items()})
        shadow.param_groups = [
            {"params": mine, **{key: _copy(value, shadow, "param_groups") for key, value in group.items()}}
            for mine, group in zip(params, self.groups, strict=True)
        ]
        return shadow

    def attributes_of(self, shadow: torch.optim.Optimizer) -> dict[str, Any]:
        """The own attributes of a ``shadow`` that has stepped."""
        return {
            name: value
            for name, value in vars(shadow).items()
            if name in self.attributes or not (name in self.shared or name in _HANDLED_APART or is_torchs_own(name))
        }

    def after(self, shadow: torch.optim.Optimizer) -> OptimizerRest:
        """This as a ``shadow`` of it has left it, which has stepped."""
        pairs = zip(shadow.param_groups, self.groups, strict=True)
        groups = tuple(entries_after(group, before) for group, before in pairs)
        own = {key: value for key, value in shadow.state.items() if not isinstance(key, torch.Tensor)}
        return replace(self, groups=groups, attributes=self.attributes_of(shadow), own=own)

    def is_like(self, other: OptimizerRest) -> bool:
        """True if all entries and attributes are equal."""
        mine = [list(self.groups), self.attributes, self.own]
        return same(mine, [list(other.groups), other.attributes, other.own])


@dataclass
class Change:
    """An entry of a group, or an attribute, that a step leaves with another value."""

    owner: dict[str, Any]
    key: str
    value: Any

    def swap(self) -> None:
        """Exchange the entry's value with the one noted here: once to change it, a second time to go back."""
        before = self.owner.get(self.key, _ABSENT)
        if self.value is _ABSENT:
            self.owner.pop(self.key, None)
        else:
            self.owner[self.key] = self.value
        self.value = before


def optimizer_rest(optimizer: torch.optim.Optimizer) -> OptimizerRest:
    """The groups and attributes of ``optimizer``; not copied."""
    own = attributes(_copy_members(optimizer))
    shared = _common_entries(optimizer)
    groups = tuple(
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    )
    return OptimizerRest(type(optimizer), groups, own, shared)


def _copy_members(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer with the attributes of this, but for a copy of those that it holds: they change in place."""
    copied = object.__new__(type(optimizer))
    for name, value in vars(optimizer).items():
        vars(copied)[name] = _copy_members(value) if isinstance(value, torch.optim.Optimizer) else value
    return copied


def _common_entries(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes that torch gives to all optimizers, without hooks."""
    return {
        name: OrderedDict() if has_hooks(name, value) else value
        for name, value in vars(optimizer).items()
        if name == "defaults" or (name not in _HANDLED_APART and is_torchs_own(name))
    }


def attributes_to_save(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The entries that the ``state_dict()`` of an optimizer's own class has besides states and groups, as a count in an
    attribute; none of torch's, or of a nest."""
    if _has_torchs_state_dict(optimizer):
        return {}
    return {key: value for key, value in _make_stateless(optimizer)[1].items() if key not in ("state", "param_groups")}


def load_attributes(optimizer: torch.optim.Optimizer, entries: Mapping[str, Any]) -> None:
    """Give ``optimizer`` the attributes that its class's ``load_state_dict()`` makes of ``attributes_to_save``."""
    if entries and not _has_torchs_state_dict(optimizer):
        shadow, own = _make_stateless(optimizer)
        shadow.load_state_dict(own | dict(entries))
        rest = optimizer_rest(optimizer)
        for change in changes(vars(optimizer), rest.attributes, rest.attributes_of(shadow)):
            change.swap()


def _has_torchs_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, NestedOptimizer) or type(optimizer).state_dict is torch.optim.Optimizer.state_dict


def _make_stateless(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
    """A shadow of ``optimizer`` without parameters, and what its class saves of it."""
    rest = optimizer_rest(optimizer)
    shadow = rest.shadow([[] for _ in rest.groups])
    return shadow, shadow.state_dict()


def plain_attributes(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The attributes of an optimizer and of those that it holds."""
    every = [value for _, member in members_of(optimizer) for value in attributes(member).values()]
    return [value for value in every if not isinstance(value, torch.optim.Optimizer)]


def attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's own attributes, but for those that torch gives to all of them; not copied."""
    return {
        name: value for name, value in vars(optimizer).items() if name not in _HANDLED_APART and not is_torchs_own(name)
    }


def entries_after(group: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a shadow's group after a step that began with ``before``, but for what the shadow chose itself."""
    entries = {key: value for key, value in group.items() if key not in ("params", *IMPLEMENTATION_FLAGS)}
    return entries | {key: before[key] for key in IMPLEMENTATION_FLAGS if key in before}


def changes(owner: dict[str, Any], before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """The changes that turn ``before`` into ``after``, to be done to ``owner``."""
    if same(before, after):
        return []
    changed = []
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key, _ABSENT), after.get(key, _ABSENT)
        if isinstance(old, torch.optim.Optimizer) and isinstance(new, torch.optim.Optimizer):
            changed += changes(vars(owner.get(key, old)), attributes(old), attributes(new))
        elif not same(old, new):
            changed.append(Change(owner, key, new))
    return changed


def is_unchanged(before: OptimizerRest, after: OptimizerRest) -> bool:
    """True if ``after`` equals ``before`` and has nothing that may change in place."""
    values = [after.attributes, *after.groups]
    return all(_is_fixed(value) for entries in values for value in entries.values()) and same(
        [before.attributes, *before.groups], values
    )


def may_change(value: Any) -> bool:
    """True if a value may be changed in place: a container, a tensor or an object of a class of the user's."""
    return not (_is_fixed(value) or isinstance(value, _ATOMS))


def _is_fixed(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and all(map(_is_fixed, value)))


def same(a: Any, b: Any) -> bool:
    """True if two values, one of them perhaps a copy of the other, are equal."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        equal = a.shape == b.shape and a.dtype == b.dtype and a.numel() == 1
        return equal and (a.item() == b.item() or (a.item() != a.item() and b.item() != b.item()))
    if isinstance(a, (float, complex)):
        return bool(a == b or (a != a and b != b))
    if isinstance(a, types.MethodType):
        return a.__func__ is b.__func__
    if isinstance(a, _ATOMS):
        return bool(a == b)
    if isinstance(a, torch.optim.Optimizer):
        return same(attributes(a), attributes(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(value is b[key] or same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (set, frozenset)):
        return bool(a == b)
    return same(vars(a), vars(b)) if hasattr(a, "__dict__") else bool(a == b)


def _copy_attributes(of: Mapping[str, Any], owner: torch.optim.Optimizer, *, in_nest: bool) -> dict[str, Any]:
    """Copies of attributes for ``owner``, as ``_copy`` makes them; ``in_nest``: optimizers too, without their states
    and groups, which are for the nest to give."""
    copied: dict[str, Any] = {}
    for name, value in of.items():
        if in_nest and isinstance(value, torch.optim.Optimizer):
            copied[name] = member = object.__new__(type(value))
            vars(member).update(
                _common_entries(value) | {key: None for key in ("state", "param_groups") if key in vars(value)}
            )
            vars(member).update(_copy_attributes(attributes(value), member, in_nest=True))
        else:
            copied[name] = _copy(value, owner, name)
    return copied


def _copy(value: Any, owner: object, where: str) -> Any:
    """A copy of ``value`` that a step may change; what no step changes, and tensors of many elements, are shared."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, _ATOMS):
        return value
    if isinstance(value, torch.Tensor):
        is_number = value.numel() == 1 and not value.requires_grad
        return value.to("cpu", copy=True) if is_number else value
    if isinstance(value, types.MethodType):
        bound_to_optimizer = isinstance(value.__self__, torch.optim.Optimizer)
        return types.MethodType(value.__func__, owner) if bound_to_optimizer else value
    if isinstance(value, (torch.optim.Optimizer, torch.nn.Module)):
        raise OptimizerError(
            f"expected an optimizer that works on its own parameters and states alone, found the "
            f"{type(value).__name__} in {where} of {type(owner).__name__}: give zerofx.compile an optimizer that holds "
            f"no module, and others as attributes alone"
        )
    make: Callable[[Any], Any] | None = None
    if type(value) in (list, set, frozenset):
        make = type(value)
    elif type(value) is deque:
        make = lambda items: deque(items, value.maxlen)  # noqa: E731
    elif isinstance(value, tuple):
        make = type(value) if type(value) is tuple else lambda items: type(value)(*items)
    if make is not None:
        return make([_copy(item, owner, where) for item in value])
    if isinstance(value, dict):
        copy_of_dict = copy.copy(value)
        for key, item in value.items():
            copy_of_dict[key] = _copy(item, owner, where)
        return copy_of_dict
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise OptimizerError(
            f"expected numbers, texts and containers in {where} of {type(owner).__name__}, found a "
            f"{type(value).__name__}, which cannot be copied ({error}): its step cannot be followed without changing it"
        ) from error
