"""What is printed of a step and of a plan."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import zerofx
from tests.lib.graphs import features, sgd
from tests.lib.lowered import Deep, lowered
from zerofx.scheduler.plan.decisions import Absence
from zerofx.scheduler.plan.plan import Plan
from zerofx.scheduler.plan.text.reasons import one_line, reasons
from zerofx.session.summary import reserves_more


def compiled_step(depth: int = 4) -> zerofx.Step:
    model = Deep(depth)
    return zerofx.compile(model, sgd(model), backend="eager", machine="cpu")


def stable(text: str) -> str:
    """Without the path, and the hash that stands for every word of a plan."""
    return re.sub(r"^plan \w{12}", "plan <hash>", re.sub(r"in /\S+/step\.py", "in <path>/step.py", text))


def test_before_the_first_step(golden: Callable[..., None]) -> None:
    golden(str(compiled_step()))


def test_prepared(golden: Callable[..., None]) -> None:
    step = compiled_step()
    step.prepare(*features())
    golden(stable(str(step)))


def test_measured() -> None:
    step = compiled_step()
    step.measure(*features(), num_steps=2)
    lines = {line.split("  ")[0]: line for line in str(step).splitlines()}
    assert "measured" in lines["per rank"]
    assert lines["peak on the device"].endswith("(to the byte)")
    with pytest.warns(zerofx.ZeroFXWarning, match="another shape"):
        step.prepare(torch.randn(5, 4))
    assert "measured" not in str(step), "what ran last has not been measured"


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_budget_on_a_gpu_is_for_what_is_allocated(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.delenv(variable, raising=False)
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert "expandable_segments" in "".join(reserves_more(gpu, 1 << 30))
    assert not list(reserves_more(gpu, None)) and not list(reserves_more(cpu, 1 << 30))
    monkeypatch.setenv(variable, "max_split_size_mb:64,expandable_segments:True")
    assert not list(reserves_more(gpu, 1 << 30))


@torch.library.custom_op("zerofx_summary::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda _context, gradient: 2 * gradient)


class Foreign(torch.nn.Module):
    """Runs an operator that is not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = doubled(self.linear(x))
        assert isinstance(found, torch.Tensor)
        return found.sum()


def test_operators_whose_memory_is_not_known_are_named() -> None:
    model = Foreign()
    step = zerofx.compile(model, sgd(model), backend="eager", machine="cpu")
    step.prepare(torch.randn(2, 4))
    assert "the predicted peak lacks what zerofx_summary.doubled" in str(step)


def test_repr_is_one_line() -> None:
    step = compiled_step()
    step(*features())
    assert repr(step) == "<zerofx.Step of Deep, stage 3, 1 steps done>"


def test_plan_at_stage_3(golden: Callable[..., None]) -> None:
    golden(stable(str(lowered(12, num_ranks=4).plan)))


def test_plan_text_is_flat_in_depth() -> None:
    assert len({len(str(lowered(depth).plan).splitlines()) for depth in (6, 30)}) == 1


def test_plan_without_a_prediction_can_be_printed() -> None:
    plan = Plan.from_json(replace(lowered(2).plan, prediction=None).to_json())
    assert "predicted" not in str(plan)


def test_one_rank_has_no_reductions_to_explain() -> None:
    assert reasons(lowered(2, stage=0, num_ranks=1).plan) == {}


def test_recomputed_values_are_counted_by_layer() -> None:
    plan = lowered(4, num_ranks=1).plan
    decisions = [
        Absence(kind="recomputes", value=f"v{i}", num_bytes=1024, reason=f"level 1 of 2 for {layer}", layer=layer)
        for i, layer in enumerate(f"layers.{n // 2}" for n in range(6))
    ]
    found = reasons(plan.replace_absences(recomputes=tuple(decisions)))["recomputed"]
    assert [str(reason) for reason in found] == ["layers.0 … layers.2  x3: 2 values, 2.0 KiB; level 1 of 2 for each"]
    assert one_line("recomputed", found) == "recomputed in 3 of 3 places: 2 values, 2.0 KiB; level 1 of 2 for each"


def test_one_line_gives_the_commonest_reason() -> None:
    gathers = reasons(lowered(5).plan)["gathers"]
    total = len(lowered(5).plan.gathers)
    expected = rf"gathers: \d+ of {total} resident while each runs in (forward|backward)"
    assert re.match(expected, one_line("gathers", gathers))


def test_layers_with_names_that_are_prefixes_of_others_are_told_apart() -> None:
    plan = lowered(12).plan
    spans = [str(reason).split(":")[0] for reason in reasons(plan)["gathers"]]
    assert any("layers.1 … layers.11" in one or "layers.0 … layers.11" in one for one in spans), spans
