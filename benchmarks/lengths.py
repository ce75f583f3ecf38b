"""Batches of any length, padded to few: losses, bytes, tokens a second, and what building the rungs takes.

    python -m benchmarks.lengths                      # half an hour on two cores
    python -m benchmarks.lengths --parts speed --loaders filled --ladders fitted
    python -m benchmarks.lengths --parts losses speed --documents 300
    python -m benchmarks.lengths --parts builds --model llama

Two gloo ranks read a corpus of documents whose lengths are log-uniform from 17 to 512 tokens. ``losses``: the eager
backend within a budget, next to eager training in which each document is computed by itself. ``speed``: compiled, in
turns with batches of 512 tokens; batches are "filled", each of as many tokens, or "grouped", each of as many documents
of alike lengths, as ``group_by_length`` of transformers makes them, and padded to multiples of 64 or to rungs that are
"fitted" to the corpus (``zerofx.fitted_lengths``).
``builds``: one process, each rung built once with an empty cache, and both the whole ladder and its longest rung from
a cache that has them.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from benchmarks.lib.processes import Ranks
from gpt import GPT
from zerofx.ladder import Ladder

SHORTEST, LONGEST, VOCAB, TOKENS = 17, 512, 4096, 4096
RUNGS = range(64, LONGEST + 1, 64)
SAMPLES = {rung: TOKENS // rung for rung in RUNGS}
NUM_RANKS = 2
FIXED_EVERY = 4  # steps of the corpus for one of batches of 512 tokens
LOADERS, LADDERS = ("filled", "grouped"), ("even", "fitted")
MODELS = ("gpt", "llama")


def make(name: str) -> nn.Module:
    """The same model on every rank: a GPT, or a Llama of transformers."""
    torch.manual_seed(0)
    if name == "gpt":
        return GPT(vocab=VOCAB, dim=256, depth=6, heads=4, block=LONGEST)
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=LONGEST,
    ))  # fmt: skip


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """The optimizer of both."""
    return torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)


def documents_of(num_documents: int) -> list[int]:
    """How many tokens each document of the corpus has."""
    spread = torch.rand(num_documents, generator=torch.Generator().manual_seed(1))
    return (SHORTEST * (LONGEST / SHORTEST) ** spread).round().long().tolist()


def filled(lengths: Sequence[int], rungs: Sequence[int]) -> list[list[int]]:
    """Documents of each step of all ranks: the longest first, as many as have ``TOKENS`` a rank when padded."""
    groups: list[list[int]] = [[]]
    for length in sorted(lengths, reverse=True):
        if groups[-1] and len(groups[-1]) == NUM_RANKS * (TOKENS // Ladder(tuple(rungs)).rung_of(groups[-1][0])):
            groups.append([])
        groups[-1].append(length)
    return groups


def grouped(lengths: Sequence[int], samples: int) -> list[list[int]]:
    """The same by ``group_by_length`` of transformers: so many ``samples`` of alike lengths, in random order."""
    from transformers.trainer_pt_utils import get_length_grouped_indices

    each, draws = NUM_RANKS * samples, torch.Generator().manual_seed(1)
    ordered = [lengths[index] for index in get_length_grouped_indices(list(lengths), each, generator=draws)]
    return [ordered[start : start + each] for start in range(0, len(ordered) - each + 1, each)]


def batches(groups: Sequence[Sequence[int]], rank: int) -> Iterator[tuple[int, list[Tensor], Tensor, Tensor]]:
    """The tokens of the longest document of all ranks, this rank's documents, and these as a batch: ids and labels,
    those of what only fills a row left out."""
    generator = torch.Generator().manual_seed(1)
    for number in torch.randperm(len(groups), generator=generator).tolist():
        drawn = [torch.randint(VOCAB, (length + 1,), generator=generator) for length in groups[number]]
        documents = drawn[rank::NUM_RANKS] or drawn[-1:]
        ids, labels = (
            nn.utils.rnn.pad_sequence([document[part] for document in documents], True, value)
            for part, value in ((slice(None, -1), 0), (slice(1, None), -100))
        )
        yield max(groups[number]), documents, ids, labels


def terms(ids: Tensor, labels: Tensor) -> Tensor:
    """How many tokens of each document count."""
    return (labels != -100).sum(-1)


def summed(number: float) -> float:
    """Of all ranks."""
    total = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def losses(num_documents: int) -> dict[str, Any]:
    """How far losses are from those of eager training in which nothing is padded, and peaks from the budget."""
    rank = dist.get_rank()
    model = make("gpt")
    plain = copy.deepcopy(model)
    optimizer = adamw(plain)
    longest = torch.zeros((SAMPLES[LONGEST], LONGEST), dtype=torch.long)
    unlimited = _peak(longest)
    budget = int(0.8 * unlimited)
    step = zerofx.compile(model, adamw(model), backend="eager", lengths=SAMPLES, loss_terms=terms, memory_budget=budget)
    step.prepare(longest, longest)
    differences = []
    corpus = filled(documents_of(num_documents), RUNGS)
    for _, documents, ids, labels in batches(corpus, rank):
        count = summed(int(terms(ids, labels).sum()))
        optimizer.zero_grad()
        expected = 0.0
        for document in documents:
            loss = plain(document[None, :-1], document[None, 1:]) * (document.numel() - 1) / count
            loss.backward()
            expected += float(loss.detach())
        for parameter in plain.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
        optimizer.step()
        loss_of_all, wanted = summed(float(step(ids, labels)) / NUM_RANKS), summed(expected)
        differences.append(abs(loss_of_all - wanted) / wanted)
    peaks = {}
    for longest_of_all, _, ids, labels in batches(corpus, rank):
        rung = Ladder(tuple(RUNGS)).rung_of(longest_of_all)
        if rung not in peaks:
            peaks[rung] = step.measure(ids, labels, num_steps=2).peak_bytes["device"]
    return {
        "steps": len(differences), "relative difference of losses": max(differences), "rungs": len(step.rungs),
        "budget": budget, "largest measured peak": max(peaks.values()), "without a budget": unlimited,
    }  # fmt: skip


def _peak(longest: Tensor) -> int:
    """What a step of the longest takes without a budget."""
    model = make("gpt")
    step = zerofx.compile(model, adamw(model), backend="eager", loss_terms=terms)
    step.prepare(longest, longest)
    peak = step.plan.peak_bytes["device"]
    step.close()
    return peak


def speed(num_documents: int, name: str, loader: str, ladder: str) -> dict[str, Any]:
    """Tokens a second of the corpus, and of batches of 512 tokens between its steps.

    ``loader`` gives every step as many tokens (``"filled"``), or as many documents (``"grouped"``).
    """
    rank, lengths = dist.get_rank(), documents_of(num_documents)
    rungs = zerofx.fitted_lengths(lengths) if ladder == "fitted" else tuple(RUNGS)
    longest = TOKENS // LONGEST
    samples = {rung: TOKENS // rung if loader == "filled" else longest for rung in rungs}
    groups = filled(lengths, rungs) if loader == "filled" else grouped(lengths, longest)
    model = make(name)
    step = zerofx.compile(model, adamw(model), lengths=samples, loss_terms=_terms_of(name))
    full = torch.randint(VOCAB, (longest, LONGEST))
    step.prepare(**_named(name, full, full))
    for rung in rungs:  # what is taken on first use
        ids = torch.randint(VOCAB, (samples[rung], rung))
        step(**_named(name, ids, ids))
    seconds = {"corpus": 0.0, "fixed": 0.0}
    tokens = {"corpus": 0.0, "fixed": 0.0}
    for number, (_, _, ids, labels) in enumerate(batches(groups, rank)):
        seconds["corpus"] += _seconds(step, _named(name, ids, labels))
        tokens["corpus"] += summed(int((labels != -100).sum()))
        if number % FIXED_EVERY == 0:
            seconds["fixed"] += _seconds(step, _named(name, full, full))
            tokens["fixed"] += NUM_RANKS * full.numel()
    padded_to = [Ladder(rungs).rung_of(max(group)) for group in groups]
    padded = sum(NUM_RANKS * samples[rung] * rung for rung in padded_to)
    rates = {
        "corpus": tokens["corpus"] / seconds["corpus"], "with padding": padded / seconds["corpus"],
        "fixed": tokens["fixed"] / seconds["fixed"],
    }  # fmt: skip
    return {
        "batches": loader, "rungs": rungs, "steps": len(groups),
        **{f"tokens a second, {what}": rate for what, rate in rates.items()},
        "ratio": rates["corpus"] / rates["fixed"], "ratio with padding": rates["with padding"] / rates["fixed"],
        "part that is padding": 1 - tokens["corpus"] / padded,
    }  # fmt: skip


def _seconds(step: zerofx.Step, batch: dict[str, Tensor]) -> float:
    """What a step of all ranks takes."""
    dist.barrier()
    began = time.perf_counter()
    step(**batch)
    dist.barrier()
    return time.perf_counter() - began


def _named(name: str, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return {"tokens": ids, "targets": labels} if name == "gpt" else {"input_ids": ids, "labels": labels}


def _terms_of(name: str) -> Any:
    if name == "gpt":
        return lambda tokens, targets: (targets != -100).sum(-1)
    return lambda input_ids, labels: (labels[:, 1:] != -100).sum(-1)


def builds(name: str, lengths: list[int]) -> dict[str, Any]:
    """Seconds to build the steps of some lengths, and of all that a process does until they are there."""
    model = make(name)
    step = zerofx.compile(model, adamw(model), lengths=lengths)
    ids = torch.randint(VOCAB, (8, max(lengths)))
    began, before = time.perf_counter(), _cpu_seconds()
    step.prepare(**_named(name, ids, ids))
    return {
        "built": time.perf_counter() - began, "CPU seconds": _cpu_seconds() - before,
        "since start": time.time() - float(os.environ["BEGAN"]),
    }  # fmt: skip


def _cpu_seconds() -> float:
    """Of this process, and of compilers that it has waited for."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def print_builds(name: str, place: Path) -> None:
    """What the longest rung takes to build, and all of them, with an empty cache and with one that has them."""
    for start in ("first", "second"):
        taken = []
        for lengths in ([LONGEST], list(RUNGS)):
            request = {"part": "builds", "name": name, "lengths": lengths}
            taken.append(answer(request, 1, 2, place / f"{name}-of-{len(lengths)}"))
            print(f"{name}, {start} start, {len(lengths)} rungs: {json.dumps(taken[-1])}", flush=True)
        longest, ladder = taken
        for what in ("built", "CPU seconds"):
            further = (ladder[what] - longest[what]) / (len(RUNGS) - 1)
            print(f"{what}: a further rung takes {further:.2f}, {further / longest[what]:.2f} of the first", flush=True)


