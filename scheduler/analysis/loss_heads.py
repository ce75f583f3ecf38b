"""Find loss heads: the projection to logits, its log-softmax and the loss, forward and backward.

They are found by operators and shapes, whatever the model calls them. Logits are often the largest values of a step,
and each row of them only meets its own target: ``passes/tile.py`` makes, uses and drops them a few rows at a time.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.ir.edit import consumers
from zerofx.ir.facts import tensor
from zerofx.ir.graph import StepGraph
from zerofx.ir.operators.operator import OperatorKind
from zerofx.ir.operators.table import facts_of

_aten = torch.ops.aten
MEAN, SUM = 1, 2  # torch's numbers of the reductions of a loss
_SUMMABLE = frozenset({torch.float32, torch.float64, torch.bfloat16})  # a tile's loss may leave float16's range
_NUM_COUNTS = 3
MIN_ROWS = 128  # below as many rows to a tile, matrix products lose more than tiles can save
MIN_CLASSES = 1024  # and below as many classes, of which there are more
_CLASS_TILES = (8, 32)


@dataclass(frozen=True)
class ForwardHead:
    """The nodes of one projection [rows, classes] with its loss, in an evaluation.

    ``cast`` converts the logits, where the loss is taken in another dtype.
    """

    product: fx.Node
    cast: fx.Node | None
    softmax: fx.Node
    loss: fx.Node

    @property
    def num_rows(self) -> int:
        return int(tensor(self.product).shape[0])

    @property
    def num_classes(self) -> int:
        return int(tensor(self.product).shape[1])

    @property
    def has_classes(self) -> bool:
        """True if it can be tiled over its classes too."""
        return False

    @property
    def num_bytes(self) -> int:
        """Bytes of all logits, in the dtype of the loss."""
        return tensor(self.softmax).numel() * tensor(self.softmax).element_size()

    @property
    def weight_bytes(self) -> int:
        """Bytes of what is summed up over the tiles."""
        return 0

    def tile_counts(self) -> list[int]:
        """Numbers of tiles worth trying: about those with which a tile's logits are as large as the summed gradients.

        With fewer, logits still dominate; with more, only what is summed up is left.
        """
        even = max(2, self.num_bytes // max(1, self.weight_bytes))
        counts = [2**power for power in range(1, 16) if self.num_rows >= 2**power * MIN_ROWS]
        return [count for count in counts if count <= 4 * even][-_NUM_COUNTS:]

    def class_counts(self) -> list[int]:
        """Numbers of tiles of classes worth trying; none where the products of each would be too narrow."""
        return [n for n in _CLASS_TILES if self.has_classes and self.num_classes >= n * MIN_CLASSES]


@dataclass(frozen=True)
class LossHead(ForwardHead):
    """The same with its backward.

    ``grad_cast`` converts the logits' gradient, where the loss is taken in another dtype. ``by_row`` are backward's
    products that have a row for each of the gradient's; ``over_rows`` sum over the rows. ``late`` is what these read of
    forward that is made after ``grad_loss``, in order: where ranks share a computation, a value is brought from one
    placement to another where it is read.
    """

    grad_loss: fx.Node
    grad_softmax: fx.Node
    grad_cast: fx.Node | None
    by_row: tuple[fx.Node, ...]
    over_rows: tuple[fx.Node, ...]
    late: tuple[fx.Node, ...]

    @property
    def has_classes(self) -> bool:
        """True if it can be tiled over its classes too: the softmax is in float32, and a bias has one element a
        class."""
        bias = [tensor(arg) for arg in self.product.args[:-2] if isinstance(arg, fx.Node)]
        return tensor(self.softmax).dtype == torch.float32 and all(
            vector.shape == (self.num_classes,) for vector in bias
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of what is summed up over the tiles."""
        return sum(tensor(node).numel() * sum_dtype(tensor(node).dtype).itemsize for node in self.over_rows)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts of a sum are added up that has ``dtype`` itself."""
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype


def find_heads(step: StepGraph) -> list[LossHead]:
    """All heads of a training step that can be tiled."""
    order = step.positions()
    heads = (_head(node, order) for node in step.calls() if node.target is _aten.nll_loss_backward.default)
    return [head for head in heads if head is not None]


def find_forward_heads(step: StepGraph) -> list[ForwardHead]:
    """All heads of an evaluation that can be tiled: their logits are read for their loss alone."""
    heads = []
    for loss in (node for node in step.calls() if node.target is _aten.nll_loss_forward.default):
        softmax = loss.args[0]
        if isinstance(softmax, fx.Node) and set(softmax.users) == {loss}:
            logits = _logits(softmax, loss.args[2], loss.args[3])
            if logits is not None:
                heads.append(ForwardHead(*logits, softmax, loss))
    return heads


def find_logits(step: StepGraph) -> set[fx.Node]:
    """The products whose results are the logits of a log-softmax, whether or not they can be tiled."""
    softmaxes = (node for node in step.calls() if node.target is _aten._log_softmax.default)
    products = (_logits_product(softmax)[0] for softmax in softmaxes)
    return {product for product in products if product is not None}


def _logits(softmax: fx.Node, weights: object, reduction: object) -> tuple[fx.Node, fx.Node | None] | None:
    """The product that makes the logits of a loss, and their conversion, where those are read for a softmax alone."""
    if softmax.target is not _aten._log_softmax.default or weights is not None or reduction not in (MEAN, SUM):
        return None
    if softmax.args[1] not in (1, -1) or tensor(softmax).dtype not in _SUMMABLE:
        return None
    product, cast = _logits_product(softmax)
    if product is None or tensor(product).shape != tensor(softmax).shape:
        return None
    if set(consumers(product)) != {cast or softmax} or (cast is not None and set(consumers(cast)) != {softmax}):
        return None
    return product, cast


def _head(grad_loss: fx.Node, order: dict[fx.Node, int]) -> LossHead | None:
    softmax = grad_loss.args[1]
    logits = _logits(softmax, grad_loss.args[3], grad_loss.args[4]) if isinstance(softmax, fx.Node) else None
    if logits is None:
        return None
    assert isinstance(softmax, fx.Node)
    product, cast = logits
    losses = [user for user in softmax.users if user.target is _aten.nll_loss_forward.default]
    grads = [user for user in grad_loss.users if user.target is _aten._log_softmax_backward_data.default]
    if len(losses) != 1 or len(grads) != 1 or set(softmax.users) != {losses[0], grad_loss, grads[0]}:
        return None
    if losses[0].args[1:5] != grad_loss.args[2:6] or set(grad_loss.users) != set(grads):
        return None
    if not _is_first_used_after(losses[0], grad_loss, order):
        return None
    readers, grad_cast = consumers(grads[0]), None
    if len(readers) == 1 and _is_cast(readers[0]):
        grad_cast, readers = readers[0], consumers(readers[0])
    sources = _same_matrix(grad_cast or grads[0], tensor(grads[0]).shape)
    by_row = [n for n in readers if n.target is _aten.mm.default and n.args[0] in sources and n.args[1] not in sources]
    over_rows = [n for n in readers if n not in by_row]
    if not readers or not all(_sums_rows(node, sources) for node in over_rows):
        return None
    late = _sources_from(grad_loss, [node.args[1] for node in readers if node.target is _aten.mm.default], order)
    if grad_loss in late:
        return None
    return LossHead(
        product, cast, softmax, losses[0], grad_loss, grads[0], grad_cast, tuple(by_row), tuple(over_rows), late
    )


def _sources_from(place: fx.Node, values: list[object], order: dict[fx.Node, int]) -> tuple[fx.Node, ...]:
    """The nodes from ``place`` on that ``values`` depend on, in order."""
    late: set[fx.Node] = set()
    pending = [value for value in values if isinstance(value, fx.Node)]
    while pending:
        node = pending.pop()
        if order[node] >= order[place] and node not in late:
            late.add(node)
            pending.extend(node.all_input_nodes)
    return tuple(sorted(late, key=order.__getitem__))


def _logits_product(softmax: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The product that gives a softmax its logits, and the conversion between them."""
    source, cast = _skip_reshapes(softmax.args[0]), None
    if _is_cast(source):
        cast, source = source, _skip_reshapes(source.args[0])
    is_product = source.target in (_aten.mm.default, _aten.addmm.default) and not source.kwargs
    return (source if is_product else None), cast


