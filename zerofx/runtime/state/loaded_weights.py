"""A model's weights from files: which tensor is which, and each rank's slices of them."""

from __future__ import annotations

import hashlib
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import nn

from zerofx.capture.checks import fits, misfits, warn_of_rounding
from zerofx.deferred import DeferredTensor
from zerofx.errors import UsageError
from zerofx.ir.buckets import Bucket, Slot
from zerofx.ir.tensor_parts import is_table, named_buffers, parts_of
from zerofx.precision import dtype_name
from zerofx.runtime.comm.control import Control
from zerofx.runtime.comm.groups import Communicators
from zerofx.runtime.state.few_bits import StoredWeight, check_parts, find_weight, is_below, is_in_blocks, names_of_base
from zerofx.runtime.state.weights import ModelWeights, copy_overlap, to_bucket_order
from zerofx.torch_private.modules import buffer_table

if TYPE_CHECKING:
    from zerofx.runtime.state.weight_files import WeightFiles

T = TypeVar("T")


@dataclass(frozen=True)
class Matched:
    """The names in files of each tensor of a model that they have, by each of its names, and its weights in 4 bits."""

    keys: Mapping[str, tuple[str, ...]]
    weights: tuple[StoredWeight, ...] = ()

    def adopt(self, files: WeightFiles, device: torch.device, undo: ExitStack) -> Matched:
        """Have weights in 4 bits deferred, with their parts among the names; ``undo`` restores them."""
        parts = dict(item for weight in self.weights for item in weight.adopt(files, device, undo).items())
        return replace(self, keys={**self.keys, **{name: (key,) for name, key in parts.items()}})

    def sources(self) -> Mapping[str, StoredWeight]:
        """The weights that are quantised while they are read, by the names of their parts."""
        quantised = [weight for weight in self.weights if weight.state is None]
        return {name: weight for weight in quantised for name in weight.part_names().values()}


def match(model: nn.Module, files: WeightFiles) -> Matched:
    """The names in ``files`` of each parameter and persistent buffer, by each of its names in the model.

    The files are to hold what ``model.state_dict()`` holds; of a tied tensor one of its names is enough, and of what
    adapters of peft's are in, the names before they were. Where they hold more than one object
    (``dcp.save({"model": ..., "optimizer": ...})``) the model is the one, of the first parts of names, that has all of
    its tensors.

    Raises:
        UsageError: lists tensors that are missing, that the model does not have, and that have another shape or kind.
    """
    few = {name: parameter for name, parameter in model.named_parameters() if is_in_blocks(parameter)}
    check_parts(model, few)
    stored = names_of_base(model)
    state = {
        key: tensor
        for key, tensor in model.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor) and stored(key) is not None and not is_below(key, few)
    }
    keys: dict[int, list[str]] = {}
    for key, tensor in state.items():
        keys.setdefault(id(tensor), []).append(key)
    tied = [*keys.values()]
    names = {key: str(stored(key)) for key in state}
    prefix = _prefix([[names[key] for key in group] for group in tied], files)
    names = {key: prefix + name for key, name in names.items()}
    names_of = {
        id(state[group[0]]): tuple(dict.fromkeys(names[key] for key in group if names[key] in files.tensors))
        for group in tied
    }
    missing = [group[0] for group in tied if not names_of[id(state[group[0]])]]
    missing += [
        name for name, parameter in model.named_parameters() if id(parameter) not in keys and stored(name) is not None
    ]
    weights = [
        weight
        for name, parameter in few.items()
        if (weight := find_weight(name, parameter, names[name], files)) is not None
    ]
    problems_of = [weight.problems(files) for weight in weights]
    missing += [name for lacking, _ in problems_of for name in lacking]
    expected = {*names.values(), *(key for weight in weights for key in weight.names())}
    unexpected = [name for name in files.tensors if name.startswith(prefix) and name not in expected]
    plain = {key: tensor for key, tensor in state.items() if not is_in_blocks(tensor)}
    other = [
        f"{name} ({_kind(saved.dtype)}{list(saved.shape)} for {_kind(tensor.dtype)}{list(tensor.shape)})"
        for key, tensor in plain.items()
        if (saved := files.tensors.get(name := names[key])) is not None
        and (saved.dtype is None or not fits(saved.shape, saved.dtype, tensor))
    ]
    other += [misfit for _, misfits_of in problems_of for misfit in misfits_of]
    problems = misfits(missing, unexpected, other)
    if problems:
        raise UsageError(
            f"expected the {len(keys)} tensors of {type(model).__name__}.state_dict() at {files.path}, found "
            f"{problems}: give weights of this very model, with the names of its state_dict()"
        )
    known = {key: files.tensors[names[key]].dtype for key in plain if names[key] in files.tensors}
    of_files = {key: dtype for key, dtype in known.items() if dtype is not None}
    warn_of_rounding(f"the weights at {files.path}", of_files, state)
    everything = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    in_files = {id(tensor) for tensor in plain.values()}
    return Matched({n: names_of[id(t)] for n, t in everything if id(t) in in_files}, tuple(weights))


