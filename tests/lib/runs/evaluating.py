"""Evaluate a case where its step has it, and in eager mode, and compare."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

import zerofx
from tests.lib.models import CASES, Case, batches
from tests.lib.runs.training import build, world


def step_of_case(case: Case, stage: int, **options: Any) -> zerofx.Step:
    """A step on the eager backend, unless options differ, of the case's model; this rank's generators are its own."""
    model = build(case)
    torch.manual_seed(world()[0])
    return zerofx.compile(model, case.optimizer(model), stage, loss_fn=case.loss_fn, **{"backend": "eager", **options})


def in_eager_mode(model: nn.Module, case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What plain code computes of a batch to evaluate a model; its modules are in the modes in which they were."""
    modes, fast = [(module, module.training) for module in model.modules()], torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # other kernels of torch's transformer layers, with other bits
    model.eval()
    with torch.no_grad():
        outputs = model(*args, **kwargs) if case.loss_fn is None else case.loss_fn(model(args[0]), *args)
    for module, mode in modes:
        module.training = mode
    torch.backends.mha.set_fastpath_enabled(fast)
    return outputs


def tensors_of(outputs: Any) -> dict[str, Tensor]:
    """The tensors in what a model returns, by their paths."""
    return {keystr(path): leaf for path, leaf in tree_flatten_with_path(outputs)[0] if isinstance(leaf, Tensor)}


def unlike(expected: Any, found: Any, tolerance: float = 0.0) -> list[str]:
    """What of two results is not the same, in words; `tolerance` is relative to a tensor's largest value."""
    ours, theirs = tensors_of(found), tensors_of(expected)
    if type(expected) is not type(found) or ours.keys() != theirs.keys():
        return [f"{type(found).__name__} with {list(ours)}, not {type(expected).__name__} with {list(theirs)}"]
    wrong = [f"{name} has a gradient" for name, tensor in ours.items() if tensor.requires_grad]
    for name, tensor in theirs.items():
        if ours[name].shape != tensor.shape or ours[name].dtype != tensor.dtype:
            wrong.append(f"{name} is {ours[name].dtype}{list(ours[name].shape)}")
            continue
        difference = (ours[name].double() - tensor.double()).abs().max().item() if tensor.numel() else 0.0
        limit = tolerance * max(tensor.double().abs().max().item(), 1e-3) if tensor.numel() else 0.0
        if not (torch.equal(ours[name], tensor) if not tolerance else difference <= limit):
            wrong.append(f"{name} is {difference} off")
    return wrong


def own_batches(case: Case, rank: int, steps: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """A case's batches with tensors of their own, which share no memory: that would be counted twice."""
    copied: list[tuple[tuple[Any, ...], dict[str, Any]]] = tree_map_only(
        Tensor, Tensor.clone, list(batches(case, rank, steps))
    )
    return copied


def evaluated(name: str, stage: int, steps: int = 2, tolerance: float = 0.0, **options: Any) -> list[str]:
    """What is wrong with a case's evaluation between steps, in words: values, peak, and the training after it."""
    case, (rank, _) = CASES[name], world()
    wrong: list[str] = []
    losses: list[list[Tensor]] = []
    states: list[dict[str, Tensor]] = []
    for evaluates in (False, True):
        step = step_of_case(case, stage, **options)
        *training, (args, kwargs) = own_batches(case, rank, 2 * steps + 1)
        losses.append([])
        for number, (batch, keywords) in enumerate(training):
            losses[-1].append(step(*batch, **keywords).clone())
            if number == steps - 1 and evaluates:
                wrong += checked(step, case, args, kwargs, tolerance)
        states.append(step.full_state_dict())
        step.close()
    wrong += [f"loss {i} is another" for i, (a, b) in enumerate(zip(*losses, strict=True)) if not torch.equal(a, b)]
    return wrong + [f"{key} is another" for key, tensor in states[0].items() if not torch.equal(tensor, states[1][key])]


def checked(
    step: zerofx.Step, case: Case, args: tuple[Any, ...], kwargs: dict[str, Any], tolerance: float = 0.0
) -> list[str]:
    """What is wrong with an evaluation: values, whether it leaves all else alone, and its peak."""
    generator, modes = torch.get_rng_state(), [module.training for module in step.model.modules()]
    held = step.tiers()
    outputs = step.evaluate(*args, **kwargs)
    wrong = [] if torch.equal(generator, torch.get_rng_state()) else ["the generator is in another state"]
    wrong += [] if modes == [module.training for module in step.model.modules()] else ["modules are in other modes"]
    wrong += [] if held == step.tiers() else [f"{step.tiers()} are held, not {held}"]
    if step.options.backend == "eager":
        measured = step.measure_evaluation(*args, num_steps=1, **kwargs).peak_bytes["device"]
        predicted = step.evaluation.plan.peak_bytes["device"]
        wrong += [] if measured == predicted else [f"{measured} bytes are taken, not {predicted}"]
    with step.full_parameters() as model:
        expected = in_eager_mode(model, case, args, kwargs)
    return wrong + unlike(expected, outputs, tolerance)
