"""What ``ZeroFXTrainer`` cannot honour is named before anything is built, and nothing is ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lib.runs.trainers import LENGTH, Sentences, arguments, llama, trainer
from zerofx import UsageError, ZeroFXWarning
from zerofx.integrations.trainer_arguments import _REFUSED
from zerofx.integrations.transformers import ZeroFXTrainer

REFUSED: dict[str, Any] = {
    "torch_compile": True,
    "use_liger_kernel": True,
    "neftune_noise_alpha": 5.0,
    "auto_find_batch_size": True,
    "torch_empty_cache_steps": 4,
    "bf16_full_eval": True,
    "fp16_full_eval": True,
    "debug": "underflow_overflow",
    "ddp_find_unused_parameters": False,
    "ddp_bucket_cap_mb": 25,
    "ddp_broadcast_buffers": True,
    "ddp_static_graph": True,
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_a_step_cannot_honour_is_named(name: str, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    value = REFUSED[name]
    # Set afterwards: transformers asks for packages and GPUs that some need.
    setattr(args, name, [value] if name == "debug" else value)
    with pytest.raises(UsageError, match=rf"can honour, found {name}=.*\(.+\)"):
        trainer(ZeroFXTrainer, llama(1), args)


@pytest.mark.parametrize("name", ["deepspeed", "fsdp", "parallelism_config"])
def test_another_way_to_shard_is_named(name: str, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    setattr(args, name, {"stage": 3} if name == "deepspeed" else "full_shard")
    with pytest.raises(UsageError, match=rf"found {name}=.*ZeroFXTrainer"):
        trainer(ZeroFXTrainer, llama(1), args)


def test_all_arguments_that_are_refused_are_arguments(tmp_path: Path) -> None:
    known = vars(arguments(tmp_path))
    assert [name for name in _REFUSED if name not in known] == []


@pytest.mark.slow
def test_checkpointing_asks_for_recomputation_and_how_is_the_plans(tmp_path: Path) -> None:
    name = (
        "activation_checkpointing"
        if hasattr(arguments(tmp_path), "activation_checkpointing")
        else "gradient_checkpointing"
    )
    args = arguments(tmp_path, max_steps=2, eval_strategy="no", **{name: True})
    one = trainer(ZeroFXTrainer, llama(1), args)
    one.train()
    assert one.step.options.recompute == "full"
    one = trainer(ZeroFXTrainer, llama(1), args, memory_budget="1GiB")
    one.train()
    assert one.step.options.recompute == "auto"
    setattr(args, f"{name}_kwargs", {"use_reentrant": False, "offload": True})
    with pytest.raises(UsageError, match=f"found {name}_kwargs=dict"):
        trainer(ZeroFXTrainer, llama(1), args)


def test_gradient_accumulation_is_not_left_to_accelerate(tmp_path: Path) -> None:
    args = arguments(tmp_path, accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}})
    with pytest.raises(UsageError, match="gradient_accumulation_kwargs"):
        trainer(ZeroFXTrainer, llama(1), args)


@pytest.mark.parametrize(
    ("name", "instead"),
    [("accumulate", "gradient_accumulation_steps"), ("max_grad_norm", "max_grad_norm"), ("forward", "compute_loss")],
)
def test_what_the_trainers_arguments_say_is_not_said_twice(name: str, instead: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{name} to be left to the Trainer, .*{instead}"):
        trainer(ZeroFXTrainer, llama(1), arguments(tmp_path), **{name: 2})


def test_a_keyword_that_is_none_is_a_type_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'memory_buget'\. Did you mean 'memory_budget'\?"):
        trainer(ZeroFXTrainer, llama(1), arguments(tmp_path), memory_buget="1GiB")


@pytest.mark.parametrize("mesh", [{"model": 2}, "auto"])
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
    ],
)
def test_data_that_is_divided_among_all_ranks_is_refused_where_some_share_it(
    mesh: Any, given: dict[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=f"given alike, found .*{named}"):
        trainer(ZeroFXTrainer, llama(1), arguments(tmp_path, **given), mesh=mesh)


def test_a_mesh_of_other_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="mesh of 1 rank"):
        trainer(ZeroFXTrainer, llama(1), arguments(tmp_path), mesh={"model": 2})


def test_two_precisions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="bf16=True and precision='fp16'"):
        trainer(ZeroFXTrainer, llama(1), arguments(tmp_path, bf16=True), precision="fp16")


@pytest.mark.days(3)
def test_a_budget_that_cannot_be_is_refused_before_the_first_step(tmp_path: Path) -> None:
    from zerofx import MemoryBudgetError

    one = trainer(
        ZeroFXTrainer, llama(1), arguments(tmp_path, eval_strategy="no"), memory_budget="1KiB", recompute="none",
        offload="none", tile="none",
    )  # fmt: skip
    with pytest.raises(MemoryBudgetError):
        one.train()
    assert one.state.global_step == 0


class _Ignored(Sentences):
    """No label counts."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**super().__getitem__(index), "labels": torch.full((LENGTH,), -100)}


def test_a_step_without_items_is_a_step_with_a_gradient_of_zero_that_says_so(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=1, eval_strategy="no", warmup_steps=0, weight_decay=0.0)
    one = trainer(ZeroFXTrainer, llama(1), args, train_dataset=_Ignored(8))
    before = {name: tensor.clone() for name, tensor in one.model.state_dict().items()}
    with pytest.warns(ZeroFXWarning, match="num_items_in_batch is 0"):
        one.train()
    assert one.state.log_history[0]["loss"] == 0.0 and one.state.log_history[0]["grad_norm"] == 0.0
    after = one.step.full_state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


class _Endless(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Data without a length, that ends within an update."""

    def __iter__(self) -> Any:
        yield from (Sentences(20)[index] for index in range(20))


def test_data_without_a_length_that_ends_within_an_update_is_left_out_with_a_warning(tmp_path: Path) -> None:
    one = trainer(
        ZeroFXTrainer, llama(1), arguments(tmp_path, max_steps=3, eval_strategy="no"), train_dataset=_Endless()
    )
    with pytest.warns(ZeroFXWarning, match="1 micro-batches at the end of the data are left out"):
        one.train()
    assert one.state.global_step == 3
