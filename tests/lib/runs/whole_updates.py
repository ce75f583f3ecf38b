"""What plain torch makes of a model that an optimizer of whole parameters trains on several ranks, and a step of it."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zerofx
from tests.lib.runs.training import world
from tests.lib.runs.whole_optimizers import IN_FEW_BITS, MAKES, TRAPS
from zerofx.optimizers.whole.states import copy_entry, join_tensors, paths_in_subclasses, split_tensors

Saved = tuple[dict[str, Tensor], dict[str, Any]]


@dataclass(frozen=True)
class WholeCase:
    """An optimizer of ``MAKES``, ``IN_FEW_BITS`` or ``TRAPS``, the options of ``compile`` that it trains with, how many
    steps it takes, and the rows of a rank's batch."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 4
    rows: int = 8

    def __str__(self) -> str:
        return ", ".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(7)
        kind, make = (MAKES | IN_FEW_BITS | TRAPS)[self.name]
        model = kind()
        return model, make(model)

    def batches(self, num_ranks: int) -> list[list[Tensor]]:
        """By step, what each rank trains on; the same on every rank."""
        generator = torch.Generator().manual_seed(5)
        dtype = torch.bfloat16 if "bfloat16" in self.name else torch.float32
        shape = self.rows, 6
        return [
            [torch.randn(shape, generator=generator).to(dtype) for _ in range(num_ranks)] for _ in range(self.steps)
        ]


class AllRanks:
    """Plain torch on one process, with the mean of all ranks' gradients, summed in the order of ranks.

    With ``state_dtype`` states that are in their parameter's dtype are rounded after each step.
    """

    def __init__(self, case: WholeCase, saved: Saved | None = None) -> None:
        self.case = case
        self.model, self.optimizer = case.build()
        if saved is not None:
            self.model.load_state_dict(saved[0])
            self.optimizer.load_state_dict(saved[1])
            self._round_states()

    def step(self, batch: Sequence[Tensor], norm: Tensor | None = None) -> Tensor:
        """One step; returns this rank's loss. ``norm``: that of all gradients, where they are clipped."""
        accumulate = self.case.options.get("accumulate", 1)
        losses, gradients = [], []
        for rows in batch:
            self.optimizer.zero_grad()
            total = torch.zeros(())
            for part in rows.chunk(accumulate):
                loss = self.model(part) / accumulate
                loss.backward()
                total = loss.detach() if accumulate == 1 else total + loss.detach()
            losses.append(total)
            gradients.append([p.grad for p in self.model.parameters()])
        for p, of_ranks in zip(self.model.parameters(), zip(*gradients, strict=True), strict=True):
            total = sum_in_order([g for g in of_ranks if g is not None], self.case.options.get("mesh"))
            p.grad = total / len(batch)
        if norm is not None:
            parameters = list(self.model.parameters())
            own = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            torch.testing.assert_close(own, norm, rtol=1e-5, atol=0.0)
            nn.utils.clip_grads_with_norm_(parameters, self.case.options["max_grad_norm"], norm)
        self.optimizer.step()
        self._round_states()
        return losses[world()[0]]

    @property
    def _stores_low(self) -> bool:
        return getattr(self.case.options.get("precision"), "state_dtype", None) is not None

    def _low_states(self) -> dict[Tensor, Any]:
        """States by parameter, those in its dtype in bfloat16 if they are stored so."""
        states: dict[Tensor, Any] = {}
        for p, entry in self.optimizer.state.items():
            tree, tensors = split_tensors(entry)
            if isinstance(p, Tensor) and self._stores_low:
                kept = paths_in_subclasses(tree)
                tensors |= {n: t.bfloat16() for n, t in tensors.items() if t.dtype == p.dtype and n not in kept}
            states[p] = join_tensors(tree, {name: tensor.clone() for name, tensor in tensors.items()})
        return states

    def _round_states(self) -> None:
        for p, low in self._low_states().items() if self._stores_low else ():
            _, rounded = split_tensors(low)
            for name, tensor in split_tensors(self.optimizer.state[p])[1].items():
                tensor.copy_(rounded[name])

    def saved(self) -> Saved:
        high, self.optimizer.state = self.optimizer.state, defaultdict(dict, self._low_states())
        state = self.optimizer.state_dict()
        self.optimizer.state = high
        copied = {key: copy_entry(entry) for key, entry in state["state"].items()}
        groups = copy.deepcopy(state["param_groups"])
        return {k: v.clone() for k, v in self.model.state_dict().items()}, {"state": copied, "param_groups": groups}


