"""Bring a traced joint graph into the form that passes expect: edits that need no knowledge of how it was traced."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from zerofx.errors import CaptureError
from zerofx.ir import ops
from zerofx.ir.aliasing import aliased_input
from zerofx.ir.facts import (
    Origin,
    Phase,
    Placeholder,
    Role,
    origin,
    placeholder,
    set_origin,
    set_placeholder,
    set_value,
    value,
)
from zerofx.ir.graph import StepGraph
from zerofx.ir.text import type_name


def refuse_sparse(graph: fx.Graph) -> None:
    """Raise a ``CaptureError`` for an embedding whose gradient would be sparse."""
    aten = torch.ops.aten
    places = {aten.embedding.default: 4, aten._embedding_bag.default: 5}  # of the argument "sparse"
    for node in graph.nodes:
        place = places.get(node.target)
        if place is not None and len(node.args) > place and node.args[place]:
            raise CaptureError(
                f"expected dense gradients, found an embedding with sparse=True in "
                f"{origin(node).layer or 'the model'}: call it with sparse=False; gradients are reduced as flat buffers"
            )


def refuse_mixed_products(graph: fx.Graph) -> None:
    """Raise a ``CaptureError`` for a matrix product of several dtypes, which fake tensors have a result for."""
    aten = torch.ops.aten
    products = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
    for node in graph.nodes:
        if node.target in products and len({value(one).dtype for one in node.all_input_nodes}) > 1:
            raise CaptureError(
                f"expected the factors of a matrix product to have one dtype, found "
                f"{', '.join(map(type_name, node.all_input_nodes))} in {origin(node).layer or 'the model'}: convert "
                f"the batch (x.float()), or what the layer is given, to the dtype of its weight"
            )


def check_results(graph: fx.Graph) -> None:
    """Let what reads a result of linear algebra read it after the check that raises an error where there is none.

        inverse, info = linalg_inv_ex(a)                             inverse, info = linalg_inv_ex(a)
        token = with_effects(token, _linalg_check_errors, info)  ->  checked = zerofx.checked(inverse, info)
        y = inverse @ x                                              y = checked @ x

    Torch orders checks by tokens, since nothing reads what they give. Other operators with tokens stay as they are.
    """
    output = graph.output_node()
    for node in graph.find_nodes(op="call_function", target=torch.ops.higher_order.with_effects):
        token, target, *about = node.args
        assert isinstance(token, fx.Node)
        if target is not torch.ops.aten._linalg_check_errors.default or not _check_result(graph, *about, **node.kwargs):
            continue
        for following in list(node.users):
            following.replace_all_uses_with(token)
            graph.erase_node(following)
        graph.erase_node(node)
        if token.op == "placeholder" and set(token.users) == {output}:
            output.args = ([None if one is token else one for one in output.args[0]],)  # type: ignore[union-attr]
            graph.erase_node(token)


def _check_result(graph: fx.Graph, info: fx.Node, name: str, *, is_matrix: bool = True) -> bool:
    """Put a result of the operator that gave ``info`` after a check; False if none is read."""
    made = info.args[0] if info.target is operator.getitem else None
    results = [one for one in made.users if one is not info and one.users] if isinstance(made, fx.Node) else []
    if not results:
        return False
    result = min(results, key=lambda one: one.args[1])  # type: ignore[arg-type,return-value]  # its place
    order = {node: i for i, node in enumerate(graph.nodes)}
    last = max(result, info, key=order.__getitem__)
    with graph.inserting_after(last):
        checked = graph.call_function(ops.checked, (result, info, name, is_matrix))
    checked.meta = dict(result.meta)
    result.replace_all_uses_with(checked, lambda reader: reader is not checked and order[reader] > order[last])
    return True


def assert_values(graph: fx.Graph, tangent: fx.Node, checks: Iterable[tuple[fx.Node, str]]) -> None:
    """Let backward begin after what the forward checks of values: where a check fails, a step ends before its updates.

    holds = all(condition)                               holds = all(condition)
    one = full([], 1.0)                            ->    one = asserted(full([], 1.0), holds, "...")
    gradient = mul(one, x)                               gradient = mul(one, x)
    """
    readers = set(tangent.users)
    for holds, text in checks:
        with graph.inserting_after(tangent):
            asserted = graph.call_function(ops.asserted, (tangent, holds, text))
        set_value(asserted, value(tangent))
        tangent.replace_all_uses_with(asserted, readers.__contains__)
        tangent = set_origin(asserted, origin(tangent))


def handed_out(graph: fx.Graph, node: fx.Node, shows: Callable[[torch.Tensor, torch.Tensor], bool]) -> fx.Node:
    """What the step hands out for ``node``: what it is a view of, or a copy.

    That is where the step has made that memory, and ``shows`` says that the view can be made of it.
    """
    source = node
    while (further := aliased_input(source)) is not None:
        source = further
    if source.op != "placeholder" and shows(value(source), value(node)):
        return source
    last = node if node.op != "placeholder" else list(graph.find_nodes(op="placeholder"))[-1]
    with graph.inserting_after(last):
        copied = graph.call_function(torch.ops.aten.clone.default, (node,))
    set_value(copied, node.meta["val"].clone())
    return set_origin(copied, origin(node))


def own_storage(graph: fx.Graph, loss: fx.Node) -> fx.Node:
    """The loss, or a copy of it where it is a view: the step hands it out, and would hold or change what it shows."""
    aten = torch.ops.aten
    source: fx.Node | None = loss
    while source is not None and source.target in (aten.detach.default, aten.alias.default):
        source = aliased_input(source)
    if source is not None and source.op != "placeholder" and aliased_input(source) is None:
        return loss
    with graph.inserting_after(loss):
        copied = graph.call_function(aten.clone.default, (loss,))
    set_value(copied, loss.meta["val"])
    return set_origin(copied, origin(loss))


def sum_gradients(graph: fx.Graph, gradients: list[fx.Node]) -> fx.Node:
    """The sum of a tied parameter's gradients, added up in the order in which backward makes them, as autograd does.

    Under each of its names a trace has summed what that name is used for.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    terms = (term for gradient in gradients for term in _terms(gradient))
    total, *others = sorted(terms, key=order.__getitem__)
    for late in others:
        with graph.inserting_after(late):
            added = graph.call_function(torch.ops.aten.add.Tensor, (total, late))
        set_value(added, late.meta["val"])
        total = set_origin(added, origin(late))
    return total


