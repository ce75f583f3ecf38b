"""Check ``TrainingArguments`` of transformers: a compiled step honours some, and others are refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from transformers import TrainingArguments

from zerofx import api
from zerofx.errors import UsageError
from zerofx.option_table import error_of_keyword

# What the Trainer's own arguments say: each with the one that does.
_OF_THE_TRAINER = {
    "model": "model=",
    "optimizer": "optimizers=",
    "loss_fn": "compute_loss_func=, or a compute_loss() of your own",
    "forward": "compute_loss_func=, or a compute_loss() of your own",
    "example_batch": "train_dataset=",
    "accumulate": "gradient_accumulation_steps",
    "max_grad_norm": "max_grad_norm",
    "loss_terms": "average_tokens_across_devices",
    "outputs": "compute_metrics=",
}

_DDP = "the model is not wrapped in DistributedDataParallel: leave it out"
# What a step has no place for, and what to give instead.
_REFUSED = {
    "deepspeed": "stages, offload and NVMe are stage= and offload= of the ZeroFXTrainer",
    "fsdp": "sharding is stage= and mesh= of the ZeroFXTrainer",
    "parallelism_config": "give mesh= to the ZeroFXTrainer",
    "torch_compile": "backend='inductor', the default, compiles the whole step",
    "use_liger_kernel": "backend='inductor' fuses, and tile= has logits a few rows at a time",
    "neftune_noise_alpha": "its hook comes and goes with training: add the noise in the model",
    "auto_find_batch_size": "zerofx.largest_micro_batch() finds the batch size that fits before training",
    "torch_empty_cache_steps": "memory_budget= is what holds memory down",
    "bf16_full_eval": "precision='bf16' holds in evaluations too",
    "fp16_full_eval": "precision='fp16' holds in evaluations too",
    "debug": "its hooks read values in the forward, which runs in no step",
    "ddp_find_unused_parameters": _DDP,
    "ddp_bucket_cap_mb": _DDP,
    "ddp_broadcast_buffers": _DDP,
    "ddp_static_graph": _DDP,
}
# The same of TRL's configurations.
_REFUSED_OF_TRL = {
    "activation_offloading": "offload= and memory_budget= do that",
    "use_vllm": "give a rollout_func, which hands weights to an engine by trainer.step.weights()",
    "use_transformers_continuous_batching": "its caches are of the whole model: completions are generated without it",
    "sync_ref_model": "it reads the model after each step: leave it out",
}


def check_keywords(given: Mapping[str, Any], base: type) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide a trainer's keywords into those of ``base`` and those of ``zerofx.compile``.

    Raises:
        UsageError: a keyword of ``zerofx.compile`` is what an argument of the trainer already says.
        TypeError: there is no such keyword.
    """
    of_base = {name for kind in base.__mro__ for name in inspect.signature(kind.__init__).parameters}  # type: ignore[misc]  # each is looked at as what it is
    own, options = dict[str, Any](), dict[str, Any]()
    known = inspect.signature(api.compile).parameters
    for name, value in given.items():
        if name in of_base:
            own[name] = value
        elif name in _OF_THE_TRAINER:
            raise UsageError(f"expected {name} to be left to the Trainer, found {name}=: give {_OF_THE_TRAINER[name]}")
        elif name in known:
            options[name] = value
        else:
            raise error_of_keyword(base.__name__, name, [*of_base, *known])
    return own, options


def check_arguments(args: TrainingArguments) -> None:
    """Check that a step supports the arguments.

    Raises:
        UsageError: names each unsupported one.
    """
    refused = {
        name: why for name, why in (_REFUSED | _REFUSED_OF_TRL).items() if _is_given(name, getattr(args, name, None))
    }
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        if set(getattr(args, name, None) or {}) - {"use_reentrant"}:
            refused[name] = "which layers compute again what, and what is offloaded, is the plan's choice: leave it out"
    if getattr(args.accelerator_config, "gradient_accumulation_kwargs", None):
        refused["accelerator_config.gradient_accumulation_kwargs"] = "reduce= says when gradients are reduced"
    if args.n_gpu > 1:
        refused["one process for several GPUs"] = "start one for each, with torchrun --nproc-per-node"
    if refused:
        listed = "; ".join(f"{name}{_text(args, name)} ({why})" for name, why in refused.items())
        raise UsageError(f"expected arguments that a compiled step can honour, found {listed}")


def precision_of(args: TrainingArguments, options: Mapping[str, Any]) -> dict[str, Any]:
    """The precision that the arguments ask for.

    Raises:
        UsageError: ``options`` ask for another.
    """
    asked = {"bf16" if args.bf16 else "fp16" if args.fp16 else None, options.get("precision")} - {None}
    if len(asked) > 1:
        raise UsageError(
            f"expected one precision, found {'bf16' if args.bf16 else 'fp16'}=True and "
            f"precision={options['precision']!r}: give one of them"
        )
    return {"precision": asked.pop()} if asked else {}


def recompute_of(args: TrainingArguments, options: Mapping[str, Any]) -> dict[str, Any]:
    """The recomputation that the arguments ask for: checkpointing asks for all of it, unless a budget is given."""
    checkpoints = getattr(args, "activation_checkpointing", None) or getattr(args, "gradient_checkpointing", None)
    given = {"recompute", "memory_budget", "plan"} & options.keys()
    return {"recompute": "full"} if checkpoints and not given else {}


def _is_given(name: str, value: Any) -> bool:
    """True if an argument is set; if None means unset, False does too."""
    return value not in (None, [], "") and (value is not False or name.startswith("ddp_"))


def _text(args: TrainingArguments, name: str) -> str:
    value = getattr(args, name, None)
    if value is None:
        return ""
    return f"={value!r}" if isinstance(value, str | int | float | list) else f"={type(value).__name__}"
