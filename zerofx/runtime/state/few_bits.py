"""Weights in 4 bits from files: as their library has stored them, or quantised while they are read.

    q_proj.weight.quant_state.bitsandbytes__nf4 in the files    codes and scales are read, each rank its slices
    q_proj.weight in 16 bits or more                            read whole, and quantised by the library's function

Quantising is done a weight at a time, on the ranks that keep a part of what it gives. Until a step holds the parts, the
weight is deferred: the user's own object, with shapes in the place of codes and scales.
"""

from __future__ import annotations

import json
import operator
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerofx.deferred import defer
from zerofx.errors import UsageError
from zerofx.ir.tensor_parts import TABLE_NUMEL, class_of, parts_of, path_name
from zerofx.torch_private.modules import ADAPTERS
from zerofx.units import first_few

if TYPE_CHECKING:
    from zerofx.runtime.state.weight_files import FileTensor, WeightFiles

_STATE = "quant_state."
_PACKED = _STATE + "bitsandbytes__"  # sizes, dtypes and numbers, as JSON
_BESIDES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_PATHS = {"absmax": _STATE + "absmax", "nested_absmax": _STATE + "state2.absmax"}  # of what a file has, in a weight


def is_in_blocks(parameter: torch.Tensor) -> bool:
    """True for a weight in 4 bits, quantised or not yet, that files are read for: bitsandbytes', or torchao's NF4."""
    return _is_packed(parameter) or class_of(parameter).__name__ == "NF4Tensor"


def _is_packed(parameter: torch.Tensor) -> bool:
    return hasattr(class_of(parameter), "from_prequantized")


