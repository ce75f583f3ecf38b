"""verl's engine of a compiled step: losses, metrics and weights are those of plain torch with verl's own losses."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.lib.runs.trainers import TOKENS, llama
from zerofx import UsageError

pytest.importorskip("verl")
tensordict = pytest.importorskip("tensordict")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

BOUND = 1e-5
NUM_PROMPT, LENGTHS, RATE = 3, (5, 9, 7, 6), 1e-2  # tokens; of each sample


def _nested(parts: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def batch(number: int, rank: int = 0, **said: Any) -> Any:
    """Samples of several lengths, as verl hands them out, with what a policy's loss reads."""
    draws = torch.Generator().manual_seed(10 * number + rank)
    ids = [torch.randint(TOKENS, (length,), generator=draws) for length in LENGTHS]
    answers = [torch.ones(length - NUM_PROMPT, dtype=torch.int64) for length in LENGTHS]
    values = {
        "input_ids": ids, "position_ids": [torch.arange(length) for length in LENGTHS],
        "prompts": [each[:NUM_PROMPT] for each in ids], "responses": [each[NUM_PROMPT:] for each in ids],
        "response_mask": answers, "loss_mask": [torch.cat([torch.zeros(NUM_PROMPT), each]) for each in answers],
        "advantages": [torch.randn(len(each), generator=draws) for each in answers],
        "old_log_probs": [-3.5 - torch.rand(len(each), generator=draws) for each in answers],
    }  # fmt: skip
    data = tensordict.TensorDict({name: _nested(parts) for name, parts in values.items()}, [len(LENGTHS)])
    from verl.utils import tensordict_utils

    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    said = {"use_dynamic_bsz": False, "global_batch_size": len(LENGTHS) * num_ranks, "temperature": 0.7, **said}
    tensordict_utils.assign_non_tensor(data, **said)
    return data


def make_engine(folder: Path, options: dict[str, Any] | None = None, **settings: Any) -> Any:
    """An engine as verl makes it from its settings, not initialised."""
    from verl.workers.config import HFModelConfig
    from verl.workers.config.optimizer import FSDPOptimizerConfig
    from verl.workers.engine.base import EngineRegistry

    from zerofx.integrations.verl import ZeroFXEngineConfig

    path = folder / "model"
    if not path.exists() and (not dist.is_initialized() or dist.get_rank() == 0):
        llama().save_pretrained(path)  # type: ignore[operator]  # a model of transformers
    if dist.is_initialized():
        dist.barrier()
    given = {
        "dtype": "float32",
        "pad_to_multiple_of": 4,
        "options": {"backend": "eager", **(options or {})},
        **settings,
    }
    return EngineRegistry.new(
        model_type="language_model", backend="zerofx",
        model_config=HFModelConfig(path=str(path), load_tokenizer=False),
        engine_config=ZeroFXEngineConfig(**given),
        optimizer_config=FSDPOptimizerConfig(lr=RATE, clip_grad=0.5, total_training_steps=10, lr_warmup_steps=2),
        checkpoint_config=None,
    )  # fmt: skip


def loss_of(kind: str) -> Any:
    from verl.workers.config import ActorConfig
    from verl.workers.utils.losses import ppo_loss, sft_loss

    config = ActorConfig(
        strategy="zerofx", rollout_n=2, ppo_micro_batch_size_per_gpu=2, use_kl_loss=False, entropy_coeff=0.01
    )  # fmt: skip
    return partial({"sft": sft_loss, "ppo": ppo_loss}[kind], config)


def _plain_outputs(model: nn.Module, data: Any) -> dict[str, Tensor]:
    """Log-probabilities and entropies of each sample alone, without padding."""
    log_probs, entropies = [], []
    following = torch.roll(data["input_ids"].values(), -1).split(list(LENGTHS))
    for ids, labels in zip(data["input_ids"].unbind(), following, strict=True):
        scores = (model(input_ids=ids[None]).logits[0] / data["temperature"]).log_softmax(-1)
        log_probs.append(scores.gather(-1, labels[:, None])[:, 0])
        entropies.append(-(scores.exp() * scores).sum(-1))
    offsets = data["input_ids"].offsets()
    outputs = {"log_probs": torch.nested.nested_tensor_from_jagged(torch.cat(log_probs), offsets)}
    if data["calculate_entropy"]:
        outputs["entropy"] = torch.nested.nested_tensor_from_jagged(torch.cat(entropies), offsets)
    return outputs


def _train_plainly(kind: str, num_steps: int, num_ranks: int, said: dict[str, Any]) -> tuple[list[float], nn.Module]:
    """The losses of rank 0 and the model, trained on all ranks' batches by one process."""
    from verl.utils import tensordict_utils
    from verl.utils.torch_functional import get_constant_schedule_with_warmup

    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = get_constant_schedule_with_warmup(optimizer, 2)
    losses = []
    for number in range(num_steps):
        each = [batch(number, rank, **said) for rank in range(num_ranks)]
        num_tokens = sum(data["loss_mask"].values().sum().item() for data in each)
        for rank, data in enumerate(each):
            tensordict_utils.assign_non_tensor(
                data, batch_num_tokens=num_tokens, dp_size=num_ranks, global_batch_size=len(LENGTHS) * num_ranks
            )
            loss, _ = loss_of(kind)(model_output=_plain_outputs(model, data), data=data)
            (loss / num_ranks).backward()
            losses += [loss.item()] if rank == 0 else []
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return losses, model


