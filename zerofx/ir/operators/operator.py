"""Fields of the operator table's entries (``zerofx/ir/operators/table.py``).

Facts that torch has are not repeated: an operator's schema says which arguments are written or aliased, its tags that
it is pointwise or random, and ``torch.utils.flop_counter`` has the FLOPs of products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from torch import Tensor, fx

from zerofx.ir.operators.rows import RowKinds, Rows

Given = Mapping[fx.Node, Rows | None]
RowRule = Callable[[fx.Node, Given], RowKinds]
"""Where the rows lie in what a call gives, by where they lie in what it reads (``row_rules.py``)."""


class OperatorKind(Enum):
    """Kinds of operators, by which passes and analyses ask for them instead of by name."""

    PRODUCT = auto()  # of matrices of one dtype
    CUBIC = auto()  # other products and linear algebra: more time than to read and to write
    RESHAPE = auto()  # the same elements in the same order under another shape
    IDENTITY = auto()  # its input, for autograd alone
    SCATTER = auto()  # its input with other values in a view of it
    INDEXED = auto()  # by a list of indices, its second argument; a mask is as many as it has dimensions


class Traffic(Enum):
    """Memory traffic of a call."""

    ALL = auto()  # reads its inputs, writes its outputs
    ALLOCATES = auto()  # neither: what it gives is whatever the memory holds
    FILLS = auto()  # reads nothing: only the shape and the dtype of its input matter
    OVERWRITES = auto()  # writes its first argument without reading it
    PICKS = auto()  # reads from its first argument as many elements as it returns


class Inductor(Enum):
    """Inductor's lowering of an operator in a compiled region."""

    KERNEL = auto()  # a call of a kernel, of ATen's or Inductor's own: inputs and results lie in memory
    LOOP = auto()  # a loop over elements, which is inlined into its readers
    ROW_LOOP = auto()  # likewise, with reductions of rows on its way
    ROW_LOOPS = auto()  # likewise, in several loops
    REDUCTION = auto()  # a loop which inlines what it reduces, and stores its result


class View(Enum):
    """Aliasing of a result with its first argument, where the schema does not tell."""

    ALWAYS = auto()  # without an annotation: autograd is not to track it
    WHERE_STRIDES_ALLOW = auto()  # annotated, but a copy where the strides permit no such view
    WHERE_ALIKE = auto()  # annotated, but a copy where dtype, device or strides change, or one is asked for


class ResultLayout(Enum):
    """A kernel's layout of a result for which torch's fakes have other strides (torch 2.13)."""

    IN_ORDER = auto()  # of the dimensions
    OF_GRADIENT = auto()  # as the gradient, its first argument, of which it makes a copy in order if it is not
    OF_OPERANDS = auto()  # elementwise, of some arguments in an order of its own
    OF_IMAGES = auto()  # elementwise, where images have one place along a dimension
    OF_VIEW = auto()  # of a view of images, likewise
    OF_FORMAT = auto()  # on a CPU, the memory format that an argument suggests


@dataclass(frozen=True)
class OwnKernel:
    """A kernel of zerofx's own, by its name in ``ZEROFX_KERNELS``, that may take a call in a compiled region.

    ``inside`` takes the call's arguments and gives the bytes that the kernel holds, or None where it does not take it.
    """

    name: str
    inside: Callable[..., int | None]


class SmallerCall(NamedTuple):
    """A call of smaller sizes: how many parts of the whole it has, and its arguments."""

    num_parts: int
    args: list[Any]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class Smaller:
    """Calls to measure instead of one that takes long, where the memory that it holds on a CPU is linear in
    ``num_parts``.

    ``pairs``: to be tried in order. Two calls of different numbers of parts, of which a line follows; or the same call
    twice, where the whole holds as much as that one.
    """

    num_parts: int
    pairs: Sequence[tuple[SmallerCall, SmallerCall]]


@dataclass(frozen=True, kw_only=True)
class Operator:
    """The facts of an operator that nothing else says; defaults hold for what the table lacks.

    Attributes:
        kind: what it is to passes and analyses.
        is_pointwise: each element of the result comes of the same one of each input; also by torch's tag.
        per_element: FLOPs per element of the result, or of the largest operand if it is not pointwise; an exponential,
            a root or a division is one. 0: it moves values.
        of_lists: its first argument is a list, and FLOPs are per element of all of that.
        flops: of inputs and outputs, where no number per element tells.
        counted_as: the operator of the same arguments that torch's registry of FLOPs has.
        traffic: what it reads and writes.
        view: whether it shares memory, where the schema does not tell.
        inductor: what Inductor makes of it; a loop if it is pointwise.
        rows: how it is run on some rows at a time; None: it needs them all at once, unless it is pointwise.
        takes_shape: its second argument is the shape of its result.
        layout, layout_arguments: how its kernel lays its result out, and by which arguments.
        takes_dense: whether its kernel takes tensors to be contiguous in their memory format, unseen: who calls it in
            eager mode has made them so.
        inside: bytes that its kernel holds on a CPU beyond inputs and outputs, by the call's arguments, where calling
            it would not tell or take too long; each entry says why. Of others it is measured
            (``scheduler/cost/cpu/kernel_memory.py``).
        steps: what takes a call's time on a CPU, by the tensors that it is given and makes, if that is not to read and
            to write.
        smaller: for the arguments (tensors without values, which can be ``cut``) of a call that takes long on a CPU,
            those that are made in its place; what smaller ones of other operators tell is found out
            (``scheduler/cost/cpu/smaller_calls.py``).
        integers: integers that are made up for it, by the call's arguments (tensors without values), to be tried one
            after another where what it holds depends on them: the most is what counts. Zeros unless told otherwise.
        own_kernel: zerofx's kernel that may take it in a compiled region.
        copied_by_inductor: arguments, images, of which Inductor may make copies channel by channel.
        reads_exactly: arguments of which a small error makes a large one in the result: divisors, exponents, what a
            logarithm is taken of, or what is compared.
        draws_by_shape: how often it draws at random depends on shapes alone.
    """

    kind: OperatorKind | None = None
    is_pointwise: bool = False
    per_element: int = 1
    of_lists: bool = False
    flops: Callable[[Sequence[Tensor], Sequence[Tensor]], int] | None = None
    counted_as: str | None = None
    traffic: Traffic = Traffic.ALL
    view: View | None = None
    inductor: Inductor = Inductor.KERNEL
    rows: RowRule | None = None
    takes_shape: bool = False
    layout: ResultLayout | None = None
    layout_arguments: tuple[int, ...] = ()
    takes_dense: bool = False
    inside: Callable[..., int] | None = None
    steps: Callable[[Sequence[Any], Sequence[Any]], int] | None = None
    smaller: Callable[[Sequence[Any], Mapping[str, Any]], Smaller] | None = None
    integers: Callable[[Sequence[Any]], Iterable[int]] | None = None
    own_kernel: OwnKernel | None = None
    copied_by_inductor: tuple[int, ...] = ()
    reads_exactly: tuple[int, ...] = ()
    draws_by_shape: bool = False

    @property
    def is_cubic(self) -> bool:
        """True if it takes more time than reading and writing: products and linear algebra."""
        return self.kind in (OperatorKind.PRODUCT, OperatorKind.CUBIC)

    @property
    def is_loop(self) -> bool:
        """True if Inductor inlines it into its readers."""
        return self.inductor in (Inductor.LOOP, Inductor.ROW_LOOP, Inductor.ROW_LOOPS)
