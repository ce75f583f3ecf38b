"""Modules: the tables of their registrations, and marks that torch and libraries leave on them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import fx, nn
from torch._C._dynamo.guards import dict_version
from torch.fx import traceback
from torch.nn.modules import module as global_modules
from torch.utils.hooks import RemovableHandle

from zerofx.torch_private.tensors import IS_PARAMETER

TABLES = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes of a module that hold what is registered on it, which ``vars(module)`` has among the others."""

HOOKS_AND_PARTS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called", "_modules")
"""What the names of attributes of a module end with that hold its hooks, or the modules in it."""

OF_RNNS = "_flat_weights"
"""An attribute of recurrent layers: their parameters, which they list again whenever one is set."""

OF_STATE_DICTS = "_non_persistent_buffers_set"
"""An attribute of a module that says which of its buffers ``state_dict()`` leaves out."""

ADAPTERS = "adapter_layer_names"
"""An attribute of peft's layers, which have a layer of the model's and what is trained next to it."""

RESETS = ("reset_parameters", "_reset_parameters")
"""Methods of torch's own modules that give values to what they own; ``nn.MultiheadAttention`` has the second."""


def parameter_table(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters, not its children's; entries put here bypass ``register_parameter``'s checks."""
    return module._parameters


@contextlib.contextmanager
def mark_parameters(model: nn.Module) -> Iterator[None]:
    """While open, the traced stand-ins of parameters count as ``nn.Parameter``, as in eager mode.

    A module accepts them in assignments too, where it refuses results of a computation, which all traced tensors seem
    to be.
    """
    traced = {id(parameter): parameter for parameter in model.parameters()}
    for parameter in traced.values():
        setattr(parameter, IS_PARAMETER, True)
    register = nn.Module.register_parameter

    def register_traced(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if id(param) in traced:
            module._parameters[name] = param
        else:
            register(module, name, param)

    nn.Module.register_parameter = register_traced  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def buffer_table(module: nn.Module) -> dict[str, Any]:
    """A module's own buffers, as ``parameter_table``."""
    return module._buffers


def child_table(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's children, as ``parameter_table``."""
    return module._modules


def set_child_table(module: nn.Module, children: dict[str, Any]) -> None:
    """Replace a module's children, past its own checks: a list's names may have gaps."""
    assert "_modules" in vars(module)
    vars(module)["_modules"] = children


def is_compiled(module: nn.Module) -> bool:
    """True if the module is a result of ``torch.compile``."""
    return hasattr(module, "_orig_mod")


def compiles_calls(module: nn.Module) -> bool:
    """True if ``module.compile()`` was called."""
    return module._compiled_call_impl is not None


def initializer(module: nn.Module) -> Callable[[nn.Module], object] | None:
    """The function by which a transformers model initialises one of its modules."""
    initialise: Callable[[nn.Module], object] | None = getattr(module, "_init_weights", None)
    return initialise


def refer_to_weights(layer: nn.RNNBase, *, refer: bool) -> None:
    """Make or drop a recurrent layer's weak references to its weights, as it does itself when it is moved."""
    weights = layer._flat_weights if refer else []
    layer._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in weights]


def hook_tables(module: nn.Module) -> tuple[dict[int, Callable[..., Any]], ...]:
    """The hooks that run when a module is called, by kind."""
    return module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks


def hook_tables_of_all() -> tuple[dict[int, Callable[..., Any]], ...]:
    """The hooks that run when any module is called, as ``hook_tables``."""
    return (
        global_modules._global_forward_pre_hooks,
        global_modules._global_forward_hooks,
        global_modules._global_backward_pre_hooks,
        global_modules._global_backward_hooks,
    )


def number_of_next_hook() -> int:
    """A number that grows with each hook that is added to anything."""
    return RemovableHandle.next_id


version_of_dict = dict_version
"""A number that grows with each write to a dictionary."""

_ENTRIES = "custom"

keeping_annotations = traceback.preserve_node_meta
"""A context in which traced nodes get the annotations of ``annotate``."""


def annotate(key: str, text: str) -> AbstractContextManager[None]:
    """While open, traced nodes have ``text`` under ``key``."""
    return traceback.annotate({key: text})


def current_annotation(key: str) -> str:
    """The annotation under ``key`` of the nodes that are being traced."""
    annotation = traceback.current_meta.get(_ENTRIES, {}).get(key, "")
    assert isinstance(annotation, str)
    return annotation


def annotations_of(node: fx.Node) -> Mapping[str, Any]:
    """The annotations of a node of a traced graph."""
    return node.meta.get(_ENTRIES) or {}
