"""``ZeroFXSFTTrainer`` trains, evaluates and logs as TRL's ``SFTTrainer`` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lib.runs.trainers import LENGTH, TOKENS, apart, history, llama
from zerofx import UsageError

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

# TRL and what it is made of warn of one another.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

LOGGED = (
    "loss",
    "entropy",
    "mean_token_accuracy",
    "num_tokens",
    "eval_loss",
    "eval_entropy",
    "eval_mean_token_accuracy",
)


def _rows(count: int) -> Any:
    """Sentences that begin with what is not learned."""
    draws = torch.Generator().manual_seed(0)
    rows = [torch.randint(TOKENS - 3, (LENGTH,), generator=draws).tolist() for _ in range(count)]
    table = {"input_ids": rows, "labels": [[-100] * 3 + row[3:] for row in rows]}
    return datasets.Dataset(datasets.table.InMemoryTable.from_pydict(table), fingerprint=str(count))


def _tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(TOKENS - 3)} | {"<pad>": TOKENS - 3, "<eos>": TOKENS - 2}
    model = tokenizers.models.WordLevel(words | {"<unk>": TOKENS - 1}, unk_token="<unk>")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model), pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def _made(kind: Any, folder: Path, *, given: dict[str, Any] | None = None, model: Any = None, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "logging_steps": 1,
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 6, "learning_rate": 1e-2,
        "max_length": LENGTH, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "no",
        "dataset_kwargs": {"skip_prepare_dataset": True},
    }  # fmt: skip
    args = trl.SFTConfig(output_dir=str(folder), **{**settings, **(given or {})})
    return kind(
        model=llama() if model is None else model,
        args=args,
        train_dataset=_rows(64),
        eval_dataset=_rows(8),
        processing_class=_tokenizer(),
        **options,
    )


@pytest.mark.days(3)
def test_losses_and_metrics_are_those_of_trl(tmp_path: Path) -> None:
    from zerofx.integrations.trl import ZeroFXSFTTrainer

    plain = _made(trl.SFTTrainer, tmp_path)
    plain.train()
    one = _made(ZeroFXSFTTrainer, tmp_path, backend="eager")
    one.train()
    # TRL computes the output layer in pieces, which rounds otherwise.
    assert apart(history(one, *LOGGED), history(plain, *LOGGED), bound=3e-5) == []
    assert one.step.options.recompute == "full"  # as checkpointing, TRL's default, asks


def _in_four_bits(folder: Path, *, double: bool) -> Any:
    """The model with its frozen weights in 4 bits, and adapters."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    plain: Any = llama(width=64)
    plain.save_pretrained(folder)  # of whose codes none are few enough to be buffers
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.float32, device_map={"": "cpu"}
    )
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(model.requires_grad_(False), lora)


@pytest.mark.parametrize("double", [False, True])
def test_adapters_next_to_weights_in_four_bits_are_trained_so_too(double: bool, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="its weights are trained too, where it is installed")
    from zerofx.integrations.trl import ZeroFXSFTTrainer

    # TRL has adapters in bfloat16 next to such weights, so that sums in another order, 1e-7 apart, soon round apart: as
    # far, to the digit, as next to the same weights in float32.
    given = {"eval_strategy": "no", "gradient_checkpointing": False, "max_steps": 4}
    trained = []
    for kind, options in ((trl.SFTTrainer, {}), (ZeroFXSFTTrainer, {"backend": "eager"})):
        model = _in_four_bits(tmp_path / "model", double=double)
        trainer = _made(kind, tmp_path, given=given, model=model, **options)
        trainer.train()
        trained.append((history(trainer, "loss"), trainer))
    assert apart(trained[1][0], trained[0][0], bound=3e-5) == []
    assert {bucket.dtype for bucket in trained[1][1].step.plan.buckets} >= {"torch.uint8", "torch.float32"}


def test_what_a_step_cannot_honour_is_named(tmp_path: Path) -> None:
    from zerofx.integrations.trl import ZeroFXSFTTrainer

    with pytest.raises(UsageError, match="found loss_type"):
        _made(ZeroFXSFTTrainer, tmp_path, given={"loss_type": "dft"})
