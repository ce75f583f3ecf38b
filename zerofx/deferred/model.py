"""Deferred models: tensors without values yet, tensors without a recipe, and recipes for models built on ``meta``."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from zerofx.deferred.recipe import check_constants
from zerofx.deferred.tensor import DeferredTensor, DeferringMode, replace_parameter
from zerofx.errors import UsageError
from zerofx.ir.tensor_parts import named_buffers, named_parameters, tables_of
from zerofx.torch_private.modules import ADAPTERS, RESETS, TABLES, buffer_table, initializer, refer_to_weights
from zerofx.torch_private.operators import pytree
from zerofx.units import first_few


@contextlib.contextmanager
def empty_init() -> Iterator[None]:
    """Build a model without memory for it: ``with zerofx.empty_init(): model = GPT(...)``.

    Tensors that are made inside have shapes, dtypes and devices, and a recipe instead of values: the operations that a
    normal construction would have run. ``zerofx.compile`` takes such a model, and the first step makes each bucket's
    values in the tier that the plan assigns. They equal, bit for bit, the values of a normal construction with the same
    seed, even if other code draws random numbers in between: numbers are drawn here when needed, a tensor at a time,
    and again when the values are made.

    Changes of the model after the block (``model.to(torch.bfloat16)``, ``nn.init.zeros_(model.head.weight)``,
    ``copy.deepcopy``) become part of the recipe too. Values that construction asks for (``tensor.item()``) are made and
    dropped again. Refused, with a ``UsageError``: deferred values written into tensors from outside, tensors from
    outside changed in place after they were used, changes of a tensor's shape in place, ``numpy()``, pickling.

    Memory: the largest single tensor. Time: that of a normal construction here, and again when the values are made.
    """
    with DeferringMode():
        yield


def is_deferred(model: nn.Module) -> bool:
    """True if any of the model's parameters has no values yet."""
    return any(isinstance(parameter, DeferredTensor) or parameter.is_meta for parameter in model.parameters())


def check_recipes(model: nn.Module, without: frozenset[str] = frozenset()) -> None:
    """Check that all deferred tensors can be made; the tensors named in ``without`` will get values from elsewhere.

    Raises:
        UsageError: names tensors that were never given values, or whose recipes read a tensor that was changed.
    """
    undefined = []
    with allow_replacement(model):
        for name, parameter in model.named_parameters():
            if isinstance(parameter, DeferredTensor) and weakref.getweakrefcount(parameter):
                raise UsageError(
                    f"expected deferred parameters that nothing refers to weakly, found that {name} is: drop what "
                    f"holds it (a hook, a cache) before compile, since torch cannot give such a tensor its values"
                )
    for name, tensor in (*named_parameters(model), *named_buffers(model)):
        if isinstance(tensor, DeferredTensor) and name not in without:
            check_constants(tensor.recipe)
            if not _is_written(tensor):
                undefined.append(name)
    if undefined:
        raise UsageError(
            f"expected every parameter and buffer to be given values while the model is built, found none for "
            f"{first_few(undefined)}: initialize them (nn.init.normal_(...)) inside empty_init(), or give "
            f"compile(weights=...)"
        )


def make_buffers(model: nn.Module, without: frozenset[str] = frozenset()) -> None:
    """Give values to deferred buffers except those in ``without``, and to tensors that modules hold as attributes."""
    materialised: dict[int, torch.Tensor] = {}

    def make(leaf: Any) -> Any:
        if not _is_deferred_value(leaf):
            return leaf
        if id(leaf) not in materialised:
            materialised[id(leaf)] = leaf.materialise()
        return materialised[id(leaf)]

    for path, module in model.named_modules():
        for name, buffer in buffer_table(module).items():
            if (f"{path}.{name}" if path else name) not in without:
                buffer_table(module)[name] = make(buffer)
        for name, value in vars(module).items():
            if name not in TABLES and any(_is_deferred_value(leaf) for leaf in pytree.tree_leaves(value)):
                vars(module)[name] = pytree.tree_map(make, value)
    for name, table in tables_of(model):
        if name not in without and isinstance(table, DeferredTensor):
            table.data = table.materialise()


def _is_deferred_value(value: Any) -> bool:
    """True if this is a deferred tensor that is not a parameter, wherever it is held."""
    return isinstance(value, DeferredTensor) and not isinstance(value, nn.Parameter)


