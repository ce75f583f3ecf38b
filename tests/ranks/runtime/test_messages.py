"""Messages between stages on GPUs, played over gloo on streams: one process's bits, and what becomes of a link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.compiled.cuda_stand_in.streams import CPU, on_streams
from tests.lib.distributed import run_ranks
from tests.lib.runs.stages import Run, begin_run
from zerofx.errors import PlanError
from zerofx.runtime.comm.nccl import Nccl
from zerofx.runtime.comm.transport import LostRankError
from zerofx.runtime.measure.spans import SpanLog
from zerofx.torch_private import distributed
from zerofx.torch_private.operators import pytree

pytestmark = pytest.mark.filterwarnings("ignore:collectives along different axes of the mesh run one after the other")

CLIPPED = ("max_grad_norm", 0.1)
TURNS, FIRST, APART = ("order", "micro-batch"), ("order", "layer"), ("order", "zero-bubble")
CHUNKS, ROUNDS = ("order", "interleaved"), ("order", "round-robin")
TWO = {"pipe": 2}
RUNS = {
    "turns": [Run("gpt2", TWO, 6, (CLIPPED, TURNS), 2), Run("norms", TWO, 5, (TURNS,), 2)],
    "weights apart, skips": [Run("u-net", TWO, 5, (CLIPPED, APART), 2)],
    "chunks": [Run("gpt", TWO, 5, (CLIPPED, ("grad_norms", True), CHUNKS), 2)],
    "round robin": [Run("dropout", TWO, 4, (ROUNDS,), 2)],
    "scaled": [Run("gpt", TWO, 4, (CLIPPED, ("precision", "fp16"), TURNS), 3)],
}
MORE = {
    "forward first": [Run("llama", TWO, 4, (CLIPPED, FIRST), 2), Run("telling", TWO, 3, (FIRST,), 2)],
    "on the host": [Run("gpt", TWO, 4, (CLIPPED, ("offload", {"gradients": "host"}), TURNS), 2)],
    "whole updates": [Run("matrices", TWO, 2, (CLIPPED,), 2, "Muon")],
    "four": [Run("u-net", {"pipe": 4}, 8, (CLIPPED, APART), 2), Run("deep", {"pipe": 4}, 8, (CHUNKS,), 2)],
}


def _train(run: Run) -> list[Tensor]:
    """What a training gives, bit by bit: losses, norms, parameters and states, draws after it, and an evaluation."""
    step, optimizer, given = begin_run(run)
    values = list[Tensor]()
    for args, kwargs in given:
        result = step(*args, **kwargs)
        norm = [step.grad_norm] if CLIPPED in run.options else []
        leaves = pytree.tree_leaves((result, step.outputs, norm))
        values += [torch.as_tensor(leaf).clone() for leaf in leaves if leaf is not None]
    args, kwargs = given[0]
    leaves = pytree.tree_leaves(step.evaluate(*args, **kwargs))
    values += [torch.as_tensor(leaf).clone() for leaf in leaves if leaf is not None]
    values += [torch.rand(3), *step.full_state_dict().values()]
    step.close()
    values += [tensor.detach().clone() for tensor in (*step.model.parameters(), *step.model.buffers())]
    states = sorted(optimizer.state_dict()["state"].items())
    return [*values, *(torch.as_tensor(entry[name]) for _, entry in states for name in sorted(entry))]


def _train_all(runs: Sequence[Run]) -> list[list[Tensor]]:
    return [_train(run) for run in runs]


def _few_queues() -> tuple[str, str]:
    """The notices of transports whose stages have one rank each, and two."""
    world = dist.group.WORLD
    assert world is not None
    notices = []
    with on_streams():
        for groups in ([[0, 1]], [[0, 1], [2, 3]]):
            transport = Nccl(world, CPU, SpanLog())
            inner = transport.split(groups) if len(groups) > 1 else transport
            inner.open_links(BOTH)
            notices.append(transport.notice)
            for opened in {id(each): each for each in (inner, transport)}.values():
                opened.close()
    return notices[0], notices[1]


def _on_streams(runs: Sequence[Run]) -> tuple[list[list[Tensor]], list[str]]:
    with on_streams() as streams:
        trained = _train_all(runs)
    return trained, sorted(set(streams.races))


def _check(runs: Sequence[Run], num_ranks: int, expected: Sequence[Sequence[list[Tensor]]]) -> None:
    for rank, (trained, races) in enumerate(run_ranks(_on_streams, num_ranks, runs)):
        assert races == []
        for run, values, alone in zip(runs, trained, expected[rank % len(expected)], strict=True):
            # As bits: the norm of a step that is left out is NaN.
            bits = [[value.reshape(-1).contiguous().view(torch.uint8) for value in each] for each in (values, alone)]
            assert len(values) == len(alone) and all(map(torch.equal, *bits)), f"rank {rank}: {run}"


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_stages_on_streams_have_the_bits_of_one_process(name: str) -> None:
    runs = {**RUNS, **MORE}[name]
    mesh = runs[0].mesh
    assert isinstance(mesh, Mapping)
    _check(runs, mesh["pipe"], [_train_all([run.on(None) for run in runs])])


@pytest.mark.days(3)
def test_stages_of_several_ranks_on_streams_have_the_bits_of_those_ranks_without() -> None:
    options = (CLIPPED, TURNS)
    runs = [Run("dropout", {"pipe": 2, "shard": 2}, 5, options, 2)]
    once = [replace(run.on({"shard": 2}), options=(*options[:1], ("reduce", "once"))) for run in runs]
    _check(runs, 4, run_ranks(_train_all, 2, once))


def test_stages_of_several_ranks_say_how_many_queues_they_need() -> None:
    for of_one, of_two in run_ranks(_few_queues, 4):
        assert of_one == ""
        assert "CUDA_DEVICE_MAX_CONNECTIONS=32" in of_two


def _transport(pairs: Sequence[tuple[int, int]]) -> Nccl:
    world = dist.group.WORLD
    assert world is not None
    transport = Nccl(world, CPU, SpanLog())
    transport.open_links(pairs)
    return transport


BOTH = ((0, 1), (1, 0))


def _both_ways() -> tuple[list[Any], dict[int, int], list[str]]:
    """Messages each way at once, of which none is waited for before all are on their way, and a gather among them."""
    with on_streams() as streams:
        transport = _transport(BOTH)
        rank, other = transport.rank, 1 - transport.rank
        waiting = [transport.receive(torch.empty(2), other) for _ in range(2)]
        whole = transport.all_gather_into(torch.empty(2), torch.tensor([float(rank)])).finish(None)
        values = [torch.full((2,), 10.0 * rank + number) for number in range(2)]
        sent = [transport.send(value, other) for value in values]
        del values
        received = [pending.finish(None).tolist() for pending in waiting]
        for message in sent:
            message.finish(None)
        transport.close()
        return [whole.tolist(), *received], dict(transport.sent_to), streams.races


def test_messages_each_way_wait_for_no_other_and_hold_up_no_collective() -> None:
    first, second = run_ranks(_both_ways, 2)
    assert first == ([[0.0, 1.0], [10.0, 10.0], [11.0, 11.0]], {1: 16 + 4}, [])
    assert second == ([[0.0, 1.0], [0.0, 0.0], [1.0, 1.0]], {0: 16 + 4}, [])


def _links() -> list[Any]:
    """The links of a line of three ranks, which nobody makes twice, and which are given up with all else."""
    with on_streams():
        transport = _transport([(0, 1), (1, 2)])
        before = len(transport._own_links)
        transport.open_links([(0, 1), (2, 0)])
        with pytest.raises(PlanError, match=f"found one from {transport.rank} to {transport.rank}"):
            transport.send(torch.ones(2), transport.rank)
        links = [dist.get_process_group_ranks(link.group) for link in transport._own_links]
        with mock.patch.object(distributed, "abort") as given_up:
            pending = transport.receive(torch.ones(1), 1) if transport.rank == 2 else None
            transport.abort()
        groups = [dist.get_process_group_ranks(call.args[0]) for call in given_up.call_args_list]
        starts = [lambda: transport.send(torch.ones(1), 1), lambda: transport.receive(torch.ones(1), 0)]
        for start in [lambda: pending.finish(None)] if pending is not None else starts[transport.rank :][:1]:
            with pytest.raises(LostRankError):
                start()
        transport.close()
        return [before, links, groups == [[0, 1, 2], *links], transport.sent_bytes]


def test_links_are_there_before_the_first_message_and_given_up_with_all_else() -> None:
    assert run_ranks(_links, 3) == [
        [1, [[0, 1], [0, 2]], True, 0],
        [2, [[0, 1], [1, 2]], True, 0],
        [1, [[1, 2], [0, 2]], True, 0],
    ]


def _noted() -> list[tuple[str, bool, int]]:
    log, world = SpanLog(), dist.group.WORLD
    assert world is not None
    with on_streams():
        transport = Nccl(world, CPU, log)
        transport.stream = "collective pipe"
        transport.open_links(BOTH)
        log.start(CPU)
        pending = transport.send(torch.ones(2), 1) if transport.rank == 0 else transport.receive(torch.ones(2), 0)
        pending.finish(None)
        spans = log.take()
        transport.close()
    return [(span.stream, span.seconds > 0, span.num_bytes) for span in spans]


def test_a_sender_notes_its_bytes_and_a_receiver_the_time_until_they_are_there() -> None:
    assert run_ranks(_noted, 2) == [[("collective pipe", False, 8)], [("collective pipe", True, 0)]]
