"""All cases of the staleness net, by what is changed."""

from __future__ import annotations

from types import ModuleType
from typing import Final

from tests.nets.cases.staleness import containers, functions, libraries, loops, modules, objects, settings
from tests.nets.cases.staleness.script import Case

_FILES: Final[tuple[ModuleType, ...]] = (functions, objects, containers, modules, settings, libraries, loops)


def staleness_cases() -> list[Case]:
    """Every case, in the order of the files."""
    return [value for file in _FILES for value in vars(file).values() if isinstance(value, Case)]
