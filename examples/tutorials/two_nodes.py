"""Train on two nodes, and go on after a node was lost: examples/tutorials/two_nodes.sbatch starts it under SLURM.

torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 examples/tutorials/two_nodes.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

import zerofx
from small_llama import make_small_llama


def main(args: argparse.Namespace) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])

    with zerofx.empty_init(), device:
        model = make_small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    step = zerofx.compile(
        model,
        optimizer,
        stage=3,
        mesh={"replicate": dist.get_world_size() // ranks_per_node, "shard": ranks_per_node},
        precision="bf16",
        memory_budget=args.memory_budget,
        max_grad_norm=1.0,
        wire=args.wire,
        backend=args.backend,
    )
    run = zerofx.Run(step, args.output, every=args.every, state={"scheduler": scheduler})
    for number in run.steps(args.steps):  # from where the latest checkpoint in the folder ends
        draws = torch.Generator().manual_seed(number * dist.get_world_size() + dist.get_rank())
        tokens = torch.randint(512, (2, 32), generator=draws).to(device)
        loss = step(input_ids=tokens, labels=tokens)
        scheduler.step()
        mean = step.average(loss)
        if dist.get_rank() == 0:
            print(f"step {number}: loss {mean:.3f}", flush=True)
    if dist.get_rank() == 0:
        print(step)
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory-budget", help="the most bytes on the device, such as 70GiB")
    parser.add_argument(
        "--wire", default="exact", choices=["exact", "int8", "int4", "fp8"], help="default: %(default)s"
    )
    parser.add_argument("--steps", type=int, default=20, help="in all (default: %(default)s)")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--output", default="runs/two_nodes", help="folder on a shared drive (default: %(default)s)")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "eager"], help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse_args())
