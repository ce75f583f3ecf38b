"""Batches of any length, padded to few: losses, bytes, tokens a second, and what building the rungs takes.

    python -m benchmarks.lengths                      # a quarter of an hour on two cores
    python -m benchmarks.lengths --parts losses speed --documents 300
    python -m benchmarks.lengths --parts builds --model llama

Two gloo ranks read a corpus of documents whose lengths are log-uniform from 17 to 512 tokens, in batches of about as
many tokens each, as loaders that sort by length make them. ``losses``: the eager backend within a budget, next to eager
training in which each document is computed by itself. ``speed``: compiled, in turns with batches of 512 tokens.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from benchmarks.lib.processes import Ranks
from gpt import GPT

SHORTEST, LONGEST, VOCAB, TOKENS = 17, 512, 4096, 4096
RUNGS = range(64, LONGEST + 1, 64)
SAMPLES = {rung: TOKENS // rung for rung in RUNGS}
NUM_RANKS = 2
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


def batches(num_documents: int, rank: int) -> Iterator[tuple[list[Tensor], Tensor, Tensor]]:
    """This rank's documents, and as a batch: ids and labels, those of what only fills a row left out."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.rand(num_documents, generator=generator)
    lengths = (SHORTEST * (LONGEST / SHORTEST) ** spread).round().long().sort().values.tolist()
    groups: list[list[int]] = [[]]
    for length in lengths:
        rung = -(-length // 64) * 64
        if groups[-1] and (-(-groups[-1][-1] // 64) * 64 != rung or len(groups[-1]) == NUM_RANKS * SAMPLES[rung]):
            groups.append([])
        groups[-1].append(length)
    for number in torch.randperm(len(groups), generator=generator).tolist():
        drawn = [torch.randint(VOCAB, (length + 1,), generator=generator) for length in groups[number]]
        documents = drawn[rank::NUM_RANKS] or drawn[-1:]
        ids, labels = (
            nn.utils.rnn.pad_sequence([document[part] for document in documents], True, value)
            for part, value in ((slice(None, -1), 0), (slice(1, None), -100))
        )
        yield documents, ids, labels


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
    for documents, ids, labels in batches(num_documents, rank):
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
    for _, ids, labels in batches(num_documents, rank):
        rung = -(-ids.shape[1] // 64) * 64
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


def speed(num_documents: int, name: str) -> dict[str, Any]:
    """Tokens a second of the corpus, and of batches of 512 tokens between its steps."""
    rank = dist.get_rank()
    model = make(name)
    step = zerofx.compile(model, adamw(model), lengths=SAMPLES, loss_terms=_terms_of(name))
    full = torch.randint(VOCAB, (SAMPLES[LONGEST], LONGEST))
    step.prepare(**_named(name, full, full))
    corpus = list(batches(num_documents, rank))
    for rung in RUNGS:  # what is taken on first use
        ids = torch.randint(VOCAB, (SAMPLES[rung], rung))
        step(**_named(name, ids, ids))
    seconds = {"corpus": 0.0, "fixed": 0.0}
    tokens = {"corpus": 0.0, "padded": 0.0, "fixed": 0.0}
    for _, ids, labels in corpus:
        dist.barrier()
        began = time.perf_counter()
        step(**_named(name, ids, labels))
        dist.barrier()
        between = time.perf_counter()
        step(**_named(name, full, full))
        dist.barrier()
        seconds["corpus"] += between - began
        seconds["fixed"] += time.perf_counter() - between
        tokens["corpus"] += summed(int((labels != -100).sum()))
        tokens["padded"] += NUM_RANKS * TOKENS
        tokens["fixed"] += NUM_RANKS * full.numel()
    rates = {
        "corpus": tokens["corpus"] / seconds["corpus"], "with padding": tokens["padded"] / seconds["corpus"],
        "fixed": tokens["fixed"] / seconds["fixed"],
    }  # fmt: skip
    return {
        "steps": len(corpus), "rungs": len(step.rungs),
        **{f"tokens a second, {what}": rate for what, rate in rates.items()},
        "ratio": rates["corpus"] / rates["fixed"], "ratio with padding": rates["with padding"] / rates["fixed"],
        "part that is padding": 1 - tokens["corpus"] / tokens["padded"],
    }  # fmt: skip


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
    parser.add_argument("--model", choices=MODELS, help="of speed, by default gpt; of builds, by default both")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if "losses" in options.parts:
            request = {"part": "losses", "num_documents": options.documents}
            print(json.dumps(answer(request, NUM_RANKS, 1, place), indent=1), flush=True)
        if "speed" in options.parts:
            request = {"part": "speed", "num_documents": options.documents, "name": options.model or "gpt"}
            print(json.dumps(answer(request, NUM_RANKS, 1, place), indent=1), flush=True)
        if "builds" in options.parts:
            for name in MODELS if options.model is None else [options.model]:
                print_builds(name, place)


if __name__ == "__main__":
    if "RANK" in os.environ:
        work(json.loads(sys.argv[1]))
    else:
        main()
