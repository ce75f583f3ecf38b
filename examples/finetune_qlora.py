"""Fine-tune a small language model whose frozen weights are in 4 bits (QLoRA, arXiv:2305.14314): only adapters learn.

python examples/finetune_qlora.py
python examples/finetune_qlora.py --trainer --model path/of/a/folder
torchrun --nproc-per-node 2 examples/finetune_qlora.py

Needs bitsandbytes and peft. Without --model a small model is made, and saved, at first.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TrainingArguments

import zerofx
from common import World, join_world
from finetune_trainer import BLOCK, Blocks
from text import VOCAB, Batches, load_prose
from zerofx.integrations.transformers import ZeroFXTrainer


def make_model(folder: Path) -> None:
    """Save a model with random weights in bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=BLOCK,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def load_in_4_bits(folder: Path, device: torch.device, *, double: bool) -> Any:
    """The model in `folder` with frozen weights in 4 bits (scales in 8 bits if `double`), and with adapters."""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=config, dtype=torch.bfloat16, device_map={"": str(device)}
    )
    model.requires_grad_(False)
    torch.manual_seed(1)
    lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora).train()


def train_by_step(model: Any, args: argparse.Namespace, world: World) -> zerofx.Step:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    step = zerofx.compile(model, optimizer, stage=3, backend=args.backend, memory_budget=args.memory_budget)
    text, _ = load_prose()
    stream = Batches(text, BLOCK, 8, rank=world.rank, world_size=world.size)
    torch.manual_seed(2 + world.rank)
    for index in range(args.steps):
        ids = next(stream)[0].to(world.device)
        loss = step(input_ids=ids, labels=ids)
        if index % 25 == 0 or index == args.steps - 1:
            world.print(f"step {index:4d}   loss {loss.item():.3f} nats/byte")
    world.print(f"sent in a step {step.plan.wire_bytes:,} bytes, parameters and states {step.plan.model_state_bytes:,}")
    return step


def train_by_trainer(model: Any, args: argparse.Namespace, output: Path) -> zerofx.Step:
    training_args = TrainingArguments(
        output_dir=str(output),
        max_steps=args.steps,
        per_device_train_batch_size=8,
        learning_rate=2e-3,
        logging_steps=25,
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        report_to=[],
    )
    text, _ = load_prose()
    trainer = ZeroFXTrainer(
        model, training_args, train_dataset=Blocks(text, 2000), backend=args.backend, memory_budget=args.memory_budget
    )
    trainer.train()
    assert trainer.step is not None, "it has been trained"
    return trainer.step


def main(args: argparse.Namespace, world: World) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.model
        if folder is None:
            shared = [temporary]  # of rank 0, which makes it
            if world.rank == 0:
                make_model(Path(temporary))
            if dist.is_initialized():
                dist.broadcast_object_list(shared)
            folder = shared[0]
        model = load_in_4_bits(Path(folder), world.device, double=args.double)
        learned = sum(p.numel() for p in model.parameters() if p.requires_grad)
        world.print(f"{learned:,} parameters learn; the others are frozen, in 4 bits")
        if args.trainer:
            step = train_by_trainer(model, args, Path(temporary, "runs"))
        else:
            step = train_by_step(model, args, world)
        with step.full_parameters():
            if world.rank == 0 and args.output is not None:
                model.save_pretrained(args.output)  # the adapters alone
        step.close()
        if dist.is_initialized():
            dist.barrier()
    merged = model.merge_and_unload()
    kinds = sorted({type(p).__name__ for p in merged.parameters()})
    world.print(f"merged into the weights, which are {' and '.join(kinds)}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--model", help="folder of a model to load; one is made where none is given")
    parser.add_argument("--double", action="store_true", help="scales of weights in 8 bits, too")
    parser.add_argument("--trainer", action="store_true", help="train with the Trainer of transformers")
    parser.add_argument("--memory-budget", help='such as "24GiB"; no limit where none is given')
    parser.add_argument("--output", help="folder for the adapters")
    parser.add_argument("--backend", default="eager", choices=["inductor", "eager"], help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    with join_world() as world:
        main(parse_args(), world)
