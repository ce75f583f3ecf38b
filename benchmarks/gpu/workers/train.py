"""Plain torch and zerofx from the same values, on the same batches.

python -m benchmarks.gpu.workers.train '{"model": "gpt", "backend": "eager", "masters": true, ...}' FOLDER
"""

from __future__ import annotations

import copy
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zerofx
from benchmarks.gpu.case import Answers
from benchmarks.lib.models import Shape, llama
from benchmarks.lib.turn import turn
from gpt import GPT
from text import VOCAB, Batches, load_source
from train_gpt import BLOCK, DEPTH, DIM, HEADS

LEARNING_RATE = 1e-3
LLAMA = Shape("llama", VOCAB, DIM, DEPTH, HEADS, BLOCK, sequences=1, inner=352, num_kv_heads=2)

Batch = dict[str, Tensor]


def make_model(name: str, device: torch.device) -> nn.Module:
    """The model in fp32, with the values of seed 0."""
    torch.manual_seed(0)
    model = llama(LLAMA) if name == "llama" else GPT(VOCAB, DIM, DEPTH, HEADS, BLOCK)
    return model.to(device)


def make_batches(name: str, num_steps: int, num_sequences: int, device: torch.device) -> list[Batch]:
    """The batches of all steps: the same in each process."""
    listed = []
    for tokens, targets in itertools.islice(Batches(load_source()[0], BLOCK, num_sequences), num_steps):
        names = {"input_ids": tokens, "labels": tokens} if name == "llama" else {"tokens": tokens, "targets": targets}
        listed.append({key: value.to(device) for key, value in names.items()})
    return listed


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)


def plain(model: nn.Module, *, masters: bool) -> Callable[[Batch], Tensor]:
    """A step of plain torch in bfloat16. ``masters``: the optimizer has fp32 values, which are rounded for each step;
    buffers stay as they are."""
    if not masters:
        model.to(torch.bfloat16)
    optimizer = adamw(model.parameters())

    def step(batch: Batch) -> Tensor:
        if not masters:
            loss = loss_of(model(**batch))
            loss.backward()
        else:
            low = {name: p.detach().bfloat16().requires_grad_() for name, p in model.named_parameters()}
            loss = loss_of(torch.func.functional_call(model, low, (), batch))
            loss.backward()
            for name, parameter in model.named_parameters():
                grad = low[name].grad
                assert grad is not None
                parameter.grad = grad.float()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def loss_of(outputs: Any) -> Tensor:
    loss = outputs if isinstance(outputs, Tensor) else outputs.loss
    assert isinstance(loss, Tensor)
    return loss


def train(step: Callable[[Batch], Tensor], listed: list[Batch]) -> tuple[list[float], float]:
    """The loss of each step, and the seconds of one, those of the first left out."""
    first = float(step(listed[0]))
    began = time.perf_counter()
    losses = [step(batch) for batch in listed[1:]]
    rest = [float(loss) for loss in losses]  # waits for the device
    return [first, *rest], (time.perf_counter() - began) / max(len(rest), 1)


def main() -> None:
    request, answers = json.loads(sys.argv[1]), Answers(Path(sys.argv[2]))
    device = torch.device(request["device"])
    model = make_model(request["model"], device)
    listed = make_batches(request["model"], request["num_steps"], request["num_sequences"], device)
    with turn():
        losses, seconds = train(plain(copy.deepcopy(model), masters=request["masters"]), listed)
    answers.add(torch_losses=losses, torch_seconds=seconds)
    if not request["masters"]:
        model.to(torch.bfloat16)
    step = zerofx.compile(
        model,
        adamw(model.parameters()),
        precision="bf16" if request["masters"] else None,
        backend=request["backend"],
        example_batch=listed[0],
    )
    with turn():
        losses, seconds = train(lambda batch: step(**batch), listed)
        answers.add(losses=losses, seconds=seconds)
        measured = step.measure(num_steps=3, **listed[0])
    answers.add(predicted_bytes=step.plan.peak_bytes["device"], measured_bytes=measured.peak_bytes["device"])
    step.close()


if __name__ == "__main__":
    main()
