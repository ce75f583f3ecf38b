"""TRL's own trainers on top of a compiled step: losses and metrics are those of TRL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lib.runs.trainers import TOKENS, llama
from zerofx import UsageError

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
}


def _tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(TOKENS - 3)} | {"<pad>": TOKENS - 3, "<eos>": TOKENS - 2}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words | {"<unk>": TOKENS - 1}, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _rows(kind: str) -> list[dict[str, str]]:
    draws = torch.Generator().manual_seed(0)

    def words(count: int) -> str:
        return " ".join(f"w{number}" for number in torch.randint(TOKENS - 3, (count,), generator=draws).tolist())

    if kind == "sft":
        return [{"text": words(9)} for _ in range(24)]
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


def _trained(kind: str, trainer: Any, folder: Path, *, adapters: bool, **options: Any) -> list[dict[str, float]]:
    args = KINDS[kind][1](
        output_dir=str(folder), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, logging_steps=1,
        per_device_train_batch_size=4, max_steps=5, learning_rate=1e-2, save_strategy="no", max_length=32,
        gradient_checkpointing=False,
    )  # fmt: skip
    if kind == "dpo" and not adapters:
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
    return [
        {name: value for name, value in row.items() if not name.endswith(("runtime", "per_second", "flos", "epoch"))}
        for row in trains.state.log_history
    ]


@pytest.mark.captures
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("kind", ["reward", pytest.param("dpo", marks=pytest.mark.slow), "sft"])
def test_losses_and_metrics_are_those_of_trl(kind: str, adapters: bool, tmp_path: Path) -> None:
    from zerofx.integrations.trl import zerofx_trainer

    trainer = KINDS[kind][0]
    plain = _trained(kind, trainer, tmp_path / "plain", adapters=adapters)
    compiled = _trained(kind, zerofx_trainer(trainer), tmp_path / "compiled", adapters=adapters, backend="eager")
    assert len(plain) == len(compiled) == 6  # five steps, and a summary
    for theirs, own in zip(plain, compiled, strict=True):
        assert own == pytest.approx(theirs, rel=BOUND, abs=BOUND)


def test_what_is_no_trainer_is_named() -> None:
    from zerofx.integrations.trl import zerofx_trainer

    with pytest.raises(UsageError, match=r"such as trl\.DPOTrainer, found 3"):
        zerofx_trainer(3)  # type: ignore[arg-type]  # which is refused
