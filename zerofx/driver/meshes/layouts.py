"""Choose between layouts on the model axis by simulation, which sees effects that the program does not.

The integer program (``scheduler/decide/shardings.py``) adds up seconds, and by default takes memory as free. It knows
neither how much of the parameter gathers is hidden by computation, nor the price of a byte. So it is solved for several
prices of both; if they give different layouts, each is simulated with a few of the layers
(``zerofx/driver/meshes/short_steps.py``). The fastest is taken; within a memory budget the fastest that fits, with its
savings, or else the one that needs least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from zerofx.budgets import budget_bytes
from zerofx.driver.captures import Captures
from zerofx.driver.meshes.short_steps import ShortSteps, StepTotals
from zerofx.driver.prepared import Request
from zerofx.scheduler.cost.sharding_seconds import Prices
from zerofx.scheduler.plan.decisions import ShardingDecision
from zerofx.units import format_bytes, format_seconds

Shardings = tuple[ShardingDecision, ...]
Share = Callable[[Request, Captures, Shardings], Captures]

_EXPOSED = (0.5, 0.0)  # parts of the seconds of gathers that may not be hidden: tried besides the part asked for
_DEARER = (0.25, 1.0, 4.0, 16.0)  # prices of a byte, by what one costs that is given up
_NEXT_TO_NOTHING = 1e-3  # of a step: what is faster by less is the same
_UNEVEN = 0.05  # of a step: what rows that are sent have to gain, which are simulated as if routing were even


def best_prices(
    request: Request, captures: Captures, share: Share, decide: Callable[[Prices], Shardings], asked: Prices
) -> Prices:
    """The prices for which ``decide`` gives the best layout among those tried, ``asked`` being the first.

    ``share`` gives the step of ``captures`` as one rank runs it.

    Raises:
        ZeroFXError: the step cannot run with the first layout.
    """
    limit = budget_bytes(request.options.memory_budget, request.machine)
    layouts = {decide(asked): asked}
    for exposed in _EXPOSED:
        layouts.setdefault(decide(Prices(exposed, asked.seconds_per_byte)), Prices(exposed, asked.seconds_per_byte))
    if len(layouts) == 1 and limit is None:
        return asked
    judge = Judge(request, captures, share)
    best, *others = [(judge.judge(layout), prices) for layout, prices in layouts.items()]
    for other in others:
        best = other if other[0].is_better(best[0]) else best
    if best[0].is_forced:
        for times in _DEARER:
            prices = Prices(best[1].exposed, times * best[0].seconds_per_byte)
            layout = decide(prices)
            if layout in layouts:
                continue
            layouts[layout] = prices
            judged = judge.judge(layout)
            best = (judged, prices) if judged.is_better(best[0]) else best
    return best[1]


def choose_sending(
    judge: Judge, decide: Callable[[Sequence[str]], Shardings], kinds: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """The kinds of experts whose rows ranks send each other, of ``kinds``, and why; ``decide`` has the layout in which
    those of some do.

    Raises: as ``best_prices``.
    """
    sent, why, best = list[str](), dict[str, str](), judge.judge(decide(()))
    for kind in kinds:
        judged = judge.judge(decide([*sent, kind]))
        is_better = judged.is_better(best, _UNEVEN)
        way = "sent" if is_better else "not sent"
        why[kind] = (
            f"rows are {way} to their experts: a step takes {judged} where they are, {best} where tokens are gathered"
            + ("" if is_better or not judged.is_better(best) else f"; uneven ones ask for {_UNEVEN:.0%} less")
        )
        sent, best = ([*sent, kind], judged) if is_better else (sent, best)
    return sent, why


def choose_copies(judge: Judge, copied: Shardings, roomy: Shardings, capacity: float) -> tuple[bool, str]:
    """True if a step is faster with copies of experts, as in ``copied``, than with room for ``capacity`` equal shares
    of their rows, as in ``roomy``; and why.

    Raises: as ``best_prices``.
    """
    with_copies, with_room = judge.judge(copied), judge.judge(roomy)
    is_better = with_copies.is_better(with_room)
    way = "copied to all ranks" if is_better else "not copied"
    return is_better, (
        f"experts with the most rows are {way}: a step takes {with_copies} where they are, {with_room} with room for "
        f"{capacity:.3g} equal shares of rows"
    )


@dataclass(frozen=True)
class _Judged:
    """A simulated layout: the bytes by which its peak misses the budget, and its seconds. ``is_forced``: whether it
    saves memory for the budget; ``seconds_per_byte``: the approximate cost of a byte then."""

    missed_bytes: float
    seconds: float
    is_forced: bool
    seconds_per_byte: float

    def __str__(self) -> str:
        beyond = f", {format_bytes(round(self.missed_bytes))} beyond the budget" if self.missed_bytes else ""
        return f"{format_seconds(self.seconds)}{beyond}"

    def is_better(self, other: _Judged, gain: float = _NEXT_TO_NOTHING) -> bool:
        """True if this fits where ``other`` does not, or misses by less, or is faster, by a part ``gain`` at least."""
        if self.missed_bytes or other.missed_bytes:
            return self.missed_bytes < other.missed_bytes
        return self.seconds < other.seconds * (1 - gain)


@dataclass
class Judge:
    """Simulates layouts of one step; ``limit``: bytes of the memory budget, if there is one."""

    request: Request
    captures: Captures
    share: Share
    limit: int | None = field(init=False)
    short: ShortSteps = field(init=False)

    def __post_init__(self) -> None:
        self.limit = budget_bytes(self.request.options.memory_budget, self.request.machine)
        self.short = ShortSteps(self.request, self.captures, on_cpu=self.request.machine.is_cpu)

    def judge(self, layout: Shardings) -> _Judged:
        shared = self.short.parts(layout).each(lambda part: self.share(self.request, *part))
        keeping = self.short.simulate_unlimited(self.request, shared)
        numbers = keeping.all
        if self.limit is None or numbers.peak_bytes <= self.limit:
            return _Judged(0.0, numbers.step_seconds, is_forced=False, seconds_per_byte=0.0)
        given_up = self.short.find_savings(self.request, shared, keeping, self.limit)
        price = given_up.seconds_per_byte or numbers.step_seconds / numbers.peak_bytes
        return _judge_totals(given_up.apply(numbers, self.limit), self.limit, price)


def _judge_totals(numbers: StepTotals, limit: int, seconds_per_byte: float) -> _Judged:
    missed = max(numbers.peak_bytes - limit, 0.0)
    missed = missed if missed > 0.5 else 0.0  # of a byte
    return _Judged(missed, numbers.step_seconds, is_forced=True, seconds_per_byte=seconds_per_byte)
