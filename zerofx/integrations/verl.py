"""An engine of verl that trains by a compiled step: ``strategy: zerofx`` of an actor, a reference policy, or SFT.

verl imports this module where ``VERL_USE_EXTERNAL_MODULES=zerofx.integrations.verl`` says so; options of
``zerofx.compile`` are ``options`` of ``ZeroFXEngineConfig``.

A loss of verl is a function of log-probabilities and entropies, in Python that reads values. So it is not captured:
these are evaluated, the loss is computed of them, and the step trains on their products with its gradients::

    log_probs = step.evaluate(tokens)               # one forward, which keeps nothing for backward
    loss = loss_function(log_probs);  loss.backward()
    step(tokens, log_probs.grad)                    # of sum(log_probs * gradient), whose gradients are the loss's

Does not handle: critics, images, adapters of verl's own making, the axes ``model`` and ``pipe``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from verl.utils import tensordict_utils
from verl.utils.py_functional import append_to_dict
from verl.utils.torch_functional import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup
from verl.workers.config import EngineConfig
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry

from zerofx import api
from zerofx.errors import UsageError

_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": None}


@dataclass
class ZeroFXEngineConfig(EngineConfig):
    """verl's settings of an engine, with ``options`` of ``zerofx.compile``.

    A batch is what a rank has of a mini-batch, and ``options`` say how it is divided (``accumulate``); of verl's own
    settings those of micro-batches count for inference alone. Sequences are padded to the longest of all ranks,
    rounded up to a multiple of ``pad_to_multiple_of``: each such length is captured once.
    """

    strategy: str = "zerofx"
    options: dict[str, Any] = field(default_factory=dict)
    pad_to_multiple_of: int = 64


@EngineRegistry.register(model_type="language_model", backend="zerofx", device=["cpu", "cuda"])
class ZeroFXEngine(BaseEngine):
    """A causal language model of transformers whose parameters, gradients and states a compiled step holds.

    What verl asks for and no step does is refused by a ``UsageError``, which says what to do instead.
    """

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        super().__init__()
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode: str | None = None
        self._pending: dict[str, Tensor] | None = None
        self._saved: list[str] = []
        self._options = dict(getattr(engine_config, "options", {}))
        shared = sorted({"model", "pipe"} & set(self._options.get("mesh") or ()))
        refused = {
            f"the axis {' and '.join(shared)} in options": shared and "verl gives each rank a batch of its own",
            f"dtype {engine_config.dtype}": engine_config.dtype not in _PRECISIONS
            and "give bfloat16, float16 or float32",
            "accumulate='auto' in options": self._options.get("accumulate") == "auto" and "give a number",
            "lora_rank": model_config.get("lora_rank", 0) and "merge the adapters, or train all weights",
            "optimizer_offload without param_offload": engine_config.optimizer_offload
            and not engine_config.param_offload
            and "options={'offload': 'host'} keeps states on the host, or offload both",
        }
        for name, instead in refused.items():
            if instead:
                raise UsageError(f"expected settings of verl that a compiled step can honour, found {name}: {instead}")

    def initialize(self) -> None:
        """Load the model, and make optimizer, schedule and step; nothing is captured before the first batch."""
        config = self.model_config
        model: Any = AutoModelForCausalLM.from_pretrained(
            config.local_path or config.path, config=config.hf_config, dtype=torch.float32,
            attn_implementation="sdpa",  # flash attention reads the values of a mask
            trust_remote_code=config.trust_remote_code,
        )  # fmt: skip
        self.module: nn.Module = model.to(_device())
        drawn = {name: value for name, value in vars(self.module.config).items() if _is_dropout(name, value)}
        if drawn:
            raise UsageError(
                f"expected a model without dropout, whose log-probabilities are those that it is trained on, found "
                f"{drawn} in its configuration: set them to 0"
            )
        given: dict[str, Any] = {"stage": 3, "precision": _PRECISIONS[self.engine_config.dtype], **self._options}
        if self.engine_config.forward_only:
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.module.parameters(), lr=0.0)
            self.lr_scheduler: Any = None
        else:
            self.optimizer = build_optimizer(self.module.parameters(), self.optimizer_config)
            self.lr_scheduler = self._make_schedule()
            given = {"max_grad_norm": self.optimizer_config.clip_grad, "on_nonfinite": "skip", **given}
        self.step = api.compile(self.module, self.optimizer, forward=_forward, **given)

    def _make_schedule(self) -> Any:
        config = self.optimizer_config
        of_ratio = int(config.lr_warmup_steps_ratio * config.total_training_steps)
        warmup = max(config.lr_warmup_steps or 0, 0) or of_ratio
        if config.lr_scheduler_type == "constant":
            return get_constant_schedule_with_warmup(self.optimizer, warmup)
        return get_cosine_schedule_with_warmup(
            self.optimizer, warmup, config.total_training_steps, min_lr_ratio=config.min_lr_ratio or 0.0,
            num_cycles=config.num_cycles, zero_indexed_step=config.zero_indexed_step,
        )  # fmt: skip

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Log-probabilities of a batch, their loss, and its metrics; ``optimizer_step`` trains on it next.

        ``data`` has nested tensors of samples of any length, and what verl says of the batch.
        """
        data = data.to(_device())
        counted = data["loss_mask"].sum() if "loss_mask" in data else torch.tensor(0, device=_device())
        if (group := self.get_data_parallel_group()) is not None:
            dist.all_reduce(counted, group=group)
        tensordict_utils.assign_non_tensor(data, batch_num_tokens=counted.item())
        tensordict_utils.assign_non_tensor(data, dp_size=self.get_data_parallel_size())
        inputs = self._pad(data)
        has_entropy = tensordict_utils.get_non_tensor_data(data, "calculate_entropy", default=False)
        padded = self._evaluate(data, inputs, has_entropy)
        offsets = data["input_ids"].offsets()
        mask = inputs["attention_mask"].bool()
        leaves = {name: values[mask].requires_grad_(not forward_only) for name, values in padded.items()}
        outputs = {name: torch.nested.nested_tensor_from_jagged(leaf, offsets) for name, leaf in leaves.items()}
        loss, metrics = torch.zeros((), device=_device()), dict[str, Any]()
        if loss_function is not None:
            loss, metrics = loss_function(model_output=outputs, data=data, dp_group=group)
        if not forward_only:
            loss.backward()
            self._pending = {**inputs, **self._weights(leaves, mask)}
        append_to_dict(collected := dict[str, Any](), metrics)
        given = {name: values.detach() for name, values in outputs.items()}
        return {"model_output": given, "loss": [loss.detach().item()], "metrics": collected}

    def optimizer_zero_grad(self) -> None:
        self._pending = None

    def optimizer_step(self) -> float:
        """Train on the batch of ``forward_backward_batch``; returns the norm of its gradients, before clipping."""
        pending, self._pending = self._pending, None
        if pending is None:
            raise UsageError("expected forward_backward_batch(data, loss) before optimizer_step(), found no batch")
        self.step(**pending)
        return float("nan") if (norm := self.step.grad_norm) is None else float(norm)

    def lr_scheduler_step(self) -> float:
        self.lr_scheduler.step()
        return float(self.lr_scheduler.get_last_lr()[0])

    def _pad(self, data: Any) -> dict[str, Tensor]:
        """Tokens, positions, labels and temperatures as dense tensors, ``[samples, tokens]``, alike on all ranks."""
        ids, multiple = data["input_ids"], getattr(self.engine_config, "pad_to_multiple_of", 1)
        longest = ids.offsets().diff().max()
        if (group := self.get_data_parallel_group()) is not None:
            dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
        shape = (len(ids), -(-int(longest) // multiple) * multiple)
        following = torch.nested.nested_tensor_from_jagged(torch.roll(ids.values(), -1), ids.offsets())
        mask = torch.nested.nested_tensor_from_jagged(torch.ones_like(ids.values()), ids.offsets())
        dense = {
            "input_ids": ids, "position_ids": data["position_ids"], "labels": following, "attention_mask": mask
        }  # fmt: skip
        padded = {name: torch.nested.to_padded_tensor(nested, 0, shape) for name, nested in dense.items()}
        temperature = tensordict_utils.get_non_tensor_data(data, "temperature", default=1.0)
        rows = torch.as_tensor(temperature, dtype=torch.float32, device=ids.device).expand(len(ids))
        return {**padded, "temperature": rows.contiguous()}

    def _evaluate(self, data: Any, inputs: dict[str, Tensor], has_entropy: bool) -> dict[str, Tensor]:
        """Log-probabilities, and entropies, of padded tokens, a few samples at a time."""
        num_samples, length = inputs["input_ids"].shape
        said = partial(tensordict_utils.get_non_tensor_data, data)
        most = int(said("micro_batch_size_per_gpu", default=None) or num_samples)
        if said("use_dynamic_bsz", default=False):
            most = max(int(said("max_token_len_per_gpu", default=length)) // length, 1)
        each = next(size for size in range(min(most, num_samples), 0, -1) if num_samples % size == 0)
        if not self.step.is_prepared:
            like = torch.zeros(num_samples, length, device=inputs["input_ids"].device)
            self.step.prepare(**inputs, log_probs=like, entropy=like if has_entropy else None)
        cuts = [{name: v[begin : begin + each] for name, v in inputs.items()} for begin in range(0, num_samples, each)]
        parts = [self.step.evaluate(**cut, with_entropy=has_entropy) for cut in cuts]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _weights(self, leaves: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
        """The gradients of the loss, by what they are of, in the places of padded tokens.

        A step averages its micro-batches, whose losses verl adds up.
        """
        num_micro_batches = self._options.get("accumulate", 1)
        weights = {name: torch.zeros(mask.shape, device=mask.device) for name in leaves}
        for name, leaf in leaves.items():
            if leaf.grad is not None:
                weights[name][mask] = leaf.grad.float() * num_micro_batches
        return weights

    @property
    def is_param_offload_enabled(self) -> bool:
        return bool(self.engine_config.param_offload)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return bool(self.engine_config.optimizer_offload)

    def train_mode(self, **options: Any) -> BaseEngineCtx:
        return BaseEngineCtx(self, mode="train", **options)

    def eval_mode(self, **options: Any) -> BaseEngineCtx:
        return BaseEngineCtx(self, mode="eval", **options)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Have all that the step holds wait on the host (``"cpu"``), or bring it up."""
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        if not model or not self.step.is_prepared:
            return
        (self.step.park if device == "cpu" else self.step.unpark)()

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def get_data_parallel_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def get_data_parallel_group(self) -> Any:
        return dist.group.WORLD if dist.is_initialized() else None

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """Names and tensors in bfloat16, a bucket at a time, for inference; each is valid until the next."""
        if self.step.is_prepared:
            return self.step.weights(dtype=torch.bfloat16), None
        state = self.module.state_dict().items()
        return ((name, each.to(torch.bfloat16) if each.is_floating_point() else each) for name, each in state), None

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0,
        max_ckpt_to_keep: int | None = None, **_: Any,
    ) -> None:  # fmt: skip
        """Save all that training goes on from in the folder ``local_path``, as ``step.save_checkpoint``."""
        if hdfs_path is not None:
            raise UsageError(f"expected a path that all ranks can write to, found hdfs_path {hdfs_path}: give none")
        self.step.save_checkpoint(local_path, state=self._state())
        self._saved = [path for path in self._saved if path != local_path] + [local_path]
        for path in self._saved[: -max_ckpt_to_keep or None] if max_ckpt_to_keep else ():
            self._saved.remove(path)
            if self.get_data_parallel_rank() == 0:
                shutil.rmtree(path, ignore_errors=True)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **_: Any
    ) -> None:  # fmt: skip
        """Go on from a checkpoint of ``save_checkpoint``, of any number of ranks."""
        self.step.load_checkpoint(Path(local_path), state=self._state())

    def _state(self) -> dict[str, Any]:
        return {} if self.lr_scheduler is None else {"lr_scheduler": self.lr_scheduler}


def _forward(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, labels: Tensor,
    temperature: Tensor, log_probs: Tensor | None = None, entropy: Tensor | None = None, with_entropy: bool = False,
) -> Any:  # fmt: skip
    """Log-probabilities of labels, and entropies if they are asked for; their products with gradients, if given."""
    outputs = model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False)
    logits = outputs.logits.float() / temperature[:, None, None]
    of_labels = -F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    if log_probs is None:
        return {"log_probs": of_labels, "entropy": _entropy(logits)} if with_entropy else {"log_probs": of_labels}
    loss = (of_labels * log_probs).sum()
    return loss if entropy is None else loss + (_entropy(logits) * entropy).sum()


def _device() -> str:
    """Of this process, as torch has it: verl takes a machine without an accelerator for one with CUDA."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _entropy(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


def _is_dropout(name: str, value: object) -> bool:
    return ("dropout" in name or name.endswith("pdrop")) and isinstance(value, int | float) and value > 0