@contextlib.contextmanager
def allow_replacement(model: nn.Module) -> Iterator[None]:
    """While open, the model's parameters can be given other data permanently (``replace_parameter``).

    torch refuses that for tensors with weak references, which its recurrent layers hold to their weights. Those
    references are dropped and made again, as these layers do themselves when they are moved.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    for layer in layers:
        refer_to_weights(layer, refer=False)
    try:
        yield
    finally:
        for layer in layers:
            refer_to_weights(layer, refer=True)


def adopt_meta(model: nn.Module, device: torch.device, without: frozenset[str] = frozenset()) -> None:
    """Give recipes to a model that was built on ``meta``, by its modules' own ``reset_parameters`` under this seed.

    Modules are initialised in the order in which their constructors finish: children in the order of registration, then
    their parent. A transformers model's ``init_weights`` runs after its modules'. So values equal those of a normal
    construction if the modules' constructors draw in this order and nothing else initializes; ``empty_init`` has no
    such condition. If some values will come from elsewhere (``without``), only modules that own others are initialised.

    Args:
        device: where the parameters will be; random numbers are drawn on the CPU.

    Raises:
        UsageError: names the modules whose tensors none of these methods gives values to. The model is as it was.
    """
    _refuse_attributes(model)
    where = _owners(model, without)
    with allow_replacement(model), contextlib.ExitStack() as undo:
        with empty_init():
            _defer(model, undo)
            for path, module in _construction_order(model):
                if without and where.get(path):
                    _initialize_own(model, path, module)
                elif not without and path in where:
                    _initialize(path, module)
        _check_adopted(model, where, without)
        undo.pop_all()
    if device.type != "cpu":
        model.to(device)


def _refuse_attributes(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            leaves = [] if name in TABLES else pytree.tree_leaves(value)
            if any(
                isinstance(leaf, torch.Tensor) and leaf.is_meta and not isinstance(leaf, nn.Parameter)
                for leaf in leaves
            ):
                raise UsageError(
                    f"expected a model built on meta to hold its tensors as parameters and buffers, found "
                    f"{type(module).__name__}{f' at {path}' if path else ''} with an attribute {name}, whose values "
                    f"nobody knows: register it as a buffer, or build the model inside zerofx.empty_init()"
                )


def _owners(model: nn.Module, without: frozenset[str]) -> dict[str, list[str]]:
    """The modules to initialise, by path: those that own tensors on meta that need values, and all their ancestors."""
    owners: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        names = [f"{path}.{name}" if path else name for name, tensor in tensors if tensor.is_meta]
        needed = [name for name in names if name not in without]
        if needed:
            owners[path] = needed
            for above in _ancestors(path):
                owners.setdefault(above, [])
    return owners


def _ancestors(path: str) -> Iterator[str]:
    """The paths of the modules that one is in, from the inside out."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _construction_order(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        yield from _construction_order(child, f"{path}.{name}" if path else name)
    yield path, module


def _defer(model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Replace tensors on meta by deferred tensors without values; ``undo`` restores them."""

    def fresh(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    for parameter in model.parameters():
        if parameter.is_meta:
            undo.callback(torch.utils.swap_tensors, parameter, replace_parameter(parameter, fresh(parameter)))
    buffers: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in buffer_table(module).items():
            if buffer is not None and buffer.is_meta:
                undo.callback(buffer_table(module).__setitem__, name, buffer)
                buffer_table(module)[name] = buffers.setdefault(id(buffer), fresh(buffer))


def _initialize(path: str, module: nn.Module) -> None:
    """Call the method of a module that gives values to its own tensors, if it has one."""
    function: Callable[[], object] | None = None
    if initializer(module) is not None and hasattr(module, "init_weights"):
        function = cast(Callable[[], object], module.init_weights)
    else:
        function = next((getattr(module, name) for name in RESETS if hasattr(module, name)), None)
    if function is not None:
        _call(function, path, module)


def _initialize_own(model: nn.Module, path: str, module: nn.Module) -> None:
    """Give values to a module's own tensors, and to as few others as possible: those are about to be loaded."""
    for above in _ancestors(path):
        layer = model.get_submodule(above)
        if hasattr(layer, ADAPTERS):
            _initialize_adapter(model, above, layer, path)
            return
    function = next((getattr(module, name) for name in RESETS if hasattr(module, name)), None)
    if function is not None:
        _call(function, path, module)
    for above in _ancestors(path) if function is None else ():
        init_weights = initializer(model.get_submodule(above))
        if init_weights is not None:
            _call(partial(init_weights, module), path, module)
            return


def _initialize_adapter(model: nn.Module, above: str, layer: nn.Module, path: str) -> None:
    """Give values to an adapter's module at ``path`` as peft does where it puts one into ``layer``."""
    of_model: Any = model
    adapter = next((name for name in path.removeprefix(f"{above}.").split(".") if name in of_model.peft_config), None)
    reset = getattr(layer, "reset_lora_parameters", None)
    if adapter is None or reset is None:
        raise UsageError(
            f"expected adapters on meta to be LoRA's, found {path} of {type(layer).__name__}: call get_peft_model "
            f"where the layers that it adapts are not on meta"
        )
    _call(partial(reset, adapter, of_model.peft_config[adapter].init_lora_weights), above, layer)


def _call(function: Callable[..., object], path: str, module: nn.Module) -> None:
    try:
        function()
    except Exception as error:
        raise UsageError(
            f"expected {type(module).__name__}{f' at {path}' if path else ''} to initialize a model built on meta, "
            f"found {type(error).__name__}: {error}. Build the model inside "
            f"zerofx.empty_init() instead, which needs no such method"
        ) from error


def _check_adopted(model: nn.Module, owners: dict[str, list[str]], without: frozenset[str]) -> None:
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    modules = dict(model.named_modules())
    lacking = [
        f"{type(modules[path]).__name__}{f' at {path}' if path else ''} ({', '.join(undefined)})"
        for path, names in owners.items()
        if (undefined := [n for n in names if not _is_written(tensors[n]) and n not in without])
    ]
    if lacking:
        raise UsageError(
            f"expected modules that can initialize a model built on meta, by reset_parameters() or by the "
            f"_init_weights() of transformers, found none for {first_few(lacking)}: give them reset_parameters(), "
            f"build the model inside zerofx.empty_init(), or give compile(weights=...)"
        )


def _is_written(tensor: torch.Tensor) -> bool:
    """True if a tensor's values are defined."""
    return not isinstance(tensor, DeferredTensor) or tensor.recipe.cell.is_written or not tensor.numel()
