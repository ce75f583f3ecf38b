"""A plan's reasons by kind of decision, with equal ones of many layers folded into one line."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from zerofx.scheduler.plan.decisions import Absence, AbsenceKind
from zerofx.scheduler.plan.facts import TIERS, unit_of
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.plan.text.fold import span
from zerofx.units import format_bytes

OF_VALUES = ("recomputed", "kept in 8 bits", "offloaded")


# What texts call each kind of absence, and say of where its values are meanwhile, or what becomes of them.
_WORDS: Mapping[AbsenceKind, tuple[str, str]] = {
    "parameters": ("parameters", "on {away.tier}"),
    "states": ("optimizer states", "on {away.tier}, updated on the {away.update}{when}"),
    "gradients": ("gradients", "on {away.tier} between micro-batches"),
    "recomputes": ("recomputed", "is computed again"),
    "spreads": ("kept in parts", "is kept as one part on each of {plan.model} ranks, and gathered for backward"),
    "compresses": ("kept in 8 bits", "is kept in {plan.saved}, and restored for backward"),
    "offloads": ("offloaded", "waits in {away.tier}, freed after {first_free}, reloaded before {first_reload}"),
}


def absences(plan: Plan) -> dict[str, list[tuple[Absence, str]]]:
    """All that is not on the device for a while, by kind, each with where it is, or what becomes of it."""
    return {
        title: [(away, _place(plan, away, words)) for away in plan.absences if away.kind == kind]
        for kind, (title, words) in _WORDS.items()
    }


def _place(plan: Plan, away: Absence, words: str) -> str:
    first_free, first_reload = next(zip(away.free_after, away.reload_before, strict=False), ("", ""))
    when = " during the next step" if away.delayed else ""
    return words.format(plan=plan, away=away, when=when, first_free=first_free, first_reload=first_reload)


def of_values(plan: Plan) -> dict[str, list[Absence]]:
    """The values that do not wait for backward on the device, or not whole, by what becomes of them."""
    fates = {
        "recomputed": list(plan.recomputes),
        "kept in parts": list(plan.spreads),
        "kept in 8 bits": list(plan.compresses),
    }
    for tier in TIERS:
        fates[f"offloaded to {tier}"] = [decision for decision in plan.offloads if decision.tier == tier]
    return fates


@dataclass(frozen=True)
class Reason:
    """Decisions in a row that have one reason: what they are about (first to last), how many, and why."""

    names: tuple[str, ...]
    text: str

    @property
    def subject(self) -> str:
        """The names that the decisions are about, and their number."""
        return span(self.names) + (f"  x{len(self.names)}" if len(self.names) > 1 else "")

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}"


def reasons(plan: Plan) -> dict[str, list[Reason]]:
    """The reasons by kind of decision, in the order of the decisions; empty kinds are left out.

    On one rank nothing is reduced, whatever the plan says of when.
    """
    names = [bucket.name for bucket in plan.buckets]
    gathers = [(names[decision.bucket], decision.reason) for decision in plan.gathers]
    reductions = [(names[decision.bucket], decision.reason) for decision in plan.reduces if plan.num_ranks > 1]
    wires = [(names[decision.bucket], decision.reason) for decision in plan.wires]
    entries = {"gathers": gathers, "reductions": reductions, "wire": wires}
    for kind, away in absences(plan).items():
        if kind in OF_VALUES:
            entries[kind] = list(_value_entries(plan, [decision for decision, _ in away]))
        else:
            entries[kind] = [(names[d.bucket], f"{place}; {d.reason}") for d, place in away if not d.value]
    return {kind: _fold_reasons(of_kind, names) for kind, of_kind in entries.items() if of_kind}


def one_line(kind: str, reasons_given: Sequence[Reason]) -> str:
    """The reason that most decisions of a kind have, and how many have it."""
    counts: Counter[str] = Counter()
    for reason in reasons_given:
        counts[reason.text] += len(reason.names)
    text, most = counts.most_common(1)[0]
    share = f"{most} of {counts.total()}"
    return f"{kind} in {share} places: {text}" if kind in OF_VALUES else f"{kind}: {share} {text}"


def _value_entries(plan: Plan, decisions: Sequence[Absence]) -> Iterator[tuple[str, str]]:
    """One entry for the values of a layer, or of one piece of the rest, with all their reasons."""
    for place, away in group_by_unit(plan, decisions).items():
        num_bytes = format_bytes(sum(decision.num_bytes for decision in away))
        yield place or "(model)", f"{count_values(len(away))}, {num_bytes}; {join_reasons(away)}"


def group_by_unit(plan: Plan, decisions: Iterable[Absence]) -> dict[str, list[Absence]]:
    """Decisions about values by the repeated layer, or piece of the rest, that makes them, in their order.

    ``""`` is what is outside layers where that is not divided.
    """
    units = {bucket.name for bucket in plan.buckets}
    pieces = {value: piece.name for piece in plan.pieces for value in piece.values}
    decisions_of: dict[str, list[Absence]] = {}
    for decision in decisions:
        place = pieces.get(decision.value) or unit_of(decision.layer, units)
        decisions_of.setdefault(place, []).append(decision)
    return decisions_of


def count_values(number: int) -> str:
    """``1 value``, ``2 values``."""
    return f"{number} value{'' if number == 1 else 's'}"


def join_reasons(decisions: Sequence[Absence]) -> str:
    """The reasons of several decisions, each of their parts once."""
    return "; ".join(dict.fromkeys(part for decision in decisions for part in decision.reason.split("; ")))


def _fold_reasons(entries: Sequence[tuple[str, str]], names: Sequence[str]) -> list[Reason]:
    pattern = _any_of(names)
    runs: list[tuple[str, list[str], str]] = []
    for name, reason in entries:
        alike = pattern.sub(partial(_part, name), reason)
        if runs and runs[-1][0] == alike:
            runs[-1][1].append(name)
        else:
            runs.append((alike, [name], reason))
    return [Reason(tuple(run), alike if len(run) > 1 else reason) for alike, run, reason in runs]


def _part(name: str, match: re.Match[str]) -> str:
    """The replacement for a name in the reason, relative to the decision's ``name``."""
    return "each" if match[0] == name else "its neighbour"


def _any_of(names: Sequence[str]) -> re.Pattern[str]:
    """Any of the names as a whole word, the longest that fits."""
    listed = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(rf"(?<![\w.])(?:{listed})(?![\w.]*\w)")
