"""The program of a process that compiles regions for another; see ``codegen/parallel/helpers.py``."""

from __future__ import annotations

import os
import pickle
import sys

import torch

from zerofx.codegen.inductor.compile import compile_region, fake_like
from zerofx.codegen.inductor.cpp import preparation
from zerofx.codegen.parallel.helpers import Task, TensorLike
from zerofx.codegen.source import load_source
from zerofx.errors import CompilerError


def main() -> None:
    """Compile what comes on stdin until it ends, and write a line for each."""
    # Libraries write to stdout what they like; answers go where stdout was.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    preparation("cpu").begin()
    answers.write("ready\n")
    while True:
        try:
            task = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        _compile(task)
        answers.write("done\n")


def _compile(task: Task) -> None:
    torch.set_num_threads(task.num_threads)
    inputs = [
        fake_like(one.shape, one.stride, one.dtype, one.device) if isinstance(one, TensorLike) else one
        for one in task.inputs
    ]
    try:
        compile_region(load_source(task.source, task.filename)[task.name], inputs, task.name, task.kernels)
    except CompilerError as error:
        sys.stderr.write(f"{error}\n")


if __name__ == "__main__":
    main()
