"""Evaluations between steps: the values of eager mode to the bit, and the training that it would have been without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from gpt import GPT
from tests.lib.models import CASES
from tests.lib.runs.evaluating import checked, evaluated, in_eager_mode, own_batches, step_of_case, unlike
from tests.lib.runs.pairs import Pair, compile_eager
from tests.lib.runs.training import step_of
from tests.lib.users import Tiny, adamw, ids, tiny
from zerofx import CaptureError, MemoryBudgetError, UsageError

# Buffers that change in evaluation mode too change the training after it, as in eager mode.
CHANGING = ("buffers", "swapped buffers")
QUICK = ("gpt", "batchnorm", "dropout", "loss function", "returns dataclass", "mixed dtypes", "channels last", "llama")


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CASES if n not in CHANGING],
)
def test_the_values_of_eager_mode_and_the_training_without(name: str) -> None:
    assert evaluated(name, 0) == []


@pytest.mark.parametrize("name", CHANGING)
def test_buffers_that_change_in_evaluation_mode_do_so_as_in_eager_mode(name: str) -> None:
    case = CASES[name]
    step = step_of_case(case, 0)
    (args, kwargs), (others, named) = own_batches(case, 0, 2)
    step(*args, **kwargs)
    with step.full_parameters() as model:
        before = {key: tensor.clone() for key, tensor in model.named_buffers()}
        expected = in_eager_mode(model, case, others, named)
        changed = {key: tensor.clone() for key, tensor in model.named_buffers()}
        for key, tensor in model.named_buffers():
            tensor.copy_(before[key])
    assert unlike(expected, step.evaluate(*others, **named)) == []
    assert unlike(changed, dict(step.model.named_buffers())) == []


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "options",
    [
        {"offload": "host"},
        {"offload": "host", "tile": "none", "prefetch": 0},
        {"precision": "bf16"},
        {"precision": "bf16", "offload": "host"},
        {"max_grad_norm": 1.0, "accumulate": 2, "on_nonfinite": "skip"},
        {"precision": "fp16"},
    ],
    ids=str,
)
def test_what_training_is_asked_for_besides(options: dict[str, Any]) -> None:
    case = CASES["gpt"]
    (args, kwargs), (others, named) = own_batches(case, 0, 2)
    if "offload" in options:
        free = step_of_case(case, 3, **options | {"offload": "none"})
        free.prepare(*args, **kwargs)
        options = options | {"memory_budget": int(0.7 * free.plan.peak_bytes["device"])}
    step = step_of_case(case, 3, **options)
    step(*args, **kwargs)
    if options.get("offload"):
        assert step.plan.states or step.plan.parameters
    if "precision" not in options:
        assert checked(step, case, others, named) == []
        return
    dtype = torch.bfloat16 if options["precision"] == "bf16" else torch.float16
    with step.full_parameters() as model:
        low = step_of_case(case, 0).model.to(dtype)
        low.load_state_dict(model.state_dict())
    assert unlike(in_eager_mode(low, case, others, named), step.evaluate(*others, **named)) == []
    measured = step.measure_evaluation(*others, num_steps=1, **named).peak_bytes
    assert measured["device"] <= step.options.memory_budget if step.options.memory_budget else True


def test_delayed_updates_are_finished_first() -> None:
    pair = Pair(delayed_update=1)
    for seed in range(4):
        pair.step(ids(seed), labels=ids(-seed))
    found = pair.step.evaluate(ids(7), labels=ids(8))
    with pair.step.full_parameters() as model, torch.no_grad():
        assert torch.equal(found, model(ids(7), labels=ids(8)))


def test_what_is_returned_may_be_anything_and_need_not_have_a_loss() -> None:
    class Odd(Tiny):
        def forward(self, ids: Tensor, labels: Tensor | None = None, wide: bool = False) -> Any:
            logits = self.outputs(ids)
            if labels is not None:
                return super().forward(ids, labels)
            return {"logits": logits, "best": (logits.argmax(-1), "argmax"), "ids": ids, "last": logits[:, -1]}

    torch.manual_seed(3)
    model = Odd()
    step = compile_eager(model, adamw(model))
    step(ids(), labels=ids(1))
    found = step.evaluate(ids(2, rows=5))
    with torch.no_grad():
        expected = model(ids(2, rows=5))
    assert unlike(expected, found) == []
    assert found["best"][1] == "argmax"
    assert not found["logits"].requires_grad
    again = step.evaluate(ids(3, rows=5))
    assert not torch.equal(again["logits"], found["logits"]), "what was returned before stays"
    assert unlike(expected, found) == []


def test_forward_is_evaluated_with_its_extras() -> None:
    def forward(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        loss = model(x, labels=y)
        return loss, {"twice": 2 * loss, "training": torch.tensor(float(model.training))}

    model = tiny()
    step = compile_eager(model, adamw(model), forward=forward)
    _, extras = step(ids(), ids(1))
    assert extras["training"] == 1
    loss, extras = step.evaluate(ids(), ids(1))
    assert extras["training"] == 0
    assert torch.equal(extras["twice"], 2 * loss)


def test_random_numbers_are_drawn_as_in_eager_mode_and_the_generator_is_as_it_was() -> None:
    class Noisy(Tiny):
        def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
            loss = super().forward(ids, labels)
            return loss + torch.rand(()) if not self.training else loss

    torch.manual_seed(3)
    model = Noisy()
    step = compile_eager(model, adamw(model))
    step(ids(), labels=ids(1))
    torch.manual_seed(5)
    found = step.evaluate(ids(), labels=ids(1))
    assert torch.equal(found, step.evaluate(ids(), labels=ids(1)))
    model.eval()
    with torch.no_grad():
        assert torch.equal(found, model(ids(), labels=ids(1)))


def test_what_a_forward_checks_of_values_is_checked() -> None:
    class Checking(Tiny):
        def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
            torch._assert((ids < 5).all(), "ids are below 5")
            return super().forward(ids, labels)

    torch.manual_seed(3)
    model = Checking()
    step = compile_eager(model, adamw(model))
    small = ids() % 5
    step(small, labels=small)
    expected = step.evaluate(small, labels=small)
    with pytest.raises(RuntimeError, match="ids are below 5"):
        step.evaluate(small + 5, labels=small)
    assert torch.equal(step.evaluate(small, labels=small), expected)
    step(small, labels=small)


def test_modes_stay_as_they_are() -> None:
    step, args = step_of("dropout")
    step(*args)
    first = step.evaluate(*args)
    next(module for module in step.model.modules() if isinstance(module, nn.Dropout)).eval()
    before = [module.training for module in step.model.modules()]
    assert torch.equal(step.evaluate(*args), first)
    step.model.eval()
    assert torch.equal(step.evaluate(*args), first)
    assert before.count(False) == 1


def test_a_loop_in_inference_mode_or_with_other_shapes_goes_on() -> None:
    pair = Pair(max_shapes=2)
    pair.train(2)
    with torch.inference_mode():
        first = pair.step.evaluate(ids(1), labels=ids(2))
    with pytest.warns(zerofx.ZeroFXWarning, match="another shape"):
        pair.step.evaluate(ids(1, rows=1), labels=ids(2, rows=1))
    with pytest.raises(UsageError, match="at most 2 batch shapes"):
        pair.step.evaluate(ids(1, rows=3), labels=ids(2, rows=3))
    assert torch.equal(pair.step.evaluate(ids(1), labels=ids(2)), first)
    pair.train(2)
    assert pair.same()


def test_micro_batches_may_wait_meanwhile() -> None:
    case = CASES["gpt"]
    step = step_of_case(case, 0, accumulate=2)
    (args, kwargs), (others, named) = own_batches(case, 0, 2)
    step.micro(*args, **kwargs)
    step.micro(*others, **named)
    step.update()
    step.micro(*args, **kwargs)
    step.evaluate(*others, **named)
    step.micro(*others, **named)
    step.update()


def test_what_cannot_be_evaluated_is_refused() -> None:
    step, args = step_of("gpt")
    with pytest.raises(UsageError, match=r"call step.prepare\(batch\)"):
        step.evaluate(*args)
    step.prepare(*args)
    with pytest.raises(UsageError, match="none yet"):
        _ = step.evaluation
    with pytest.raises(UsageError, match="expected a batch that"):
        step.evaluate(*args, nothing=1)
    with step.full_parameters(), pytest.raises(UsageError, match=r"outside full_parameters\(\)"):
        step.evaluate(*args)
    step.evaluate(*args)
    assert "evaluation, generated by zerofx" in step.evaluation.emitted.source
    step.close()
    with pytest.raises(UsageError, match="before close"):
        step.evaluate(*args)


def test_a_forward_that_returns_no_tensor_is_refused() -> None:
    class Silent(Tiny):
        def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
            return super().forward(ids, labels) if self.training else "nothing"

    torch.manual_seed(3)
    model = Silent()
    step = compile_eager(model, adamw(model))
    step(ids(), labels=ids(1))
    with pytest.raises(CaptureError, match="returns a tensor to evaluate"):
        step.evaluate(ids(), labels=ids(1))
    step(ids(), labels=ids(1))


def test_a_budget_holds_for_evaluations_too() -> None:
    model = tiny()
    step = compile_eager(model, adamw(model), memory_budget="1MB")
    step(ids(), labels=ids(1))
    with pytest.raises(MemoryBudgetError, match="Evaluate fewer samples at a time"):
        step.evaluate(ids(0, rows=9000), labels=ids(1, rows=9000))
    step.evaluate(ids(), labels=ids(1))
    step(ids(), labels=ids(1))


def test_logits_are_tiled_where_a_budget_asks_for_it() -> None:
    torch.manual_seed(0)
    model = GPT(vocab=4096, dim=16, depth=2, heads=2, block=256)
    batch = torch.randint(4096, (2, 256)), torch.randint(4096, (2, 256))
    step = compile_eager(model, adamw(model), memory_budget="10MB")
    step(*batch)
    found = step.evaluate(*batch)
    assert step.plan.tiles and step.evaluation.plan.tiles
    assert str(step.evaluation.plan).startswith("plan of an evaluation ")
    measured = step.measure_evaluation(*batch, num_steps=1).peak_bytes["device"]
    assert measured == step.evaluation.plan.peak_bytes["device"] <= 10_000_000
    with step.full_parameters(), torch.no_grad():
        torch.testing.assert_close(found, model(*batch), rtol=1e-6, atol=0)
