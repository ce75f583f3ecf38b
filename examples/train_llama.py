"""Train an unmodified Llama of the transformers library, small and randomly initialised, on Python source.

python examples/train_llama.py
torchrun --nproc-per-node 2 examples/train_llama.py
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import zerofx
from common import World, join_world
from text import VOCAB, Batches, load_source

BLOCK, BATCH_SIZE = 128, 8  # bytes of text, sequences per process and step


def main(args: argparse.Namespace, world: World) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=BLOCK,
        initializer_range=0.05,  # the default of 0.02 is for wider models
        use_cache=False,  # the key-value cache is for generating text
    )
    model: nn.Module = LlamaForCausalLM(config)
    model.to(world.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train, _ = load_source()
    stream = Batches(train, BLOCK, BATCH_SIZE, rank=world.rank, world_size=world.size)

    # No loss_fn: the model is called with its own arguments, and the loss is the `.loss` of what it returns.
    step = zerofx.compile(model, optimizer, stage=3, backend=args.backend)
    for index in range(args.steps):
        tokens, _ = next(stream)
        tokens = tokens.to(world.device)
        loss = step(input_ids=tokens, labels=tokens)  # the model moves the labels on by one itself
        if index % 20 == 0 or index == args.steps - 1:
            nats = world.mean(loss.item())
            world.print(f"step {index:4d}   loss {nats:.3f} nats/byte")
    world.print(step)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--backend", default="eager", choices=["inductor", "eager"], help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    with join_world() as world:
        main(parse_args(), world)