@dataclass(frozen=True)
class StoredWeight:
    """A weight in 4 bits of a model, and what files have of it: at ``key``, and at the names below it in ``below``.

    ``state`` is the JSON of a weight that is quantised there; None for one whose own values are there. ``dtype`` is
    that of the values that are quantised.
    """

    name: str
    parameter: torch.Tensor
    key: str
    below: tuple[str, ...] = ()
    state: Mapping[str, Any] | None = None
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight's own values."""
        known = getattr(self.parameter, "quant_state", None)
        return tuple(self.parameter.shape if known is None else known.shape)

    def names(self) -> Iterator[str]:
        """The names of all that is read."""
        yield from (self.key, *(f"{self.key}.{name}" for name in self.below))

    def problems(self, files: WeightFiles) -> tuple[list[str], list[str]]:
        """The names of what is missing in the files, and of what is there with other sizes."""
        if self.state is None:
            whole = files.tensors[self.key]
            fits = whole.shape == self.shape and whole.dtype is not None and whole.dtype.is_floating_point
            return [], [] if fits else [self._misfit(files, self.key)]
        numel, blocks = prod(self.shape), -(-prod(self.shape) // int(self.state["blocksize"]))
        about = files.tensors[self.key]
        sizes = {
            "": -(-numel // 2) // (1 if about.dtype is None else about.dtype.itemsize),
            "absmax": blocks,
            "quant_map": 16,
        }
        if "nested_blocksize" in self.state:
            sizes |= {"nested_absmax": -(-blocks // int(self.state["nested_blocksize"])), "nested_quant_map": 256}
        keys = {path_name(self.key, name): numel for name, numel in sizes.items()}
        missing = [key for key in keys if key not in files.tensors]
        other = [
            self._misfit(files, key)
            for key, size in keys.items()
            if key in files.tensors and (prod(files.tensors[key].shape) != size or files.tensors[key].dtype is None)
        ]
        if tuple(self.state["shape"]) != self.shape:
            other = [f"{self.key} ({list(self.state['shape'])} for {list(self.shape)})"]
        return missing, other

    def _misfit(self, files: WeightFiles, key: str) -> str:
        return f"{key} ({list(files.tensors[key].shape)}, which a weight of {list(self.shape)} has not)"

    def adopt(self, files: WeightFiles, device: torch.device, undo: ExitStack) -> dict[str, str]:
        """Have the model's parameter deferred, as a weight in 4 bits; ``undo`` restores it.

        Returns the names in files of the parts that are read from there, by their names in the step.
        """
        if not _is_packed(self.parameter):
            return {}
        kind: Any = class_of(self.parameter)
        if self.state is None:
            codes, attributes = self._shapes(device)
        else:
            about = files.tensors[self.key]
            assert about.dtype is not None, "is checked"
            stored = {name: _read_or_defer(files, f"{self.key}.{name}", name, device) for name in self.below}
            empty = torch.empty(0, dtype=about.dtype, device=device)
            attributes = dict(vars(kind.from_prequantized(empty, stored, device=device)))
            codes = torch.empty(about.shape, dtype=about.dtype, device="meta")
        module = attributes["module"] = getattr(self.parameter, "module", None)
        if module is not None:
            undo.callback(setattr, module, "quant_state", module.quant_state)
            module.quant_state = attributes["quant_state"]
        deferred = defer(codes.shape, codes.dtype, device, kind)
        vars(deferred).update(attributes)
        torch.utils.swap_tensors(self.parameter, deferred)
        undo.callback(torch.utils.swap_tensors, self.parameter, deferred)
        if self.state is None:
            return {}
        below = {
            path_name(self.name, path): f"{self.key}.{name}" for name, path in _PATHS.items() if name in self.below
        }
        return {self.name: self.key} | below

    def _shapes(self, device: torch.device) -> tuple[torch.Tensor, dict[str, Any]]:
        """Codes on meta, and a parameter's attributes with deferred tensors: all but tables, which do not depend on
        values."""
        _, tables = self._quantise(torch.zeros(1, 64, dtype=self.dtype, device=device))
        codes, state = self._quantise(torch.empty(self.shape, dtype=self.dtype, device="meta"))
        for record, known in ((state, tables), (state.state2, tables.state2)):
            for name, tensor in vars(record).items() if record is not None else ():
                if isinstance(tensor, torch.Tensor):
                    is_known = name == "code"
                    value = vars(known)[name] if is_known else defer(tensor.shape, tensor.dtype, device)
                    setattr(record, name, value)
        return codes, {**_attributes(self.parameter), "quant_state": state, "bnb_quantized": True}

    def _quantise(self, values: torch.Tensor) -> tuple[torch.Tensor, Any]:
        library: Any = sys.modules["bitsandbytes.functional"]  # which has made the parameter
        of: Any = self.parameter
        codes, state = library.quantize_4bit(
            values, blocksize=of.blocksize, compress_statistics=of.compress_statistics, quant_type=of.quant_type,
            quant_storage=of.quant_storage,
        )  # fmt: skip
        return codes, state

    def part_names(self) -> dict[str, str]:
        """The names in the step of this weight's parts, by their paths."""
        return {path: path_name(self.name, path) for path in parts_of(self.parameter)}

    def quantise(self, values: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts, by their names in the step, that the library makes of the weight's own values."""
        values, names = values.to(self.dtype), self.part_names()
        if not _is_packed(self.parameter):
            of: Any = self.parameter
            whole = class_of(of).from_tensor(values, of.block_size, of.scaler_block_size)  # type: ignore[attr-defined]
            return {names[path]: part for path, part in parts_of(whole).items()}
        codes, state = self._quantise(values)
        of_state = {path: operator.attrgetter(path.removeprefix(_STATE))(state) for path in names if path}
        return {names[path]: part for path, part in ({"": codes} | of_state).items()}


def find_weight(name: str, parameter: torch.Tensor, key: str, files: WeightFiles) -> StoredWeight | None:
    """A weight in 4 bits as the files have it, under ``key``; None where they have no such name."""
    about = files.tensors.get(key)
    if about is None:
        return None
    all_below = [other.removeprefix(f"{key}.") for other in files.tensors if other.startswith(f"{key}.")]
    below = tuple(other for other in all_below if other in _BESIDES or other.startswith(_PACKED))
    weight = StoredWeight(name, parameter, key)
    packed = [other for other in below if other.startswith(_PACKED)]
    if packed and _is_packed(parameter):
        words = files.rows(f"{key}.{packed[0]}", 0, files.tensors[f"{key}.{packed[0]}"].shape[0])
        return replace(weight, below=below, state=json.loads(bytes(words.tolist())))
    state = getattr(parameter, "quant_state", None)
    own = parameter.dtype if state is None else state.dtype
    narrow = about.dtype if about.dtype is not None and about.dtype.itemsize < own.itemsize else own
    return replace(weight, dtype=narrow)


def _attributes(parameter: torch.Tensor) -> dict[str, Any]:
    return {name: value for name, value in vars(parameter).items() if not name.startswith("_")}


def _read_or_defer(files: WeightFiles, key: str, name: str, device: torch.device) -> torch.Tensor:
    about: FileTensor = files.tensors[key]
    if name in _PATHS and prod(about.shape) > TABLE_NUMEL:
        assert about.dtype is not None, "is checked"
        return defer(about.shape, about.dtype, device)
    return files.rows(key, 0, about.shape[0]).to(device)


def check_parts(model: nn.Module, few: Collection[str]) -> None:
    """Check that all parameters are plain, or among ``few``, which are in 4 bits, and that these can be deferred.

    Raises:
        UsageError: lists those that are not.
    """
    in_parts = [name for name, parameter in model.named_parameters() if parts_of(parameter) and name not in few]
    if in_parts:
        raise UsageError(
            f"expected a model of plain parameters, or in 4 bits (bitsandbytes, NF4 of torchao), to read weights= "
            f"into, found {first_few(in_parts)} in few bits, whose offsets and shapes no file of tensors has: load it "
            f"by from_pretrained(), and leave weights= out"
        )
    on_meta = [name for name, whole in model.named_parameters() if name in few and whole.is_meta and parts_of(whole)]
    if on_meta:
        raise UsageError(
            f"expected weights that consist of parts to be built inside zerofx.empty_init(), or with values, to read "
            f"weights= into, found {first_few(on_meta)} on meta"
        )


def is_below(key: str, names: Collection[str]) -> bool:
    """True if one of ``names`` is the beginning of a key's parts, but not all of them."""
    return any(key[:place] in names for place, letter in enumerate(key) if letter == ".")


def names_of_base(model: nn.Module) -> Callable[[str], str | None]:
    """A function for the names that a model's tensors had before peft put adapters in; None for those of adapters."""
    base: Any = getattr(model, "get_base_model", lambda: model)()
    start = next(path for path, module in model.named_modules() if module is base)
    layers = {path for path, module in model.named_modules() if hasattr(module, ADAPTERS)}

    def name_of(key: str) -> str | None:
        if start and not key.startswith(f"{start}."):
            return None
        names, path, left = list[str](), "", list(reversed(key.split(".")))
        while left:
            name = left.pop()
            if path not in layers or not path:
                names.append(name)
            elif name == "modules_to_save":
                name = f"{name}.{left.pop()}"  # of an adapter, which begins as the module does
            elif name not in ("base_layer", "original_module"):
                return None
            path = path_name(path, name)
        return ".".join(names).removeprefix(f"{start}." if start else "")

    return name_of
