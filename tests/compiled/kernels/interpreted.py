"""What the tests run where Triton interprets kernels. What is needed of Triton is imported when it is called."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch

from tests.lib.optimizers import CASES, Runner
from zerofx.optimizers import UpdateProgram

_aten = torch.ops.aten


def launch(module: str, name: str, *args: Any) -> Any:
    """What the launch of that name returns for copies of ``args``, and the copies, which it may write to."""
    copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
    return getattr(import_module(f"zerofx.codegen.kernels.{module}"), name)(*copies), copies


def region_of(program: UpdateProgram, low: torch.dtype) -> Callable[[list[Any]], tuple[()]]:
    """An update region as a step has it: the gradient in ``low`` is unscaled and cast, the new values are cast back.

    Its inputs: parameter, gradient, states, 0-dim states, the parameter in ``low``, and the tuple of scalars.
    """
    num_tensors = len(program.states) + len(program.tensor_scalars)

    def region(inputs: list[Any]) -> tuple[()]:
        param, grad, *states, copy, hyper = inputs
        inputs.clear()
        _aten.div_.Tensor(grad, 2)
        if low != program.dtype:
            grad = _aten._to_copy.default(grad, dtype=program.dtype)
        given = iter([param, grad, *states, *(operator.getitem(hyper, n) for n in range(program.num_scalars))])
        assert len(states) == num_tensors
        known = {node: next(given) for node in program.graph.nodes if node.op == "placeholder"}
        for node in program.graph.nodes:
            if node.op == "call_function":
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = node.target(*args, **kwargs)
        _aten.copy_.default(copy, param)
        return ()

    return region


def trained(
    case: str, fused: bool, low: torch.dtype, numel: int, num_steps: int
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Named values of an optimizer's flat update after some steps, with torch and with the kernel."""
    from zerofx.codegen.kernels.update import make_update_kernel

    copy = torch.zeros(numel, dtype=low)

    def run(
        program: UpdateProgram,
        param: torch.Tensor,
        grad: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        values: tuple[float, ...],
    ) -> None:
        tensors = [states[spec.name] for spec in (*program.states, *program.tensor_scalars)]
        scaled = (2 * grad).to(low)
        inputs = [param, scaled, *tensors, copy, values]
        kernel = make_update_kernel(region_of(program, low), inputs, dying={1})
        before = param._version
        kernel(inputs)
        assert not inputs and param._version == before + 1
        # The interpreter cuts bfloat16 off where a GPU rounds it.
        torch.testing.assert_close(copy, param.to(low), rtol=2**-7 if low == torch.bfloat16 else 0.0, atol=1e-30)
        assert torch.equal(scaled, (2 * grad).to(low)), "what nothing reads later is not stored"

    torch.manual_seed(0)  # whatever this process ran before
    start, other = torch.randn(numel), torch.nn.Parameter(torch.randn(5, 3))
    reference = Runner(CASES[case]([other]), start.clone(), fused=fused)
    found = Runner(CASES[case]([other]), start.clone(), fused=fused, run=run)
    for _ in range(num_steps):
        grad = torch.randn(numel).to(low).float()
        reference.step(grad.clone())
        found.step(grad.clone())
    return [("param", reference.param, found.param), *((n, v, found.states[n]) for n, v in reference.states.items())]


def updated(stage: int, precision: str | None, num_micro_batches: int) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """What the update regions of a step leave in the memory that is read later, on ATen and by their kernels."""
    from tests.lib.graphs import TwoBlocks, prepare
    from zerofx.codegen.kernels.choose import function_of, update_kernels
    from zerofx.codegen.regions import cut, regions_of
    from zerofx.ir.facts import value

    model = TwoBlocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    prepared = prepare(
        model, stage=stage, precision=precision, optimizer=optimizer, num_micro_batches=num_micro_batches
    )
    regions = [region for region in regions_of(cut(prepared.run().step)) if region.is_update]
    kernels = update_kernels(regions)
    assert not kernels.reasons and regions
    named = []
    for region in regions:
        given: list[Any] = []
        for node in region.inputs:
            fake = value(node)
            given.append(
                torch.rand(fake.shape).to(fake.dtype) if isinstance(fake, torch.Tensor) else (0.5,) * len(fake)
            )
        copies = [one.clone() if isinstance(one, torch.Tensor) else one for one in given]
        function_of(region)(list(given))
        kernels.kernels[region.key](list(copies))
        for node, one, other in zip(region.inputs, given, copies, strict=True):
            if node.op == "placeholder" and isinstance(one, torch.Tensor):
                named.append((node.name, one, other))
    return named


def compiled_losses(names: str) -> tuple[list[float], Mapping[str, str], int]:
    """The losses of a compiled step that uses the kernels of these names and clips, why updates have none, and how many
    have."""
    import warnings

    import zerofx
    from tests.lib.graphs import TwoBlocks

    warnings.simplefilter("ignore")
    os.environ["ZEROFX_KERNELS"] = names
    torch.manual_seed(0)
    model = TwoBlocks()
    step = zerofx.compile(model, torch.optim.AdamW(model.parameters(), lr=0.1), stage=3, max_grad_norm=0.5)
    losses = [float(step(torch.ones(2, 4))) for _ in range(3)]
    updates = step.compiled.updates
    return losses, updates.reasons, len(updates.kernels)
