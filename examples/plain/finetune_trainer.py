"""Fine-tune a causal language model with the Trainer of transformers: all of its weights, or with LoRA's alone."""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, TrainingArguments
from transformers import Trainer

from text import VOCAB, load_prose

BLOCK = 64  # bytes of text


class Blocks(Dataset[dict[str, Tensor]]):
    def __init__(self, text: Tensor, count: int) -> None:
        self.ids = text[: count * BLOCK].long().view(-1, BLOCK)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def main(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=BLOCK,
    )
    model: PreTrainedModel | nn.Module = LlamaForCausalLM(config)  # in place of from_pretrained(), which downloads
    if args.lora:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, lora)
    text, validation = load_prose()
    training_args = TrainingArguments(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        warmup_steps=10,
        lr_scheduler_type="cosine",
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=50,
        save_strategy="steps",
        save_steps=50,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    train, test = Blocks(text, 2000), Blocks(validation, 64)
    trainer = Trainer(model, training_args, train_dataset=train, eval_dataset=test)
    trainer.train(resume_from_checkpoint=args.resume)
    metrics = trainer.evaluate()
    print(f"perplexity {math.exp(metrics['eval_loss']):.2f}")
    trainer.save_model()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--lora", action="store_true", help="train LoRA's adapters alone; needs peft")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--output", default="runs/finetune", help="folder of checkpoints (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_args())
