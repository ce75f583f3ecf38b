"""TRL's own trainers on top of a compiled step: losses and metrics are those of TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lib.runs.trainers import TOKENS, llama
from zerofx import UsageError
from zerofx.integrations.trainer_arguments import _REFUSED_OF_TRL

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
peft = pytest.importorskip("peft")

# TRL and what it is made of warn of one another.
pytestmark = pytest.mark.filterwarnings("ignore")

BOUND = 1e-5
"""Of losses and metrics, relative, or absolute below 1."""
KINDS = {
    "reward": (trl.RewardTrainer, trl.RewardConfig),
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "sft": (trl.SFTTrainer, trl.SFTConfig),
    "kto": (trl.KTOTrainer, trl.KTOConfig),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
    "rloo": (trl.RLOOTrainer, trl.RLOOConfig),
}
GENERATING = ("grpo", "rloo")
CADENCES = {
    "of two batches": {"steps_per_generation": 2},
    "of two updates": {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
}
"""Completions that last for several batches, which are gone through twice; in ids of tests."""


def _tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(TOKENS - 3)} | {"<pad>": TOKENS - 3, "<eos>": TOKENS - 2}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words | {"<unk>": TOKENS - 1}, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _rows(kind: str) -> list[dict[str, Any]]:
    draws = torch.Generator().manual_seed(0)

    def words(count: int) -> str:
        return " ".join(f"w{number}" for number in torch.randint(TOKENS - 3, (count,), generator=draws).tolist())

    if kind == "sft":
        return [{"text": words(9)} for _ in range(24)]
    if kind in GENERATING:
        return [{"prompt": words(4)} for _ in range(24)]
    if kind == "kto":  # two of each label in a batch of four
        return [{"prompt": words(4) + " ", "completion": words(6), "label": n % 2 == 0} for n in range(24)]
    prompts = [{"prompt": words(4) + " "} if kind == "dpo" else {} for _ in range(24)]
    return [{**prompt, "chosen": words(6), "rejected": words(6)} for prompt in prompts]


def _model(kind: str) -> Any:
    from transformers import LlamaForSequenceClassification

    model: Any = llama()
    if kind != "reward":
        return model
    model.config.num_labels, model.config.pad_token_id = 1, TOKENS - 3
    torch.manual_seed(0)
    return LlamaForSequenceClassification(model.config)


def _reward(completions: list[str], **_: Any) -> list[float]:
    """Some number of each completion."""
    return [sum(map(ord, text)) % 7 + 0.5 * text.count("w1") for text in completions]


def _trained(
    kind: str, trainer: Any, folder: Path, *, adapters: bool, max_steps: int = 5, cadence: str = "", **options: Any
) -> list[dict[str, float]]:
    given: dict[str, Any] = {} if kind in GENERATING else {"max_length": 32}
    if kind in GENERATING:  # two updates with each batch of completions, whose probabilities before are computed
        given = {"num_generations": 2, "max_completion_length": 8, "pad_to_multiple_of": 8, "num_iterations": 2}
        given |= {"beta": 0.1} if adapters else {"beta": 0.0}
        given |= CADENCES.get(cadence, {})
        options["reward_funcs"] = _reward
    args = KINDS[kind][1](
        output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, logging_steps=1,
        per_device_train_batch_size=4, max_steps=max_steps, learning_rate=1e-2, save_strategy="no",
        gradient_checkpointing=False, **given,
    )  # fmt: skip
    if kind in ("dpo", "kto") and not adapters:
        options["ref_model"] = llama()
    if adapters:
        task = "SEQ_CLS" if kind == "reward" else "CAUSAL_LM"
        options["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type=task)
    torch.manual_seed(1)
    trains = trainer(
        model=_model(kind), args=args, train_dataset=datasets.Dataset.from_list(_rows(kind)),
        processing_class=_tokenizer(), **options,
    )  # fmt: skip
    trains.train()
    times = ("runtime", "per_second", "flos", "epoch", "step_time")
    return [
        {name: value for name, value in row.items() if not name.endswith(times)} for row in trains.state.log_history
    ]


def differences(kind: str, folder: Path, *, adapters: bool = False, max_steps: int = 5, cadence: str = "") -> list[str]:
    """Where what TRL's trainer logs and what it logs on top of a compiled step differ."""
    from zerofx.integrations.trl import zerofx_trainer

    trainer = KINDS[kind][0]
    asked: dict[str, Any] = {"adapters": adapters, "max_steps": max_steps, "cadence": cadence}
    plain = _trained(kind, trainer, folder / "plain", **asked)
    compiled = _trained(kind, zerofx_trainer(trainer), folder / "compiled", **asked, backend="eager")
    assert len(plain) == len(compiled) == max_steps + 1  # and a summary
    return [
        f"{theirs} and {own}"
        for theirs, own in zip(plain, compiled, strict=True)
        if own != pytest.approx(theirs, rel=BOUND, abs=BOUND)
    ]


@pytest.mark.days(3)
@pytest.mark.captures
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize(
    "kind", ["reward", "sft", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dpo", "kto", "grpo"))]
)
def test_losses_and_metrics_are_those_of_trl(kind: str, adapters: bool, tmp_path: Path) -> None:
    assert differences(kind, tmp_path, adapters=adapters) == []


@pytest.mark.days(3)
@pytest.mark.captures
@pytest.mark.parametrize("kind", ["grpo", pytest.param("rloo", marks=pytest.mark.slow)])
def test_completions_are_generated_between_steps(kind: str, tmp_path: Path) -> None:
    assert differences(kind, tmp_path, max_steps=2) == []


@pytest.mark.slow
@pytest.mark.captures
@pytest.mark.parametrize("cadence", CADENCES)
def test_completions_last_for_several_batches_and_iterations(cadence: str, tmp_path: Path) -> None:
    assert differences("grpo", tmp_path, cadence=cadence) == []


def test_what_is_no_trainer_is_named() -> None:
    from zerofx.integrations.trl import zerofx_trainer

    with pytest.raises(UsageError, match=r"such as trl\.DPOTrainer, found 3"):
        zerofx_trainer(3)  # type: ignore[arg-type]  # which is refused


@pytest.mark.parametrize("argument", _REFUSED_OF_TRL)
def test_arguments_that_a_step_has_no_place_for_are_named(argument: str, tmp_path: Path) -> None:
    from zerofx.integrations.trl import zerofx_trainer

    kind = "sft" if argument == "activation_offloading" else "grpo"
    args = KINDS[kind][1](output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[])
    assert getattr(args, argument) is False
    setattr(args, argument, True)
    options: dict[str, Any] = {"reward_funcs": _reward} if kind == "grpo" else {}
    with pytest.raises(UsageError, match=f"that a compiled step can honour, found {argument}"):
        zerofx_trainer(KINDS[kind][0])(
            model=_model(kind), args=args, train_dataset=datasets.Dataset.from_list(_rows(kind)),
            processing_class=_tokenizer(), **options,
        )  # fmt: skip
