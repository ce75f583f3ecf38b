"""Run an optimizer itself next to the programs that were made of its step, on a few parameters, and compare them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from zerofx.optimizers.outside import OptimizerRest, attributes, changes, entries_after, same
from zerofx.optimizers.program import UpdateProgram, run_graph
from zerofx.optimizers.shadow import choose_implementation, on_host, run_step, sample
from zerofx.optimizers.stand_in import StandIn, copy_scalars

# The second has more elements than optimizers ask for before they take another way, and whole blocks of them.
_SHAPES: Final = ((23,), (96, 128))


@dataclass(frozen=True)
class ComingUpdate:
    """The coming update of what a stand-in stands for: its program, this step's numbers, and the scalar states after.

    ``present`` names the states that have values after it.
    """

    program: UpdateProgram
    numbers: tuple[float, ...]
    scalars: dict[str, Any]
    present: frozenset[str]


class SideBySide:
    """A copy of an optimizer with two parameters for each stand-in, and flat copies of them for the programs."""

    def __init__(self, state: OptimizerRest, stand_ins: Sequence[StandIn]) -> None:
        self._pairs = [_Pair(stand_in) for stand_in in stand_ins]
        groups = range(len(state.groups))
        params = [[p for pair in self._pairs if pair.stand_in.group == index for p in pair.params] for index in groups]
        self._optimizer = state.shadow(params)
        for group in self._optimizer.param_groups:
            choose_implementation(state.kind, group, fused=any(stand_in.fused for stand_in in stand_ins))
        for pair in self._pairs:
            pair.give_states(self._optimizer)
        self._num_steps = 0

    @property
    def stand_ins(self) -> list[StandIn]:
        """Stand-ins that the parameters' updates start from now."""
        return [pair.stand_in for pair in self._pairs]

    def step(self, updates: Mapping[Any, ComingUpdate], after: OptimizerRest) -> str:
        """Step the optimizer, run ``updates``, and say what differs; empty where nothing does."""
        self._num_steps += 1
        for pair in self._pairs:
            pair.take_gradients(self._num_steps)
        with on_host():
            run_step(self._optimizer)
        for pair in self._pairs:
            update = updates.get(pair.stand_in.key)
            if update is not None:
                pair.run(update, self._num_steps)
                if difference := pair.difference(self._optimizer):
                    return difference
        for group, expected in zip(self._optimizer.param_groups, after.groups, strict=True):
            if changed := changes({}, expected, entries_after(group, expected)):
                return f'param_groups["{changed[0].key}"]'
        changed = changes({}, after.attributes, attributes(self._optimizer))
        return f"attribute {changed[0].key!r}" if changed else ""


class _Pair:
    """Two parameters of the optimizer, and the flat copies on which the programs of their stand-in run."""

    def __init__(self, stand_in: StandIn) -> None:
        self.stand_in = stand_in
        self.params = [
            sample(shape, stand_in.dtype, -1.1 - index, 1.2).requires_grad_() for index, shape in enumerate(_SHAPES)
        ]
        self._flat = [p.detach().flatten().clone() for p in self.params]
        self._states = [
            {name: sample((p.numel(),), dtype, 0.1, 0.9) for name, dtype in stand_in.flat}
            | {name: torch.full((), 3.0, dtype=dtype, device="cpu") for name, dtype in stand_in.singles}
            for p in self._flat
        ]
        self._scalars = dict(stand_in.scalars)

    def give_states(self, optimizer: torch.optim.Optimizer) -> None:
        for param, states in zip(self.params, self._states, strict=True):
            singles = dict(self.stand_in.singles)
            before = {n: v.clone() if n in singles else v.clone().reshape(param.shape) for n, v in states.items()}
            before |= copy_scalars(self._scalars)
            if before:
                optimizer.state[param] = before

    def take_gradients(self, number: int) -> None:
        if self.stand_in.has_gradient:
            for param in self.params:
                param.grad = self._gradient(param, number)

    def _gradient(self, param: torch.Tensor, number: int) -> torch.Tensor:
        high = (0.5 + 0.1 * number) * (1 if number % 2 else -1)
        return sample(tuple(param.shape), self.stand_in.dtype, high, -0.6 - 0.01 * param.dim())

    def run(self, update: ComingUpdate, number: int) -> None:
        """Run ``update`` on the flat copies, with the gradients of the ``number``-th step."""
        for param, flat, states in zip(self.params, self._flat, self._states, strict=True):
            for name, value in (update.program.new_states(len(flat)) | update.program.new_tensor_scalars()).items():
                states.setdefault(name, value)
            run_graph(update.program, flat, self._gradient(param, number).flatten(), states, update.numbers)
        dtypes = {name: value.dtype for name, value in self._states[0].items() if name in update.present}
        singles = {spec.name for spec in update.program.tensor_scalars}
        self.stand_in = replace(
            self.stand_in, flat=tuple(entry for entry in dtypes.items() if entry[0] not in singles),
            singles=tuple(entry for entry in dtypes.items() if entry[0] in singles),
            scalars=tuple(update.scalars.items()),
        )  # fmt: skip

    def difference(self, optimizer: torch.optim.Optimizer) -> str:
        """The first difference, in any bit, between the optimizer's values and the flat copies; empty for none."""
        scalars = dict(self.stand_in.scalars)
        for param, flat, states in zip(self.params, self._flat, self._states, strict=True):
            if not _same_bits(flat, param):
                return "parameter"
            real = optimizer.state.get(param, {})
            if real.keys() != {name for name, _ in (*self.stand_in.flat, *self.stand_in.singles)} | scalars.keys():
                return "set of states"
            for name, value in real.items():
                if not (same(scalars[name], value) if name in scalars else _same_bits(states[name], value)):
                    return f"state[{name!r}]"
        return ""


def _same_bits(flat: torch.Tensor, value: torch.Tensor) -> bool:
    """NaN for NaN; the sign of a zero counts."""
    flat, value = flat.flatten(), value.detach().flatten()
    if flat.dtype != value.dtype or not torch.allclose(flat, value, rtol=0.0, atol=0.0, equal_nan=True):
        return False
    return not flat.is_floating_point() or torch.equal(flat.signbit() & (flat == 0), value.signbit() & (value == 0))