def _prefix(tied: Sequence[Sequence[str]], files: WeightFiles) -> str:
    """The prefix of all of the model's names in the files."""
    starts = ["", *dict.fromkeys(name.partition(".")[0] + "." for name in files.tensors)]
    for start in starts:
        if all(any(start + key in files.tensors for key in group) for group in tied):
            return start
    return ""


def _kind(dtype: torch.dtype | None) -> str:
    return dtype_name(dtype) if dtype is not None else "an unknown dtype "


def describe(files: WeightFiles, matched: Matched) -> str:
    """A digest of the tensors to load, which must be the same on every rank, wherever its files are."""
    read = {**matched.keys, **{weight.name: tuple(weight.names()) for weight in matched.weights}}
    lines = [f"{name}: {files.tensors[key]}" for name, listed in read.items() for key in listed]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class LoadedWeights:
    """Values from files: each rank reads its own slice, and whole buckets are gathered from these.

    Those of adapters, which are in no file, are the model's.
    """

    def __init__(
        self,
        files: WeightFiles,
        matched: Matched,
        device: torch.device,
        communicators: Communicators,
        control: Control,
        of_model: ModelWeights,
    ) -> None:
        self._files = files
        self._keys, self._sources = matched.keys, matched.sources()
        self._of_model = of_model  # which has what no file has: adapters
        self._unit = ""  # of the bucket that was asked for last, and what has been quantised of it
        self._quantised: dict[str, dict[str, torch.Tensor]] = {}
        self._tables: dict[str, torch.Tensor] = {}  # parts that all ranks have, of what this one has quantised
        self._device = device
        self._communicators = communicators
        self._control = control

    def flat(self, bucket: Bucket, start: int, stop: int) -> torch.Tensor:
        if stop - start == bucket.numel and bucket.num_ranks > 1:
            transport = self._communicators.transport_along(bucket.gathered_over)
            first = transport.rank * bucket.shard_numel
            mine = self.flat(bucket, first, first + bucket.shard_numel)
            return transport.all_gather_into(mine.new_empty(bucket.numel), mine).finish(None)

        stored = [slot for slot in bucket.slots if slot.source in self._keys or slot.source in self._sources]

        def read() -> torch.Tensor:
            if bucket.unit != self._unit:
                self._unit, self._quantised = bucket.unit, {}
            part = torch.zeros(stop - start, dtype=bucket.dtype, device=self._device)
            for slot in stored:
                first, last = max(start - slot.offset, 0), min(stop - slot.offset, slot.numel)
                if first < last:
                    copy_overlap(part, start, self._elements(slot, first, last), slot.offset + first)
            self._files.release()
            return part

        part = self._attempt(f"read the weights of {bucket.name}", read)
        for slot in bucket.slots:
            if slot not in stored:
                self._of_model.copy_slot(bucket, slot, part, start)
        return part

    def fill_buffers(self, model: nn.Module) -> None:
        """Give the model's persistent buffers, and tables of weights in 4 bits, their values; rank 0's count.

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
            for weight in self._sources.values():
                if all(is_table(part) for part in parts_of(weight.parameter).values()):
                    self._quantise(weight)  # which is in no bucket
            self._files.release()

        self._attempt("read the model's buffers", fill_all)
        tables = dict(ChainMap(*self._control.gather(self._tables, "share tables")) if self._sources else {})
        for name, table in named_buffers(model):
            if name in self._keys and isinstance(table, DeferredTensor):
                tables[name] = self._files.rows(self._keys[name][0], 0, table.shape[0])
            if name in tables:
                table.data = tables[name].to(table.device)
        self._quantised = {}

    def _quantise(self, weight: StoredWeight) -> dict[str, torch.Tensor]:
        """The parts of a weight that is quantised while it is read, by their names in the step."""
        if weight.name not in self._quantised:
            values = self._files.rows(weight.key, 0, weight.shape[0]).to(self._device)
            parts = self._quantised[weight.name] = weight.quantise(values)
            self._tables |= {name: part.cpu() for name, part in parts.items() if is_table(part)}
        return self._quantised[weight.name]

    def _elements(self, slot: Slot, first: int, last: int) -> torch.Tensor:
        """Elements ``first`` to ``last`` of a parameter, in the order in which they lie in its bucket."""
        if (weight := self._sources.get(slot.source)) is not None:
            whole = self._quantise(weight)[slot.source]
            return to_bucket_order(slot, slot.box(whole).reshape(slot.shape))[first:last]
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
