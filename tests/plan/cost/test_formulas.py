"""The field's formulas give the tables that were printed."""

from __future__ import annotations

import pytest

from tests.lib.formulas import Transformer, bandwidth_efficiency, reversal_steps
from tests.oracles.exact import search
from tests.oracles.problem import Problem
from zerofx.errors import UsageError

TIB, GIB, MIB = 2**40, 2**30, 2**20

# ZeRO-Infinity, figure 2a: parameters in trillions, layers, hidden, heads; model states, all activations and activation
# checkpoints in TiB; largest layer and activations of a layer in GiB. 1,024 tokens; 32 sequences a node of 16 GPUs.
INFINITY = [
    (0.10, 80, 10240, 128, 1.83, 2.03, 0.05, 1.56, 1.63),
    (0.50, 100, 20480, 160, 9.16, 3.91, 0.12, 6.25, 2.50),
    (1.01, 128, 25600, 256, 18.31, 7.13, 0.20, 9.77, 3.56),
    (10.05, 195, 65536, 512, 182.81, 24.38, 0.76, 64.0, 8.00),
    (101.47, 315, 163840, 1024, 1845.70, 88.59, 3.08, 400.0, 18.00),
]

# Korthikanti et al., table 3, and what its formulas give: heads, hidden, layers, tensor parallel; MiB a layer without
# and with tensor parallelism; percent of the latter with sequence parallelism, selective, both, full recomputation.
KORTHIKANTI = [
    ("22B", 64, 6144, 48, 4, 6752, 1264, (66.8, 49.4, 16.1, 7.6)),
    ("175B", 96, 12288, 96, 1, 2736, 552, (62.0, 56.5, 18.5, 8.7)),
    ("530B", 128, 20480, 105, 1, 3920, 840, (58.3, 61.9, 20.2, 9.5)),
    ("1T", 160, 25600, 128, 1, 4900, 1050, (58.3, 61.9, 20.2, 9.5)),
]

# The same paper, table 5: GPUs, global batch, seconds an iteration, MFU and HFU in percent of 312 TFLOP/s.
UTILISATION = [
    ("22B", 64, 6144, 48, 8, 4, 1.10, 41.5, 43.7),
    ("175B", 96, 12288, 96, 64, 64, 13.75, 51.4, 52.8),
    ("530B", 128, 20480, 105, 280, 280, 37.83, 56.0, 57.0),
    ("1T", 160, 25600, 128, 512, 512, 71.49, 56.3, 57.0),
]

# Binomial checkpointing: steps to reverse a chain of these lengths, by the number of snapshots.
LENGTHS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 32)
REVERSALS = {
    1: (1, 3, 6, 10, 15, 28, 45, 66, 120, 190, 496),
    2: (1, 2, 4, 6, 8, 14, 20, 28, 45, 65, 140),
    3: (1, 2, 3, 5, 7, 11, 15, 21, 33, 45, 93),
    4: (1, 2, 3, 4, 6, 10, 14, 18, 27, 39, 75),
}


