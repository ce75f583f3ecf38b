"""Optimizers that step another one, such as Lookahead: one optimizer with the states, groups and attributes of both.

    Lookahead(AdamW(params))    state[p] = {"slow_params": ..., "optimizer__step": ..., "optimizer__exp_avg": ...}

Its members are the optimizer that the user gave and those that it holds in attributes, which have its param groups.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch

from zerofx.errors import OptimizerError, UsageError
from zerofx.optimizers.shadow import step_function
from zerofx.torch_private.optimizers import (
    has_state_hooks,
    is_set_up,
    members_of,
    run_with_hooks,
    tables_of_hooks,
)

Table = MutableMapping[Any, Any]


class NestedStates(MutableMapping[Any, Any]):
    """Tables of members as one, by the prefix that names have there; that of the first is empty."""

    def __init__(self, tables: Mapping[str, Table]) -> None:
        self._tables = tables

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, torch.Tensor):
            return {f"{p}{name}": value for p, t in self._tables.items() for name, value in t.get(key, {}).items()}
        table, name = self._find(key)
        return table[name]

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, torch.Tensor):
            table, name = self._find(key)
            table[name] = value
            return
        del self[key]
        for name, state in value.items():
            table, own = self._find(name)
            table.setdefault(key, {})[own] = state

    def __delitem__(self, key: Any) -> None:
        if isinstance(key, torch.Tensor):
            for table in self._tables.values():
                table.pop(key, None)
            return
        table, name = self._find(key)
        del table[name]

    def __contains__(self, key: object) -> bool:
        if isinstance(key, torch.Tensor):
            return any(key in table for table in self._tables.values())
        table, name = self._find(key)
        return name in table

    def __iter__(self) -> Iterator[Any]:
        keys = [k if isinstance(k, torch.Tensor) or not p else f"{p}{k}" for p, t in self._tables.items() for k in t]
        return iter(dict.fromkeys(keys))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _find(self, name: Any) -> tuple[Table, Any]:
        """The table that has a name, and the name there."""
        prefixes = [p for p in self._tables if isinstance(name, str) and name.startswith(p)]
        prefix = max(prefixes, key=len, default="")
        return self._tables[prefix], name[len(prefix) :] if prefix else name


class NestedOptimizer(torch.optim.Optimizer):
    """An optimizer that steps another, ``outer``, with its members' states and groups as any optimizer has its own.

    A subclass is made for each nest of classes; ``tables`` has the paths of the members of each table of states: the
    first is its prefix.
    """

    tables: tuple[tuple[str, ...], ...]
    outer: torch.optim.Optimizer

    @property
    def state(self) -> Any:  # a table like torch's
        """The states of all members."""
        members = dict(members_of(self.outer))
        tables = [vars(members[paths[0]])["state"] for paths in self.tables]
        if all(table is tables[0] for table in tables):
            return tables[0]
        prefixes = ["" if not index else f"{paths[0]}.".replace(".", "__") for index, paths in enumerate(self.tables)]
        return NestedStates(dict(zip(prefixes, tables, strict=True)))

    @state.setter
    def state(self, states: Table) -> None:
        """Give the members their own; a table of another class than torch's is given to all of them."""
        members, is_torchs = dict(members_of(self.outer)), type(states) is defaultdict
        for paths in self.tables:
            table: Table = defaultdict(dict) if is_torchs else states
            for path in paths:
                vars(members[path])["state"] = table
        if is_torchs:
            self.state.update(states)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # that of a member
        """The groups of all members."""
        return self.outer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        for _, member in members_of(self.outer):
            if "param_groups" in vars(member):
                vars(member)["param_groups"] = groups

    def step(self) -> None:  # type: ignore[override]  # needs no closure
        """Step the outer one, without its hooks."""
        step_function(self.outer)(self.outer)


def nest(optimizer: Any) -> Any:
    """``optimizer`` with those that it steps, as one; itself where it holds none, or is no optimizer.

    Raises:
        OptimizerError: it holds one with other param groups.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, NestedOptimizer):
        return optimizer
    members = members_of(optimizer)
    if len(members) == 1 or not is_set_up(optimizer):  # which is refused
        return optimizer
    groups = list(map(id, optimizer.param_groups))
    for path, member in members:
        if list(map(id, member.param_groups)) != groups:
            raise OptimizerError(
                f"expected an optimizer that steps others on its own param groups, found the {type(member).__name__} "
                f"in {path} of {type(optimizer).__name__}, which has others: give zerofx.compile a list of optimizers"
            )
    tables: dict[int, list[str]] = {}
    for path, member in members:
        if "state" in vars(member):
            tables.setdefault(id(vars(member)["state"]), []).append(path)
    kind = _make_class(tuple(type(member) for _, member in members), tuple(map(tuple, tables.values())))
    nested: NestedOptimizer = object.__new__(kind)
    vars(nested).update(tables_of_hooks(optimizer), outer=optimizer, defaults=optimizer.defaults)
    _watch(nested)
    return nested


@functools.cache
def _make_class(kinds: tuple[type, ...], tables: tuple[tuple[str, ...], ...]) -> Any:
    names = {"tables": tables, "__module__": kinds[0].__module__}
    return type("(".join(kind.__name__ for kind in kinds) + ")" * (len(kinds) - 1), (NestedOptimizer,), names)


def _watch(nested: NestedOptimizer) -> None:
    """Run the hooks of ``nested`` around ``state_dict`` and ``load_state_dict`` of the outer one, whose class may not
    call torch's own. While there are such hooks, those of the others are its alone."""
    under_way: list[str] = []

    def call(member: torch.optim.Optimizer, name: str, *args: Any) -> Any:
        own: Callable[..., Any] = functools.partial(getattr(type(member), name), member)
        if member is not nested.outer:
            if has_state_hooks(nested) and not under_way:
                raise UsageError(
                    f"expected no {name}() of the {type(member).__name__} that {type(nested.outer).__name__} steps "
                    f"while a step has the states of both: call that of {type(nested.outer).__name__}"
                )
            return own(*args)
        under_way.append(name)
        try:
            return run_with_hooks(nested, name, own, *args)
        finally:
            under_way.pop()

    for _, member in members_of(nested.outer):
        for name in ("state_dict", "load_state_dict"):
            vars(member)[name] = functools.partial(call, member, name)
