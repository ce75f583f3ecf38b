"""Budgets in bytes that options give on a machine, and the tiers that values may leave the device for."""

from __future__ import annotations

from collections.abc import Mapping

from zerofx.choices import OffloadOption
from zerofx.errors import UsageError
from zerofx.scheduler.cost.machine import Machine
from zerofx.scheduler.plan.facts import Tier

GRADIENTS = "gradients"  # what can be offloaded by name


def budget_bytes(asked: int | float | None, machine: Machine) -> int | None:
    """A memory budget in bytes; a fraction is of the machine's device memory."""
    return int(asked * machine.device.memory_bytes) if isinstance(asked, float) else asked


def host_budget_bytes(asked: int | float | None, machine: Machine) -> int | None:
    """A host budget in bytes of one rank; a fraction is of its share of the machine's host memory."""
    return int(asked * machine.host_bytes_per_rank) if isinstance(asked, float) else asked


def tiers_for(offload: OffloadOption, machine: Machine) -> tuple[Tier, ...]:
    """The tiers that values may leave the device for, the first being filled first.

    On a CPU the host's memory is the device's: ``"auto"`` has nothing to gain there. What is asked for by name goes
    where it says, and nothing else leaves.

    Raises:
        UsageError: ``"nvme"`` is asked for on a machine that has none.
    """
    if offload == "nvme":
        _check_nvme(offload, machine)
    if offload == "host" or offload == "nvme":
        return (offload,)
    if isinstance(offload, Mapping) or offload == "none" or machine.is_cpu:
        return ()
    return ("host", "nvme") if machine.nvme is not None else ("host",)


def gradients_tier(offload: OffloadOption, machine: Machine) -> Tier | None:
    """The tier that gradients between micro-batches are asked to wait in by name; None if they are not.

    Raises:
        UsageError: it is ``"nvme"``, and the machine has none.
    """
    if not isinstance(offload, Mapping):
        return None
    if offload[GRADIENTS] == "nvme":
        _check_nvme(offload, machine)
        return "nvme"
    return "host"


def _check_nvme(offload: OffloadOption, machine: Machine) -> None:
    if machine.nvme is None:
        raise UsageError(
            f"expected a machine with nvme for offload={offload!r}, found {machine.name}: give its row one"
        )