@pytest.mark.parametrize(
    ("trillions", "layers", "hidden", "heads", "states", "activations", "checkpoints", "largest", "working"), INFINITY
)
def test_the_memory_table_of_zero_infinity(
    trillions: float, layers: int, hidden: int, heads: int, states: float, activations: float, checkpoints: float,
    largest: float, working: float,
) -> None:  # fmt: skip
    model = Transformer(layers, hidden, heads, 1024)
    digit = 0.0051  # half of the last printed digit
    assert model.num_parameters / 1e12 == pytest.approx(trillions, abs=digit)
    assert model.infinity_state_bytes / TIB == pytest.approx(states, abs=digit)
    # The working memory of a layer, for all layers and the 32 sequences of a node, is what "full activations" are.
    assert layers * model.working_activation_bytes(32) / TIB == pytest.approx(activations, abs=digit)
    assert model.checkpoint_bytes(32) / TIB == pytest.approx(checkpoints, abs=digit)
    assert model.working_state_bytes() / GIB == pytest.approx(largest, abs=digit)
    assert model.working_activation_bytes(32 // 16) / GIB == pytest.approx(working, abs=digit)


@pytest.mark.parametrize(("name", "heads", "hidden", "layers", "batch", "none", "parallel", "percent"), KORTHIKANTI)
def test_bytes_of_a_layer_by_technique(
    name: str, heads: int, hidden: int, layers: int, batch: int, none: int, parallel: int, percent: tuple[float, ...]
) -> None:
    model = Transformer(layers, hidden, heads, 2048)
    with_parallel = model.layer_bytes(batch, tensor_parallel=8)
    assert model.layer_bytes(batch) == none * MIB
    assert with_parallel == parallel * MIB
    found = (
        model.layer_bytes(batch, tensor_parallel=8, sequence_parallel=True),
        model.layer_bytes(batch, tensor_parallel=8, recompute="selective"),
        model.layer_bytes(batch, tensor_parallel=8, sequence_parallel=True, recompute="selective"),
        model.layer_bytes(batch, tensor_parallel=8, recompute="full"),
    )
    assert [round(100 * num_bytes / with_parallel, 1) for num_bytes in found] == list(percent)


def test_scores_are_half_of_a_layer_where_5as_is_34h() -> None:
    at_half = Transformer(1, 5 * 1024, 34, 1024)
    assert at_half.layer_bytes(1) == 2 * at_half.layer_bytes(1, recompute="selective")


@pytest.mark.parametrize(("name", "heads", "hidden", "layers", "gpus", "batch", "seconds", "mfu", "hfu"), UTILISATION)
def test_utilisation_from_iteration_times(
    name: str, heads: int, hidden: int, layers: int, gpus: int, batch: int, seconds: float, mfu: float, hfu: float
) -> None:
    model = Transformer(layers, hidden, heads, 2048, vocabulary=51200)
    peak = gpus * 312e12
    assert 100 * model.model_flops(batch) / seconds / peak == pytest.approx(mfu, abs=0.3)
    assert 100 * model.hardware_flops(batch) / seconds / peak == pytest.approx(hfu, abs=0.3)


@pytest.mark.parametrize("snapshots", REVERSALS)
def test_steps_to_reverse_a_chain(snapshots: int) -> None:
    assert tuple(reversal_steps(length, snapshots) for length in LENGTHS) == REVERSALS[snapshots]


def test_reversal_is_the_best_first_snapshot_over_and_over() -> None:
    """The closed form solves the recursion it comes from: advance k steps, snapshot, reverse the rest, reverse k."""
    best: dict[tuple[int, int], int] = {}
    for snapshots in range(1, 6):
        for length in range(1, 30):
            if length == 1 or snapshots == 1:
                best[length, snapshots] = length * (length - 1) // 2
            else:
                best[length, snapshots] = min(
                    k + best[length - k, snapshots - 1] + best[k, snapshots] for k in range(1, length)
                )
            assert reversal_steps(length, snapshots) == best[length, snapshots]


@pytest.mark.parametrize("length", [2, 4, 6])
def test_the_search_over_resident_sets_agrees_with_binomial_checkpointing(length: int) -> None:
    """Of a chain with its backward, one slot holds the gradient and one what is being computed.

    Beside the steps that are repeated, the last forward node is computed, and each backward node once.
    """
    last = 2 * length
    reads = [(), *((i - 1,) if i <= length else tuple(sorted({i - 1, last - i})) for i in range(1, last + 1))]
    problem = Problem((1.0,) * (last + 1), (1,) * (last + 1), tuple(reads))
    for slots in range(3, length + 3):
        assert search(problem, slots).least_seconds == length + 1 + reversal_steps(length + 1, slots - 2)


def test_a_chain_of_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        reversal_steps(0, 1)


@pytest.mark.parametrize(
    ("intensity", "bandwidth", "percent"),
    [
        (1024 * 1, 70e9, 50.6),  # parameters and gradients: seq * bsz
        (1024 * 2 / 4, 1.5e12, 91.6),  # optimizer states: seq * bsz / 4
        (24 * 2048 * 1, 2e9, 58.4),  # activation checkpoints: 24 * hd * ci
        (24 * 8192 * 1, 3e9, 89.4),
    ],
)
def test_zero_infinity_efficiencies(intensity: float, bandwidth: float, percent: float) -> None:
    """Oracle O6: ZeRO-Infinity (arXiv 2104.07857) at the 70 TFLOP/s it calls achievable on a V100."""
    assert 100 * bandwidth_efficiency(intensity, bandwidth, 70e12) == pytest.approx(percent, abs=0.05)
