"""Preference training with TRL's own DPOTrainer, sharded and within a budget.

python examples/tutorials/dpo.py
torchrun --nproc-per-node 2 examples/tutorials/dpo.py --memory-budget 20GiB
"""

from __future__ import annotations

import argparse

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from small_llama import make_small_llama
from zerofx.integrations.trl import zerofx_trainer

WORDS = [f"w{number}" for number in range(60)]


def main(args: argparse.Namespace) -> None:
    model = make_small_llama(len(WORDS) + 3)  # or AutoModelForCausalLM.from_pretrained(...)
    tokenizer = make_tokenizer()  # or AutoTokenizer.from_pretrained(...)
    training_args = trl.DPOConfig(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        precompute_ref_log_probs=True,  # the reference model is run once, before training, and then gone
        logging_steps=1,
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    trainer = zerofx_trainer(trl.DPOTrainer)(
        model,
        args=training_args,
        train_dataset=make_pairs(64),
        processing_class=tokenizer,
        memory_budget=args.memory_budget,
        backend=args.backend,
    )
    trainer.train()
    trainer.save_model()
    print(trainer.step)


def make_pairs(count: int) -> Dataset:
    """Prompts with an answer that is preferred, of words with even numbers, and one that is not."""
    draws = torch.Generator().manual_seed(0)

    def words(num_words: int, first: int, stride: int) -> str:
        numbers = first + stride * torch.randint(len(WORDS) // stride, (num_words,), generator=draws)
        return " ".join(WORDS[number] for number in numbers.tolist())

    rows = [
        {"prompt": f"{words(4, 0, 1)} ", "chosen": words(6, 0, 2), "rejected": words(6, 1, 2)} for _ in range(count)
    ]
    return Dataset.from_list(rows)


def make_tokenizer() -> PreTrainedTokenizerFast:
    special = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {word: number for number, word in enumerate([*WORDS, *special])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory-budget", help="the most bytes on the device, such as 20GiB")
    parser.add_argument("--steps", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--output", default="runs/dpo", help="folder of the run (default: %(default)s)")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "eager"], help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_args())
