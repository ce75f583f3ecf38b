"""A model's weights from files: which tensor is which, and each rank's slices of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from zerofx.capture.checks import fits, misfits, warn_of_rounding
from zerofx.deferred import DeferredTensor
from zerofx.errors import UsageError
from zerofx.ir.buckets import Bucket, Slot
from zerofx.ir.tensor_parts import named_buffers, named_parameters, parts_of
from zerofx.precision import dtype_name
from zerofx.runtime.comm.control import Control
from zerofx.runtime.comm.groups import Communicators
from zerofx.runtime.state.weights import copy_overlap, to_bucket_order
from zerofx.torch_private.modules import buffer_table
from zerofx.units import first_few

if TYPE_CHECKING:
    from zerofx.runtime.state.weight_files import WeightFiles

T = TypeVar("T")


def match(model: nn.Module, files: WeightFiles) -> dict[str, tuple[str, ...]]:
    """The names in ``files`` of each parameter and persistent buffer, by each of its names in the model.

    The files are to hold what ``model.state_dict()`` holds; of a tied tensor one of its names is enough. Where they
    hold more than one object (``dcp.save({"model": ..., "optimizer": ...})``) the model is the one, of the first parts
    of names, that has all of its tensors.

    Raises:
        UsageError: lists tensors that are missing, that the model does not have, and that have another shape or kind.
    """
    if in_parts := [name for name, parameter in model.named_parameters() if parts_of(parameter)]:
        raise UsageError(
            f"expected a model of plain parameters to read weights= into, found {first_few(in_parts)} in few bits, "
            f"whose offsets and shapes no file of tensors has: load it by from_pretrained(), and leave weights= out"
        )
    state = {
        key: tensor for key, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)
    }
    keys: dict[int, list[str]] = {}
    for key, tensor in state.items():
        keys.setdefault(id(tensor), []).append(key)
    tied = [*keys.values()]
    prefix = _prefix(tied, files)
    names_of = {id(state[group[0]]): tuple(prefix + k for k in group if prefix + k in files.tensors) for group in tied}
    missing = [group[0] for group in tied if not names_of[id(state[group[0]])]]
    missing += [name for name, parameter in named_parameters(model) if id(parameter) not in keys]
    expected = {prefix + key for key in state}
    unexpected = [name for name in files.tensors if name.startswith(prefix) and name not in expected]
    other = [
        f"{name} ({_kind(saved.dtype)}{list(saved.shape)} for {_kind(tensor.dtype)}{list(tensor.shape)})"
        for key, tensor in state.items()
        if (saved := files.tensors.get(name := prefix + key)) is not None
        and (saved.dtype is None or not fits(saved.shape, saved.dtype, tensor))
    ]
    problems = misfits(missing, unexpected, other)
    if problems:
        raise UsageError(
            f"expected the {len(keys)} tensors of {type(model).__name__}.state_dict() at {files.path}, found "
            f"{problems}: give weights of this very model, with the names of its state_dict()"
        )
    known = {key: files.tensors[prefix + key].dtype for key in state if prefix + key in files.tensors}
    stored = {key: dtype for key, dtype in known.items() if dtype is not None}
    warn_of_rounding(f"the weights at {files.path}", stored, state)
    everything = (*named_parameters(model, remove_duplicate=False), *named_buffers(model, remove_duplicate=False))
    return {name: names_of[id(tensor)] for name, tensor in everything if id(tensor) in names_of}


def _prefix(tied: Sequence[Sequence[str]], files: WeightFiles) -> str:
    """The prefix of all of the model's names in the files."""
    starts = ["", *dict.fromkeys(name.partition(".")[0] + "." for name in files.tensors)]
    for start in starts:
        if all(any(start + key in files.tensors for key in group) for group in tied):
            return start
    return ""


def _kind(dtype: torch.dtype | None) -> str:
    return dtype_name(dtype) if dtype is not None else "an unknown dtype "