def differences(kind: str, folder: Path, options: dict[str, Any], num_steps: int = 4) -> list[str]:
    """Where an engine and plain torch differ by more than rounding, after some updates."""
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    said = {"calculate_entropy": kind == "ppo"}
    expected, model = _train_plainly(kind, num_steps, num_ranks, said)
    engine = make_engine(folder, options)
    engine.initialize()
    wrong, losses = [], []
    for number in range(num_steps):
        with engine.eval_mode():
            output = engine.infer_batch(batch(number, rank, micro_batch_size_per_gpu=2), None)
        assert [len(row) for row in output["model_output"]["log_probs"].unbind()] == list(LENGTHS)
        with engine.train_mode():
            trained = engine.train_batch(batch(number, rank, **said), loss_of(kind))
        losses += trained["loss"]
        wrong += [] if trained["metrics"]["grad_norm"] > 0 else ["no norm of gradients"]
        engine.lr_scheduler_step()
    wrong += [] if rank or losses == pytest.approx(expected, rel=BOUND, abs=BOUND) else [f"{losses} and {expected}"]
    weights = {name: tensor.clone() for name, tensor in engine.step.weights()}
    for name, tensor in model.state_dict().items():
        if not torch.allclose(weights[name], tensor, rtol=0, atol=1e-4 * RATE + BOUND):
            wrong.append(f"{name} is {(weights[name] - tensor).abs().max()} off")
    given = dict(engine.get_per_tensor_param()[0])
    wrong += [] if given.keys() == model.state_dict().keys() else ["other names for inference"]
    engine.step.close()
    return wrong


@pytest.mark.captures
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}], ids=["whole", "accumulate"])
@pytest.mark.parametrize("kind", ["sft", "ppo"])
def test_an_engine_trains_as_plain_torch_does(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    assert differences(kind, tmp_path, options) == []


@pytest.mark.captures
def test_a_checkpoint_of_an_engine_goes_on(tmp_path: Path) -> None:
    first = make_engine(tmp_path)
    first.initialize()
    assert all(tensor.dtype == torch.bfloat16 for _, tensor in first.get_per_tensor_param()[0])  # before any step
    first.train_batch(batch(0), loss_of("sft"))
    first.lr_scheduler_step()
    first.save_checkpoint(str(tmp_path / "saved"), global_step=1, max_ckpt_to_keep=1)
    expected = first.train_batch(batch(1), loss_of("sft"))
    second = make_engine(tmp_path)
    second.initialize()
    second.load_checkpoint(str(tmp_path / "saved"))
    assert second.train_batch(batch(1), loss_of("sft"))["loss"] == expected["loss"]
    for (name, one), (_, other) in zip(first.step.weights(), second.step.weights(), strict=True):
        assert torch.equal(one, other), name
    for number in (1, 2):
        second.save_checkpoint(str(tmp_path / f"step {number}"), max_ckpt_to_keep=1)
    assert not (tmp_path / "step 1").exists() and (tmp_path / "step 2").exists()
    assert second.lr_scheduler_step() == first.lr_scheduler_step()
    first.step.close()
    second.step.close()


@pytest.mark.captures
def test_a_reference_policy_gives_log_probabilities_and_waits_on_the_host(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, forward_only=True, param_offload=True, optimizer_offload=True)
    engine.initialize()
    data = batch(0, calculate_entropy=True)
    for size in (4, 2):
        with engine.eval_mode():
            found = engine.infer_batch(batch(0, calculate_entropy=True, micro_batch_size_per_gpu=size), None)
            assert engine.step.tiers()["device"] > 0
        assert engine.step.tiers()["device"] == 0
        expected = _plain_outputs(llama(), data)
        for name, values in expected.items():
            torch.testing.assert_close(found["model_output"][name].values(), values.values().detach())
    engine.step.close()


def test_a_model_with_dropout_is_refused(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    engine.model_config.hf_config.attention_dropout = 0.1
    with pytest.raises(UsageError, match=r"'attention_dropout': 0\.1"):
        engine.initialize()


def test_settings_that_a_step_cannot_honour_are_named(tmp_path: Path) -> None:
    for settings, message in (
        ({"options": {"mesh": {"model": 2}}}, "axis model in options"),
        ({"options": {"accumulate": "auto"}}, "accumulate='auto' in options: give a number"),
        ({"optimizer_offload": True}, "optimizer_offload without param_offload"),
        ({"dtype": "int8"}, "found dtype int8"),
    ):
        with pytest.raises(UsageError, match=message):
            make_engine(tmp_path, **settings)
