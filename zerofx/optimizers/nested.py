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

from zerofx.errors import OptimizerError
from zerofx.optimizers.shadow import step_of_class
from zerofx.torch_private.optimizers import is_set_up, members_of, step_hook_tables

Table = MutableMapping[Any, Any]


class StatesAway(defaultdict[torch.Tensor, Any]):
    """A table in the place of the states of an optimizer while they are elsewhere: a member of a nest whose states are
    looked at calls ``bring``, which gives the nest a table of them."""

    def __init__(self, bring: Callable[[torch.optim.Optimizer], None]) -> None:
        super().__init__(dict)
        self.bring = bring


class StatesOnDemand(Table):
    """The states of a member while they are elsewhere: ``bring`` has them put where this is, once this is looked at.

    A class of optimizers may read its states in ways of its own, and in a ``state_dict`` that runs no hooks of torch.
    """

    def __init__(self, bring: Callable[[], None]) -> None:
        self._bring = bring
        self.brought: Table | None = None

    @property
    def _table(self) -> Table:
        if self.brought is None:
            self._bring()
        assert self.brought is not None
        return self.brought

    def __getitem__(self, key: Any) -> Any:
        return self._table[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._table[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._table[key]

    def __contains__(self, key: object) -> bool:
        return key in self._table

    def __iter__(self) -> Iterator[Any]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self._table))


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
    states_away: StatesAway | None = None

    @property
    def state(self) -> Any:  # a table like torch's
        """The states of all members."""
        tables = self._tables()
        if self.states_away is not None and len(self._tables_on_demand()) == len(tables):
            return self.states_away
        if len(tables) == 1:
            return tables[0]
        prefixes = ["" if not index else f"{paths[0]}.".replace(".", "__") for index, paths in enumerate(self.tables)]
        return NestedStates(dict(zip(prefixes, tables, strict=True)))

    @state.setter
    def state(self, states: Table) -> None:
        """Give the members their own, or tables that ask for them where these are away."""
        members, self.states_away = dict(members_of(self.outer)), states if isinstance(states, StatesAway) else None
        for paths in self.tables:
            table = defaultdict(dict) if self.states_away is None else StatesOnDemand(self.bring)
            for path in paths:
                vars(members[path])["state"] = table
        if self.states_away is None:
            self.state.update(states)

    @property
    def has_states_in_part(self) -> bool:
        """True if some members have been given states, and others are without."""
        return 0 < len(self._tables_on_demand()) < len(self.tables)

    def bring(self, *_: object) -> None:
        """Have the states of all members where these look for them; a hook as well."""
        asking = self._tables_on_demand()
        if self.states_away is not None and len(asking) == len(self.tables):
            self.states_away.bring(self)
            for table, brought in zip(asking, self._tables(), strict=True):
                table.brought = brought

    def _tables(self) -> list[Table]:
        members = dict(members_of(self.outer))
        return [vars(members[paths[0]])["state"] for paths in self.tables]

    def _tables_on_demand(self) -> list[StatesOnDemand]:
        return [table for table in self._tables() if isinstance(table, StatesOnDemand) and table.brought is None]

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
        step_of_class(type(self.outer))(self.outer)


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
    vars(nested).update(step_hook_tables(optimizer), outer=optimizer, defaults=optimizer.defaults)
    return nested


@functools.cache
def _make_class(kinds: tuple[type, ...], tables: tuple[tuple[str, ...], ...]) -> Any:
    names = {"tables": tables, "__module__": kinds[0].__module__}
    return type("(".join(kind.__name__ for kind in kinds) + ")" * (len(kinds) - 1), (NestedOptimizer,), names)