def _terms(gradient: fx.Node) -> Iterator[fx.Node]:
    """What a gradient is the sum of, where nothing else reads it."""
    is_sum = gradient.target is torch.ops.aten.add.Tensor and len(gradient.users) == 1 and not gradient.kwargs
    if is_sum and len(gradient.all_input_nodes) == 2:
        for term in gradient.all_input_nodes:
            yield from _terms(term)
    else:
        yield gradient


def real_parameters(step: StepGraph) -> None:
    """Let complex parameters come as real numbers: buckets hold those, and optimizers update them."""
    for node in list(step.placeholders(Role.PARAMETER)):
        fake = value(node)
        if not fake.is_complex():
            continue
        set_value(node, torch.view_as_real(fake.detach()))
        with step.graph.inserting_after(step.last_placeholder()):
            shown = step.graph.call_function(torch.ops.aten.view_as_complex.default, (node,))
        set_value(shown, fake.detach())
        set_origin(shown, Origin(placeholder(node).name.rpartition(".")[0], Phase.FORWARD))
        node.replace_all_uses_with(shown, partial(operator.is_not, shown))


def real_gradient(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A complex parameter's gradient as real numbers; one that is to be conjugated when it is read is so first."""
    aten, where = torch.ops.aten, origin(node)
    if not value(node).is_complex():
        return node
    for target in (aten.clone.default, aten.view_as_real.default)[0 if value(node).is_conj() else 1 :]:
        with graph.inserting_after(node):
            after = graph.call_function(target, (node,))
        fake = value(node).resolve_conj() if target is aten.clone.default else torch.view_as_real(value(node))
        node = set_origin(set_value(after, fake), where)
    return node


def replace_tangent(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """d(loss)/d(loss) = 1, made where backward begins: forward holds nothing for it. None where nothing reads it."""
    if not node.users:
        graph.erase_node(node)
        return None
    first = min(node.users, key={n: i for i, n in enumerate(graph.nodes)}.__getitem__)
    fake = node.meta["val"]
    with graph.inserting_before(first):
        one = graph.call_function(
            torch.ops.aten.full.default, ([], 1.0), {"dtype": fake.dtype, "device": fake.device, "pin_memory": False}
        )
    set_value(one, fake)
    set_origin(one, Origin(origin(first).layer, Phase.BACKWARD))
    node.replace_all_uses_with(one)
    graph.erase_node(node)
    return one


def name_kinds_of_devices(graph: fx.Graph) -> None:
    """Let operators make tensors on ``cuda``, the current one, where they were traced on ``cuda:1``.

    A rank's graph is that of the others, a step runs with its own device as the current one, and a plan that was saved
    on one device is for all of its kind.
    """

    def kind(arg: Any) -> Any:
        return torch.device(arg.type) if isinstance(arg, torch.device) else arg

    for node in graph.nodes:
        node.args, node.kwargs = map_aggregate(node.args, kind), map_aggregate(node.kwargs, kind)


def lift_constants(traced: fx.GraphModule, step: StepGraph) -> None:
    """Tensors that the model holds outside parameters and buffers become placeholders, after all others."""
    last = list(step.graph.find_nodes(op="placeholder"))[-1]
    for node in list(step.graph.find_nodes(op="get_attr")):
        name = str(node.target)
        constant = getattr(traced, name)
        step.constants[name] = constant
        existing = next((p for p in step.placeholders(Role.CONSTANT) if placeholder(p).name == name), None)
        if existing is None:
            with step.graph.inserting_after(last):
                existing = step.graph.placeholder(f"constant{name}")
            last = set_placeholder(existing, Placeholder(Role.CONSTANT, name))
            set_value(existing, node.meta.get("val", constant))
        node.replace_all_uses_with(existing)
        step.graph.erase_node(node)
