"""One parameter, or a state of it, read and written by name while training goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lib.models import CASES
from tests.lib.runs.evaluating import own_batches, step_of_case
from tests.lib.runs.pairs import Pair
from tests.lib.runs.training import step_of
from tests.lib.users import ids
from zerofx import UsageError


@pytest.mark.sweep(3)
@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}, {"offload": "host"}], ids=str)
@pytest.mark.parametrize("name", ["gpt", "tied", "channels last"])
def test_what_is_read_is_what_full_parameters_and_states_are(name: str, options: dict[str, Any]) -> None:
    case = CASES[name]
    ((args, kwargs),) = own_batches(case, 0, 1)
    if "offload" in options:
        free = step_of_case(case, 3)
        free.prepare(*args, **kwargs)
        options = options | {"memory_budget": int(0.9 * free.plan.peak_bytes["device"])}
    step = step_of_case(case, 3, **options)
    step(*args, **kwargs)
    expected, states = step.full_state_dict(), step.optimizer.state_dict()["state"]
    for number, (path, parameter) in enumerate(step.model.named_parameters()):
        with step.full(path) as tensor:
            assert torch.equal(tensor, expected[path]), path
            assert tensor.stride() == expected[path].stride()
            assert tensor.dtype == parameter.dtype
        with step.full(path, "exp_avg") as average:
            assert torch.equal(average, states[number]["exp_avg"]), path


def test_what_is_written_is_trained_on_from() -> None:
    pair = Pair()
    pair.train(2)
    with pair.step.full("head.weight", write_back=True) as weight, torch.no_grad():
        weight.mul_(0.5)
        pair.plain.head.weight.mul_(0.5)
    with pair.step.full("embed.weight", "exp_avg_sq", write_back=True) as squares:
        squares.fill_(0.25)
        pair.optimizers[1].state[pair.plain.embed.weight]["exp_avg_sq"].fill_(0.25)
    pair.train(2)
    assert pair.same()


def test_what_is_not_to_be_written_is_not() -> None:
    pair = Pair()
    pair.train(1)
    with pair.step.full("head.weight") as weight:
        weight.zero_()
    with pytest.raises(IndexError), pair.step.full("head.weight", write_back=True) as weight:
        weight.zero_()[1000]
    pair.train(1)
    assert pair.same()


def test_a_shared_parameter_has_all_its_names() -> None:
    step, args = step_of("tied")
    step(*args)
    shared = [path for path, _ in step.model.named_parameters(remove_duplicate=False)]
    alone = [path for path, _ in step.model.named_parameters()]
    (other,) = set(shared) - set(alone)
    with step.full(other) as tensor, step.full_parameters() as model:
        assert torch.equal(tensor, model.get_parameter(other))


def test_what_there_is_not_is_refused() -> None:
    step, args = step_of("gpt")
    path = next(path for path, _ in step.model.named_parameters())
    with pytest.raises(UsageError, match=r"call step\.prepare"), step.full(path):
        pass
    step(*args)
    with pytest.raises(UsageError, match=r"expected the name of a parameter, found 'layers\.9\.weight'"):  # noqa: SIM117
        with step.full("layers.9.weight"):
            pass
    with pytest.raises(UsageError, match="there are exp_avg, exp_avg_sq"), step.full(path, "momentum_buffer"):
        pass
    with pytest.raises(UsageError, match="outside full_parameters"), step.full_parameters(), step.full(path):
        pass
    with pytest.raises(UsageError, match=r"call step\(batch\) outside the block"):  # noqa: SIM117
        with step.full(path, write_back=True):
            step(*args)
    with pytest.raises(UsageError, match="change its values in place"), step.full(path, write_back=True) as tensor:
        tensor.resize_(1)


def test_delayed_updates_are_finished_first() -> None:
    pair = Pair(delayed_update=1)
    for seed in range(4):
        pair.step(ids(seed), labels=ids(-seed))
    with pair.step.full("head.weight") as weight, pair.step.full_parameters():
        assert torch.equal(weight, pair.model.head.weight)
