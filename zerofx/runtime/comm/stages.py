"""Agreement between the ranks of one stage of the axis pipe, who have one graph and one plan."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TypeVar

from zerofx.errors import ZeroFXError
from zerofx.runtime.comm.comparisons import check_equal
from zerofx.runtime.comm.control import Control
from zerofx.scheduler.plan.mesh import Mesh

T = TypeVar("T")


def agree_in_stages(control: Control, mesh: Mesh, purpose: str, value: str, what: str, hint: str) -> None:
    """Check that all ranks of each stage have the same ``value``. Collective.

    Raises:
        RankMismatchError: two of them have not, on all ranks.
    """
    if mesh.pipe == 1:
        control.agree(purpose, value, what, hint)
        return
    values = control.gather(value, purpose)
    for members in mesh.groups(mesh.stage_axes):
        check_equal([values[rank] for rank in members], what, hint)


def is_first_of_stage(control: Control, mesh: Mesh) -> bool:
    """True on the first rank of each stage, which does for all of it what rank 0 does without stages."""
    return control.rank in mesh.first_of_stages


def share_in_stages(
    control: Control,
    mesh: Mesh,
    purpose: str,
    make: Callable[[], T],
    choose: Callable[[Sequence[ZeroFXError]], ZeroFXError] = operator.itemgetter(0),
) -> T:
    """The result of ``make()`` on the first rank of each stage, on all ranks of that. Collective.

    Raises:
        ZeroFXError: some of them could not; that of which ``choose`` gives, on all ranks.
    """
    if mesh.pipe == 1:
        return control.share(purpose, make)
    first = mesh.members(control.rank, mesh.stage_axes)[0]

    def run_on_first() -> tuple[T | None, ZeroFXError | None]:
        try:
            return make() if control.rank == first else None, None
        except ZeroFXError as error:
            return None, error

    outcomes = control.gather(control.attempt(purpose, run_on_first), purpose)
    failures = [failure for _, failure in outcomes if failure is not None]
    if failures:
        raise choose(failures)
    shared: T = outcomes[first][0]
    return shared
