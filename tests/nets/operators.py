"""The net over operators: every differentiable entry of torch's operator database, trained next to eager PyTorch.

``python -m tests.nets.operators`` runs all of it and writes ``benchmarks/results/coverage_operators.json``. Records are
noted as they come: a sweep that was interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

import zerofx
from tests.nets.cases.operators import Factors, OperatorCase, OperatorSample, operator_cases, samples
from tests.nets.records import Outcome, Record, results_path, write_records
from tests.nets.workers import WorkerError, run_in_workers

_NUM_STEPS = 3
# What these hold depends on values: plans have room for the most, a norm that is large and a mask of all elements.
_BY_VALUES = ("matrix_exp", "masked_scatter")
_ORDER: list[Outcome] = ["exact", "refused", "wrong"]


def check(case: OperatorCase) -> Record | None:
    """The record of a case, which is that of its worst sample; None where eager mode itself has no result to repeat."""
    outcomes = [_outcome(case.name, number, sample) for number, sample in enumerate(samples(case))]
    compared = [outcome for outcome in outcomes if outcome is not None]
    if not compared:
        return None
    outcome, detail = max(compared, key=lambda one: _ORDER.index(one[0]))
    return Record(case.name, case.dtype, outcome, detail)


def _outcome(name: str, number: int, sample: OperatorSample) -> tuple[Outcome, str] | None:
    try:
        factors = sample.factors()
        expected = _train_plain(sample, factors)
        is_repeatable = not _differences(expected, _train_plain(sample, factors))
    except Exception:  # noqa: BLE001  # torch itself does not train this: there is nothing to compare with
        return None
    is_trained = any(" of parameter " in name for name in expected)
    if not is_repeatable or not is_trained:
        return None
    try:
        wrong = _compare(name, sample, factors, expected)
    except zerofx.InternalError as error:
        return "wrong", f"sample {number}: {error}"
    except zerofx.ZeroFXError as error:
        reason = str(error).splitlines()[0].removesuffix(", at").removesuffix(" at")
        other = "breaks there, too" if _breaks_in_torch_compile(sample, factors) else "does not"
        return "refused", f"{reason} (torch.compile(fullgraph=True) {other})"
    except Exception as error:  # noqa: BLE001  # whatever else escapes is what the net is for
        return "wrong", f"sample {number}: {type(error).__name__}: {error}"
    return ("wrong", f"sample {number}: {wrong}") if wrong else ("exact", "")


def _compare(name: str, sample: OperatorSample, factors: Factors, expected: dict[str, Tensor]) -> str:
    """What is wrong with the training of a sample; "" for nothing."""
    model = sample.model()
    optimizer = sample.optimizer(model)
    step = zerofx.compile(model, optimizer, 3, backend="eager")
    try:
        torch.manual_seed(3)
        losses = [step(factors).clone() for _ in range(_NUM_STEPS)]
        with step.full_parameters():
            differences = _differences(expected, _trained(losses, model, optimizer))
        measured, predicted = step.measure(factors, num_steps=1).peak_bytes["device"], step.plan.peak_bytes["device"]
    finally:
        step.close()
    if differences:
        return f"other bits: {differences[0]}"
    is_room_for_more = name in _BY_VALUES and measured < predicted
    if measured != predicted and not is_room_for_more:
        return f"another peak: {predicted} bytes predicted, {measured} measured"
    model = sample.model()
    zerofx.plan(model, sample.optimizer(model), (factors,), 3, machine="cpu", world_size=2, backend="eager")
    return ""


def _breaks_in_torch_compile(sample: OperatorSample, factors: Factors) -> bool:
    torch.compiler.reset()
    try:
        torch.compile(sample.model(), backend="aot_eager", fullgraph=True)(factors).backward()
    except Exception:  # noqa: BLE001  # however it breaks
        return True
    return False


def _train_plain(sample: OperatorSample, factors: Factors) -> dict[str, Tensor]:
    model = sample.model()
    optimizer = sample.optimizer(model)
    torch.manual_seed(3)
    losses = []
    for _ in range(_NUM_STEPS):
        optimizer.zero_grad()
        loss = model(factors)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return _trained(losses, model, optimizer)


def _trained(losses: Sequence[Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Losses, parameters, buffers and optimizer states, which have the gradients' bits, by name."""
    states = optimizer.state_dict()["state"]
    return {
        **{f"loss {number}": loss for number, loss in enumerate(losses)},
        **{name: tensor.clone() for name, tensor in model.state_dict().items()},
        **{
            f"{name} of parameter {number}": torch.as_tensor(state).clone()
            for number, of_parameter in states.items()
            for name, state in of_parameter.items()
            if state is not None
        },
    }


def _differences(expected: dict[str, Tensor], seen: dict[str, Tensor]) -> list[str]:
    """What is not the same, NaN being equal to NaN."""
    differences = [f"{name} on one side" for name in expected.keys() ^ seen.keys()]
    for name in expected.keys() & seen.keys():
        a, b = (
            tensor if tensor.layout is torch.strided else tensor.to_dense() for tensor in (expected[name], seen[name])
        )
        if a.shape != b.shape or a.dtype != b.dtype:
            differences.append(f"{name}: {a.dtype}{list(a.shape)} and {b.dtype}{list(b.shape)}")
        elif not torch.equal(a, b) and not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True):
            differences.append(f"{name} by {float((a - b).abs().nan_to_num(nan=torch.inf).max()):.1e}")
    return sorted(differences)


def run(cases: Sequence[OperatorCase], num_workers: int = 1) -> Iterator[Record]:
    """A record a case, in the order in which they end."""
    for case, result in run_in_workers(check, cases, num_workers):
        if isinstance(result, WorkerError):
            yield Record(case.name, case.dtype, "wrong", str(result))
        elif result is not None:
            yield result


def main() -> None:
    """The full sweep, or a part of it of which nothing is written but the notes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--only", help="names of entries, divided by commas")
    parser.add_argument("--dtype", help="float32 or bfloat16 alone")
    parser.add_argument("--notes", type=Path, default=Path(tempfile.gettempdir(), "zerofx_operators.jsonl"))
    parsed = parser.parse_args()
    cases = [case for case in operator_cases() if parsed.dtype in (None, case.dtype)]
    if parsed.only:
        cases = [case for case in cases if case.name in parsed.only.split(",")]
    lines = parsed.notes.read_text().splitlines() if parsed.notes.exists() else []
    records = {(record.name, record.variant): record for record in (Record(**json.loads(line)) for line in lines)}
    left = [case for case in cases if (case.name, case.dtype) not in records]
    with parsed.notes.open("a") as notes, tqdm(total=len(cases), initial=len(cases) - len(left), unit=" cases") as bar:
        for record in run(left, parsed.workers):
            notes.write(json.dumps(asdict(record)) + "\n")
            notes.flush()
            records[record.name, record.variant] = record
            bar.update()
    if not parsed.only and not parsed.dtype:
        write_records(results_path("operators"), records.values())
        parsed.notes.unlink()


if __name__ == "__main__":
    main()