def sum_in_order(gradients: list[Tensor], mesh: Mapping[str, int] | None) -> Tensor:
    """The sum over ranks in their order, as the gradients lie in memory; on a mesh that of each replica first."""
    each = len(gradients) if mesh is None else mesh["shard"]
    sums = [reduce(torch.add, gradients[start : start + each]) for start in range(0, len(gradients), each)]
    return reduce(torch.add, sums)


def compiled(case: WholeCase, saved: Saved | None = None, **options: Any) -> tuple[zerofx.Step, torch.optim.Optimizer]:
    """A compiled step of a case, and its optimizer; ``saved``: loaded before it is compiled."""
    model, optimizer = case.build()
    if saved is not None:
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    return zerofx.compile(model, optimizer, **{"backend": "eager", **case.options, **options}), optimizer


def unlike(expected: Saved, found: Saved) -> list[str]:
    """What is not the same to the bit, by name."""
    wrong = [name for name, value in expected[0].items() if not torch.equal(value, found[0][name])]
    if expected[1]["param_groups"] != found[1]["param_groups"]:
        wrong.append("param_groups")
    one, other = ({k: entry for k, entry in saved[1]["state"].items() if entry} for saved in (expected, found))
    return wrong + _unlike(one, other, "state")


def _unlike(one: Any, other: Any, where: str) -> list[str]:
    if type(one) is not type(other):
        return [f"{where}: {type(one).__name__}, {type(other).__name__}"]
    if isinstance(one, Tensor) and hasattr(one, "__tensor_flatten__"):
        names, _ = one.__tensor_flatten__()
        return [text for name in names for text in _unlike(getattr(one, name), getattr(other, name), f"{where}.{name}")]
    if isinstance(one, Tensor):
        same = one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
        return [] if same else [f"{where}: {one.flatten()[:3].tolist()}, {other.flatten()[:3].tolist()}"]
    if isinstance(one, (dict, list, tuple)):
        if len(one) != len(other) or (isinstance(one, dict) and one.keys() != other.keys()):
            return [f"{where}: {one.keys() if isinstance(one, dict) else len(one)} expected"]
        pairs = [(key, one[key], other[key]) for key in (one if isinstance(one, dict) else range(len(one)))]
        return [text for key, a, b in pairs for text in _unlike(a, b, f"{where}[{key}]")]
    return [] if one == other else [f"{where}: {one}, {other}"]


def differences_of(case: WholeCase) -> list[str]:
    """What a compiled step of a case does otherwise than plain torch with all ranks' gradients, on this rank."""
    rank, num_ranks = world()
    plain = AllRanks(case)
    step, optimizer = compiled(case)
    wrong = []
    try:
        for number, batch in enumerate(case.batches(num_ranks)):
            loss = step(batch[rank]).clone()
            norm = step.grad_norm if "max_grad_norm" in case.options else None
            if not torch.equal(loss, plain.step(batch, norm)):
                wrong.append(f"loss {number}")
        wrong += unlike(plain.saved(), (step.full_state_dict(), optimizer.state_dict()))
    finally:
        step.close()
    return [f"{case}: {text}" for text in wrong]


def resumed_differences(folder: str, case: WholeCase, half: int) -> list[str]:
    """Train the first ``half`` of a case and save it, or load it and train the rest: what differs at the end."""
    num_ranks = world()[1]
    batches = replace(case, steps=2 * half).batches(1)
    plain = AllRanks(case)
    step, optimizer = compiled(case)
    is_first = not any(Path(folder).iterdir())
    if not is_first:
        step.load_checkpoint(folder)
    for number, batch in enumerate(batches):
        plain.step(batch * num_ranks)
        if (number < half) == is_first:
            step(batch[0])
        if is_first and number == half - 1:
            step.save_checkpoint(folder)
            break
    wrong = unlike(plain.saved(), (step.full_state_dict(), optimizer.state_dict()))
    step.close()
    return [f"{case} on {num_ranks}: {text}" for text in wrong]
