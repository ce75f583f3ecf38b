"""Find lists of equal layers by structure, and shorten them temporarily."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from zerofx.ir.tensor_parts import named_parameters
from zerofx.torch_private.modules import child_table, set_child_table

# Of n layers, these are captured: what is between the second and the last but one is made from those two.
_NUM_CAPTURED = 4


@dataclass(frozen=True)
class Repeat:
    """A list of layers: its dotted path, and the names of its children in order."""

    path: str
    keys: tuple[str, ...]

    @property
    def sample(self) -> tuple[str, ...]:
        """The layers that are captured: the first two and the last two."""
        return (*self.keys[:2], *self.keys[-2:])

    @property
    def fewer(self) -> tuple[str, ...]:
        """``sample`` without the last but one."""
        return (*self.keys[:2], self.keys[-1])

    @property
    def middle(self) -> tuple[str, ...]:
        """The layers that are not captured."""
        return self.keys[2:-2]

    def unit(self, key: str) -> str:
        """The dotted path of a layer."""
        return f"{self.path}.{key}" if self.path else key


def find_repeats(model: nn.Module) -> tuple[Repeat, ...]:
    """The lists of layers to shorten: those with which capturing shorter models costs least.

    Lists share no module and no parameter with anything else, and none is inside another. One capture is made with all
    of them shortened, and one more for each; ``()`` where these have more than half of the model's layers together.
    """
    lists = sorted(_lists(model), key=lambda repeat: len(repeat.keys), reverse=True)
    total = sum(len(repeat.keys) for repeat in lists)
    best: tuple[float, int] = (total / 2, 0)
    saved = 0
    for count, repeat in enumerate(lists, 1):
        saved += len(repeat.keys) - _NUM_CAPTURED
        best = min(best, ((count + 1) * (total - saved) - count, count))
    return tuple(lists[: best[1]])


def _lists(model: nn.Module) -> Iterator[Repeat]:
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, parameter in named_parameters(model, remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = [aliases for aliases in names.values() if len(aliases) > 1]
    inside: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or any(
            path.startswith(prefix_of_list) for prefix_of_list in inside
        ):
            continue
        repeat = Repeat(path, tuple(child_table(module)))
        prefix = f"{path}." if path else ""
        own = all(places[id(part)] == 1 for part in module.modules())
        apart = all(not name.startswith(prefix) for aliases in tied for name in aliases)
        if len(repeat.keys) > _NUM_CAPTURED and own and apart:
            inside.append(prefix)
            yield repeat


@contextlib.contextmanager
def shorten_lists(model: nn.Module, keys_of: Sequence[tuple[Repeat, Sequence[str]]]) -> Iterator[None]:
    """While open, each list has only the layers that ``keys_of`` names; afterwards it is restored."""
    tables = []
    for repeat, _ in keys_of:
        owner = model.get_submodule(repeat.path)
        tables.append((owner, child_table(owner)))
    try:
        for (owner, whole), (_, keys) in zip(tables, keys_of, strict=True):
            set_child_table(owner, {key: whole[key] for key in keys})
        yield
    finally:
        for owner, whole in tables:
            set_child_table(owner, whole)
