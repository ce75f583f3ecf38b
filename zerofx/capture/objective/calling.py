"""Divide the arguments of ``step(*args, **kwargs)`` between forward and loss, and check that both accept theirs.

A model without a ``loss_fn`` gets all of them. With one, the model gets as many leading positional arguments as its
forward requires (at least one), and the keywords that its forward names; ``loss_fn`` gets the model's outputs and the
positional arguments that are left, and each keyword that it names::

    step(x, y)        model(x)             loss_fn(outputs, y)
    step(a, b, y)     model(a, b)          loss_fn(outputs, y)          forward(self, a, b, scale=1.0)
    step(x, y=y)      model(x)             loss_fn(outputs, y=y)        forward(self, x, **kwargs)

A ``loss_fn`` that cannot be called with what is left gets the whole batch, if it can be called with that:
``lambda outputs, x, y: ...``. Where forward takes any name (``**kwargs``), a keyword that ``loss_fn`` names is for
``loss_fn`` alone; where ``loss_fn`` takes any name, it gets all keywords.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zerofx.errors import UsageError

Call = tuple[tuple[Any, ...], dict[str, Any]]
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def call_model(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of ``model(*args, **kwargs)``.

    Raises:
        UsageError: its forward cannot be called so.
    """
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        parameters = _parameters(model)
        misfit = _misfit(parameters, args, kwargs)
        if not misfit:
            raise
        alone = len(args) == 1 and isinstance(args[0], Mapping) and not kwargs
        by_name = "; the batch is one dict: step(**batch) gives its entries by name" if alone else ""
        raise UsageError(
            f"expected a batch that {type(model).__name__}.forward{_signature(parameters)} can be called with, found "
            f"{type(model).__name__}({argument_text(args, kwargs)[2:]}): {misfit}{by_name}. Without loss_fn or "
            f"forward= a model gets all that step() is called with; help(zerofx.compile) says who gets what with them"
        ) from error


def split_call(
    model: nn.Module, loss_fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Call, Call]:
    """The arguments of the model, and those of ``loss_fn`` without the model's outputs.

    Raises:
        UsageError: ``loss_fn`` cannot be called so, or it is unclear who gets a keyword.
    """
    of_model, of_loss = _parameters(model), _parameters(loss_fn)
    names_of_loss, own = _names(of_loss, kwargs), _names(of_model, kwargs)
    if _takes_any_name(of_model):
        if not any(p.kind in _NAMED for p in of_model or ()) and (unclear := sorted(names_of_loss)):
            raise UsageError(
                f"expected to know who gets {', '.join(unclear)}, which loss_fn names, and which "
                f"{type(model).__name__}.forward{_signature(of_model)} may hand on: pass by position what is for "
                f"loss_fn alone, or say the whole step: forward=lambda model, *batch, **named: loss"
            )
        own |= set(kwargs) - names_of_loss
    num = _num_required(of_model, args, own)
    forward_args = tuple(args[:num]), {name: value for name, value in kwargs.items() if name in own}
    takes_all = of_loss is not None and _takes_any_name(of_loss)
    named = {n: value for n, value in kwargs.items() if takes_all or n in names_of_loss or n not in own}
    rest = tuple(args[num:])
    outputs = object()
    if not _misfit(of_loss, (outputs, *rest), named):
        return forward_args, (rest, named)
    if num and not _misfit(of_loss, (outputs, *args), named):
        return forward_args, (tuple(args), named)
    called = f"loss_fn(outputs{argument_text(rest, named)})"
    raise UsageError(
        f"expected a loss_fn that can be called with the model's outputs and what {type(model).__name__}.forward does "
        f"not take, {called}, found {_signature_text(loss_fn, of_loss)}: {_misfit(of_loss, (outputs, *rest), named)}. "
        f"forward{_signature(of_model)} takes the {num} argument{'s' * (num != 1)} that it requires of the {len(args)} "
        f"by position; pass by name what else it is to get, or say the whole step: "
        f"forward=lambda model, *batch, **named: loss"
    )


def check_forward_call(forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check that ``forward(model, *args, **kwargs)`` can be called.

    Raises:
        UsageError: it cannot.
    """
    parameters = _parameters(forward)
    if misfit := _misfit(parameters, (object(), *args), kwargs):
        raise UsageError(
            f"expected a forward that can be called as forward(model{argument_text(args, kwargs)}), as step() was, "
            f"found {_signature_text(forward, parameters)}: {misfit}"
        )


def _parameters(called: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """The parameters of a function, or of a module's forward. None if Python does not know them."""
    try:
        signature = inspect.signature(called.forward if isinstance(called, nn.Module) else called)
    except (TypeError, ValueError):
        return None
    return list(signature.parameters.values())


def _misfit(parameters: list[inspect.Parameter] | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The reason why a call does not fit, in Python's words; empty if it does, or if Python does not know."""
    if parameters is None:
        return ""
    try:
        inspect.Signature(parameters).bind(*args, **kwargs)
    except TypeError as error:
        return str(error)
    return ""


def _num_required(parameters: list[inspect.Parameter] | None, args: Sequence[Any], named: set[str]) -> int:
    """The number of ``args`` that a forward requires: at least one; ``named`` are given by name."""
    if parameters is None:
        return len(args)
    required = [p for p in parameters if p.kind in _POSITIONAL and p.default is p.empty and p.name not in named]
    return min(len(args), max(1, len(required)))


def _names(parameters: list[inspect.Parameter] | None, kwargs: Mapping[str, Any]) -> set[str]:
    """The keywords among ``kwargs`` that are named in a signature; empty if it is not known."""
    return {p.name for p in parameters or () if p.kind in _NAMED} & set(kwargs)


def _takes_any_name(parameters: list[inspect.Parameter] | None) -> bool:
    return parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters)


def _signature_text(called: Callable[..., Any], parameters: list[inspect.Parameter] | None) -> str:
    kind = f"{type(called).__name__}.forward" if isinstance(called, nn.Module) else ""
    return f"{kind or getattr(called, '__qualname__', type(called).__name__)}{_signature(parameters)}"


def _signature(parameters: list[inspect.Parameter] | None) -> str:
    """The names that a function takes, with defaults as ``=...``."""
    if parameters is None:
        return "(...)"
    shown = [f"{p.name}=..." if p.default is not p.empty else str(p.replace(annotation=p.empty)) for p in parameters]
    return f"({', '.join(shown)})"


def argument_text(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The text of arguments after a first one: ``, Tensor, y=Tensor``."""
    return "".join([f", {_kind(arg)}" for arg in args] + [f", {name}={_kind(arg)}" for name, arg in kwargs.items()])


def _kind(argument: Any) -> str:
    return f"Tensor{list(argument.shape)}" if isinstance(argument, torch.Tensor) else type(argument).__name__
