"""Ranks that share one computation, presented to the Trainer: an accelerator that counts each group of them once."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainingArguments

from zerofx.errors import UsageError
from zerofx.mesh_option import AUTO, mesh_for, mesh_of
from zerofx.scheduler.plan.mesh import Mesh
from zerofx.torch_private.operators import pytree


class DataRanks(Accelerator):  # type: ignore[misc]  # accelerate has no types
    """An ``Accelerator`` that gives groups of ``num_sharing`` consecutive processes the same batches.

    Its processes are those groups: data loaders divide data among them, and a gather has each group's part once.
    """

    num_sharing = 1

    @property
    def num_processes(self) -> int:
        return int(self.state.num_processes) // self.num_sharing

    @property
    def process_index(self) -> int:
        return int(self.state.process_index) // self.num_sharing

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Do nothing: a step has the gradients of its loss already."""

    def gather(self, tensor: Any) -> Any:
        gathered, num = super().gather(tensor), self.state.num_processes
        if self.num_sharing == 1:
            return gathered
        return pytree.tree_map_only(
            torch.Tensor, lambda of_all: torch.cat(of_all.tensor_split(num)[:: self.num_sharing]), gathered
        )

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        are_objects = use_gather_object or not all(isinstance(n, torch.Tensor) for n in pytree.tree_leaves(input_data))
        if are_objects and self.state.process_index % self.num_sharing:
            input_data = []  # lists are joined
        return super().gather_for_metrics(input_data, use_gather_object=are_objects)


def may_share(mesh: object) -> bool:
    """True if some ranks of a mesh get the same batches, or may once it is chosen."""
    asked = AUTO if mesh == AUTO else mesh_of(mesh)
    return asked == AUTO or (isinstance(asked, Mesh) and asked.model > 1)


def num_sharing(mesh: object, num_ranks: int) -> int:
    """The number of ranks, of ``num_ranks``, that get the same batches, as far as the mesh is known.

    Raises:
        UsageError: the mesh is of another number of ranks.
    """
    return 1 if mesh == AUTO else mesh_for(mesh_of(mesh), num_ranks).model


def check_loading(args: TrainingArguments, mesh: object) -> None:
    """Check that several ranks can be given the same batches.

    Raises:
        UsageError: an argument gives each rank a batch of its own; names it.
    """
    config: Any = args.accelerator_config
    asked = {
        "train_sampling_strategy='batch_rebalance'": getattr(args, "train_sampling_strategy", "") == "batch_rebalance",
        "accelerator_config.dispatch_batches": bool(config.dispatch_batches),
    }
    dividing = [name for name, is_asked in asked.items() if is_asked]
    if dividing and may_share(mesh):
        raise UsageError(
            f"expected data that groups of ranks along 'model' are given alike, found {', '.join(dividing)}, which "
            f"divides it among all ranks: leave it out, or give a mesh of 'replicate' and 'shard'"
        )


def first_batch(loader: DataLoader[Any], num_samples: int) -> Any:
    """A batch of the first samples of a loader's data, independent of its sampler."""
    data: Any = loader.dataset
    samples = (
        islice(data, num_samples) if isinstance(data, IterableDataset) else map(data.__getitem__, range(num_samples))
    )
    return loader.collate_fn(list(samples))


def repeat(batch: Any, times: int) -> Any:
    """Repeat a batch's samples ``times`` times."""
    sizes = [
        tensor.shape[0] for tensor in pytree.tree_leaves(batch) if isinstance(tensor, torch.Tensor) and tensor.ndim
    ]
    return pytree.tree_map_only(
        torch.Tensor,
        lambda tensor: torch.cat([tensor] * times) if tensor.ndim and tensor.shape[0] == sizes[0] else tensor,
        batch,
    )