def work(request: dict[str, Any]) -> None:
    """What a process does that ``request`` is given to."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if num_ranks > 1:
        place = f"file://{os.environ['STORE']}"
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=num_ranks)
    torch.manual_seed(rank)
    parts: dict[str, Callable[..., dict[str, Any]]] = {"losses": losses, "speed": speed, "builds": builds}
    part = parts[request.pop("part")]
    answers.write(json.dumps(part(**request)) + "\n")


def answer(request: dict[str, Any], num_ranks: int, num_threads: int, folder: Path) -> dict[str, Any]:
    """What rank 0 answers to a request."""
    own = {"ZEROFX_CACHE_DIR": str(folder / "zerofx"), "BEGAN": str(time.time())}
    ranks = Ranks(request["part"], "benchmarks.lengths", request, num_ranks, num_threads, folder / "inductor", own)
    try:
        answers: list[dict[str, Any]] = ranks.read()
    finally:
        ranks.close()
    return answers[0]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Batches of any length, padded to few.")
    parser.add_argument("--parts", nargs="+", default=["losses", "speed", "builds"])
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--loaders", nargs="+", choices=LOADERS, default=LOADERS, help="of speed")
    parser.add_argument("--ladders", nargs="+", choices=LADDERS, default=LADDERS, help="of speed")
    parser.add_argument("--model", choices=MODELS, help="of speed, by default gpt; of builds, by default both")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if "losses" in options.parts:
            request = {"part": "losses", "num_documents": options.documents}
            print(json.dumps(answer(request, NUM_RANKS, 1, place), indent=1), flush=True)
        if "speed" in options.parts:
            for loader, ladder in product(options.loaders, options.ladders):
                request = {"part": "speed", "num_documents": options.documents, "name": options.model or "gpt"}
                request |= {"loader": loader, "ladder": ladder}
                print(json.dumps(answer(request, NUM_RANKS, 1, place), indent=1), flush=True)
        if "builds" in options.parts:
            for name in MODELS if options.model is None else [options.model]:
                print_builds(name, place)


if __name__ == "__main__":
    if "RANK" in os.environ:
        work(json.loads(sys.argv[1]))
    else:
        main()