def _is_cast(node: fx.Node) -> bool:
    """True if a node only changes the dtype; backward's casts name the layout and the device, too."""
    if node.target is not _aten._to_copy.default or not set(node.kwargs) <= {"dtype", "layout", "device"}:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return tensor(node).layout == tensor(source).layout and tensor(node).device == tensor(source).device


def _is_reshape(node: fx.Node) -> bool:
    return facts_of(node.target).kind is OperatorKind.RESHAPE


def _skip_reshapes(node: object) -> fx.Node:
    assert isinstance(node, fx.Node)
    while _is_reshape(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def _same_matrix(node: fx.Node, shape: torch.Size) -> set[fx.Node]:
    """Of ``node``, which may have its rows in several dimensions, and its reshapes those of a matrix's shape."""
    same: set[fx.Node] = set()
    pending = [node]
    while pending:
        source = pending.pop()
        if tensor(source).shape == shape:
            same.add(source)
        pending.extend(user for user in source.users if _is_reshape(user))
    return same


def _sums_rows(node: fx.Node, sources: set[fx.Node]) -> bool:
    """True if ``node`` is t(gradient) times a matrix that has the same rows, or the sum of the gradient's rows."""
    if node.target is _aten.mm.default:
        left, right = node.args
        assert isinstance(left, fx.Node)
        return left.target is _aten.t.default and left.args[0] in sources and right not in sources
    return node.target is _aten.sum.dim_IntList and node.args[0] in sources and node.args[1] == [0]


def _is_first_used_after(loss: fx.Node, place: fx.Node, order: dict[fx.Node, int]) -> bool:
    """True if nothing before ``place`` reads the loss, so that its value can be computed there."""
    total = next((user for user in loss.users if user.args[1] == 1), None)
    if total is not None and set(total.users) != {place}:
        return False
    values = [user for user in loss.users if user.target is operator.getitem and user.args[1] == 0]
    return all(order[reader] > order[place] for value in values for reader in value.users)
