"""Replacements of zerofx for parts of torch and Inductor on machines with CPUs only: one entry each, with its switch.

An entry stays for as long as one run of ``python -m benchmarks.cpu_extras``, with it on and off in turn, shows that it
saves at least 3 % of a step's time, or a quarter of a cold start's, of a GPT or a Llama of 27M. ``docs/kernels.md`` has
what each saved.
"""

from __future__ import annotations

from dataclasses import dataclass

from zerofx.ir.op_kernels import attention, products

ATTENTION = attention.KERNEL
PRODUCTS = products.KERNEL
CHANNELS = "channels"
SHARED_BUCKETS = "in_place"

_KERNELS, _DISABLE = "ZEROFX_KERNELS", "ZEROFX_DISABLE"


@dataclass(frozen=True)
class Extra:
    """One entry of the table.

    ``instead_of`` is what runs where it is switched off; ``where`` is what acts, a file of the repository. ``switch``
    is the environment variable that takes its ``name``: ``ZEROFX_KERNELS`` names what is used, ``ZEROFX_DISABLE`` what
    is left out.
    """

    name: str
    does: str
    instead_of: str
    where: str
    switch: str


EXTRAS = (
    Extra(
        ATTENTION,
        "attention in float32 and its gradients, on operands that are packed once for a block of scores",
        "ATen's, which takes each product of blocks through a BLAS",
        "codegen/cpu/attention.py",
        _KERNELS,
    ),
    Extra(
        PRODUCTS,
        "matrix products in float32 on AMD's processors with AVX-512: by oneDNN, those that give a weight's gradient "
        "by blocks that are packed once",
        "ATen's, which are a BLAS's: MKL in torch's builds for x86",
        "codegen/cpu/products.py",
        _KERNELS,
    ),
    Extra(
        CHANNELS,
        "messages between ranks of one host are read out of the sender's memory (process_vm_readv)",
        "gloo's connections",
        "zerofx/runtime/comm/same_host/channels.py",
        _DISABLE,
    ),
    Extra(
        SHARED_BUCKETS,
        "buckets of parameters lie in memory that the ranks of a host share, and gathers copy nothing",
        "copies of the other ranks' slices",
        "zerofx/runtime/comm/same_host/shared.py",
        _DISABLE,
    ),
)
CPU_KERNELS = frozenset(extra.name for extra in EXTRAS if extra.switch == _KERNELS)
OPTIONAL = frozenset(extra.name for extra in EXTRAS if extra.switch == _DISABLE)


def cpu_kernels_in_use(asked: frozenset[str] | None) -> frozenset[str]:
    """The kernels among the extras that a compiled step on this machine's CPU uses.

    Args:
        asked: those that ``ZEROFX_KERNELS`` names; None for those that are on by default, which is all but products
            where the BLAS is faster.
    """
    if asked is None:
        asked = CPU_KERNELS if products.is_worth_it() else CPU_KERNELS - {PRODUCTS}
    return asked & (CPU_KERNELS if products.can_multiply() else CPU_KERNELS - {PRODUCTS})