def describe(files: WeightFiles, keys: Mapping[str, tuple[str, ...]]) -> str:
    """A digest of the tensors to load, which must be the same on every rank, wherever its files are."""
    lines = [f"{name}: {files.tensors[key]}" for name, listed in keys.items() for key in listed]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class LoadedWeights:
    """Values from files: each rank reads its own slice, and whole buckets are gathered from these."""

    def __init__(
        self,
        files: WeightFiles,
        keys: Mapping[str, tuple[str, ...]],
        device: torch.device,
        communicators: Communicators,
        control: Control,
    ) -> None:
        self._files = files
        self._keys = keys
        self._device = device
        self._communicators = communicators
        self._control = control

    def flat(self, bucket: Bucket, start: int, stop: int) -> torch.Tensor:
        if stop - start == bucket.numel and bucket.num_ranks > 1:
            transport = self._communicators.transport_along(bucket.gathered_over)
            first = transport.rank * bucket.shard_numel
            mine = self.flat(bucket, first, first + bucket.shard_numel)
            return transport.all_gather_into(mine.new_empty(bucket.numel), mine).finish(None)

        def read() -> torch.Tensor:
            part = torch.zeros(stop - start, dtype=bucket.dtype, device=self._device)
            for slot in bucket.slots:
                first, last = max(start - slot.offset, 0), min(stop - slot.offset, slot.numel)
                if first < last:
                    copy_overlap(part, start, self._elements(slot, first, last), slot.offset + first)
            self._files.release()
            return part

        return self._attempt(f"read the weights of {bucket.name}", read)

    def fill_buffers(self, model: nn.Module) -> None:
        """Give the model's persistent buffers their values; rank 0's count.

        Raises:
            UsageError: they cannot be read.
        """
        filled: dict[int, torch.Tensor] = {}

        def fill(name: str, buffer: torch.Tensor) -> torch.Tensor:
            shape = tuple(buffer.shape)
            values = self._files.rows(self._keys[name][0], 0, shape[0] if shape else 1)
            if not isinstance(buffer, DeferredTensor):
                return buffer.copy_(values)
            return torch.empty_strided(shape, buffer.stride(), dtype=buffer.dtype, device=buffer.device).copy_(values)

        def fill_all() -> None:
            for path, module in model.named_modules():
                for key, buffer in buffer_table(module).items():
                    name = f"{path}.{key}" if path else key
                    if buffer is not None and name in self._keys:
                        if id(buffer) not in filled:
                            filled[id(buffer)] = fill(name, buffer)
                        buffer_table(module)[key] = filled[id(buffer)]
            self._files.release()

        self._attempt("read the model's buffers", fill_all)

    def _elements(self, slot: Slot, first: int, last: int) -> torch.Tensor:
        """Elements ``first`` to ``last`` of a parameter, in the order in which they lie in its bucket, on the CPU."""
        name, *others = self._keys[slot.source]
        elements = self._read(name, slot, first, last)
        for other in others:
            if not torch.equal(elements, self._read(other, slot, first, last)):
                raise UsageError(
                    f"expected {name} and {other}, which are one parameter of the model, to be the same at "
                    f"{self._files.path}, found that they differ: build the model without tying them"
                )
        return elements

    def _read(self, name: str, slot: Slot, first: int, last: int) -> torch.Tensor:
        if slot.part is not None:
            whole = self._files.rows(name, 0, slot.whole_shape[0])
            return to_bucket_order(slot, slot.box(whole).reshape(slot.shape))[first:last]
        rows, begin = slot.num_rows, slot.first_row
        if slot.stride != torch.empty(slot.shape, device="meta").stride():
            return to_bucket_order(slot, self._files.rows(name, begin, begin + rows))[first:last]
        size = slot.numel // rows
        start = first // size
        values = self._files.rows(name, begin + start, begin + -(-last // size))
        values = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
        return values[first - start * size : last - start * size]

    def _attempt(self, purpose: str, read: Callable[[], T]) -> T:
        def read_checked() -> T:
            try:
                return read()
            except UsageError:
                raise
            except Exception as error:
                raise UsageError(
                    f"expected to {purpose} from {self._files.path}, found {type(error).__name__}: {error}; no "
                    f"parameter has been changed"
                ) from error

        # Stages have buckets of their own: all hear of what fails where the model is taken over.
        return read_checked() if self._communicators.mesh.pipe > 1 else self._control.attempt(purpose, read_checked)
