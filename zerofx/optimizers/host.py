"""Write the Python source of the function that computes an update's scalars on the host."""

from __future__ import annotations

import ast
import keyword
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from zerofx.optimizers.build import ScalarUse
from zerofx.optimizers.scalars import (
    EXPR_TYPES,
    BranchGuard,
    Cast,
    Expr,
    Heard,
    Hyper,
    ItemOf,
    MakeTensor,
    PythonCall,
    StateScalar,
    TensorCall,
    children,
)
from zerofx.optimizers.trace import ScalarState
from zerofx.torch_private.operators import base_name

_BINARY: Final[Mapping[str, ast.operator]] = {
    "add": ast.Add(),
    "sub": ast.Sub(),
    "mul": ast.Mult(),
    "truediv": ast.Div(),
    "div": ast.Div(),
    "floordiv": ast.FloorDiv(),
    "mod": ast.Mod(),
    "pow": ast.Pow(),
}
_COMPARE: Final[Mapping[str, ast.cmpop]] = {
    "lt": ast.Lt(),
    "le": ast.LtE(),
    "gt": ast.Gt(),
    "ge": ast.GtE(),
    "eq": ast.Eq(),
    "ne": ast.NotEq(),
}
_NEGATED: Final = {"eq": "ne", "ne": "eq"}
_TAKEN_NAMES: Final = ("group", "state", "torch", "float", "map")


class _Writer:
    """Lines of one function under construction; each shared expression is computed once, where first needed."""

    def __init__(self, roots: Sequence[Any], names: Mapping[Expr, str]) -> None:
        self.lines: list[str] = []
        self._wanted = names
        self._names: dict[Expr, str] = {}
        self._used_names = set(_TAKEN_NAMES)
        self._uses: Counter[Expr] = Counter()
        seen: set[Expr] = set()
        pending: list[Any] = list(roots)
        while pending:
            expr = pending.pop()
            if not isinstance(expr, EXPR_TYPES):
                continue
            self._uses[expr] += 1
            if expr not in seen:
                seen.add(expr)
                pending.extend(children(expr))

    def used_once(self, expr: Expr) -> bool:
        """Whether nothing else needs the value of ``expr``."""
        return self._uses[expr] == 1

    def name(self, wanted: str) -> str:
        """A fresh identifier like ``wanted``."""
        base = wanted if wanted.isidentifier() else "value"
        base = base + "_" if keyword.iskeyword(base) else base
        name, count = base, 2
        while name in self._used_names:
            name, count = f"{base}_{count}", count + 1
        self._used_names.add(name)
        return name

    def load_hypers(self, hypers: Sequence[Hyper]) -> None:
        """Assign the hyperparameters that are used to variables named after them."""
        for key in dict.fromkeys(hyper.key for hyper in hypers):
            used = {hyper.index: hyper for hyper in hypers if hyper.key == key}
            if None in used:
                self._names[used[None]] = self.name(key)
                self.lines.append(f'{self._names[used[None]]} = float(group["{key}"])')
                continue
            stem = key[:-1] if key.endswith("s") else f"{key}_"
            for index, hyper in sorted((i, h) for i, h in used.items() if i is not None):
                self._names[hyper] = self.name(self._wanted.get(hyper, f"{stem}{index + 1}"))
            length = next(iter(used.values())).length
            targets = [self._names[used[i]] if i in used else "_" for i in range(length)]
            self.lines.append(f'{", ".join(targets)}{"," if length == 1 else ""} = map(float, group["{key}"])')

    def assign(self, expr: Expr, wanted: str) -> str:
        """Compute ``expr`` into a variable, unless it is in one already, and return the variable."""
        if expr not in self._names:
            text = self.text(expr, inline=True)
            self._names[expr] = self.name(wanted)
            self.lines.append(f"{self._names[expr]} = {text}")
        return self._names[expr]

    def text(self, expr: Any, *, inline: bool = False) -> str:
        """Source of ``expr``, after the lines that it depends on; ``inline``: not as the name of a variable."""
        return ast.unparse(ast.fix_missing_locations(self._node(expr, inline=inline))).replace("'", '"')

    def _node(self, expr: Any, *, inline: bool = False) -> ast.expr:
        if not isinstance(expr, EXPR_TYPES):
            return _literal(expr)
        if expr in self._names:
            return ast.Name(self._names[expr])
        if not inline and self._needs_variable(expr):
            return ast.Name(self.assign(expr, self._wanted.get(expr) or _wanted_name(expr)))
        match expr:
            case StateScalar():
                return ast.Subscript(ast.Name("state"), ast.Constant(expr.name))
            case Hyper() | Heard():
                raise AssertionError("hyperparameters are loaded first, and what is heard is computed by no function")
            case ItemOf():
                return ast.Call(ast.Attribute(self._node(expr.tensor), "item"), [], [])
            case Cast():
                return ast.Call(ast.Attribute(self._node(expr.tensor), "to"), [_literal(expr.dtype)], [])
            case MakeTensor():
                keywords = [ast.keyword("dtype", _literal(expr.dtype)), ast.keyword("device", _literal("cpu"))]
                return ast.Call(ast.parse("torch.tensor", mode="eval").body, [self._node(expr.value)], keywords)
            case PythonCall():
                return self._operator(expr.op, [self._node(arg) for arg in expr.args])
            case TensorCall():
                args = [self._node(arg) for arg in expr.args]
                name = base_name(expr.op)
                if name in _BINARY and len(args) == 2 and not expr.kwargs:
                    return self._operator(name, args)
                keywords = [ast.keyword(key, self._node(value)) for key, value in expr.kwargs]
                return ast.Call(ast.parse(f"torch.ops.{expr.op}", mode="eval").body, args, keywords)

    def _needs_variable(self, expr: Expr) -> bool:
        """State is read before it changes, shared expressions once; what the optimizer names stays named."""
        if isinstance(expr, StateScalar):
            return not expr.is_tensor
        return isinstance(expr, ItemOf) or expr in self._wanted or self._uses[expr] > 1

    def _operator(self, op: str, args: list[ast.expr]) -> ast.expr:
        if op in _BINARY:
            return ast.BinOp(args[0], _BINARY[op], args[1])
        if op in _COMPARE:
            return ast.Compare(args[0], [_COMPARE[op]], [args[1]])
        if op == "neg":
            return ast.UnaryOp(ast.USub(), args[0])
        return ast.Call(ast.Name(op), args, [])


def write_host_function(
    name: str,
    description: str,
    flags: Sequence[tuple[str, bool | str | None]],
    guards: Sequence[BranchGuard],
    scalars: Sequence[ScalarUse],
    states: Mapping[str, ScalarState],
    names: Mapping[Expr, str],
) -> str:
    """Source of ``name(group, state)``: the tuple of ``scalars``, with the scalar ``states`` updated in place.

    ``flags`` and ``guards`` are checked before any state changes; if one does not hold, the function returns None.
    ``names``: what to call expressions.
    """
    changed = {key: s for key, s in states.items() if not (isinstance(s.value, StateScalar) and s.value.name == key)}
    roots: list[Any] = [guard.condition for guard in guards] + [use.expr for use in scalars]
    roots += [state.value for state in changed.values()]
    writer = _Writer(roots, names)
    _check_flags(writer, flags)
    writer.load_hypers(_hypers(roots))
    _check_guards(writer, guards)
    values = [writer.text(use.expr) for use in scalars]
    commits = [_commit(writer, key, state) for key, state in changed.items()]
    body = [f'"""{description}"""', *writer.lines, *commits]
    if values:
        entries = enumerate(zip(values, scalars, strict=True))
        body += ["return (", *(f"    {value},  # s{i}: {use.used_by}" for i, (value, use) in entries), ")"]
    else:
        body.append("return ()")
    return "\n".join([f"def {name}(group, state):", *(f"    {line}" for line in body)]) + "\n"


def _check_flags(writer: _Writer, flags: Sequence[tuple[str, bool | str | None]]) -> None:
    failed = []
    for key, value in flags:
        entry = f'group["{key}"]'
        match value:
            case True:
                failed.append(f"not {entry}")
            case False:
                failed.append(entry)
            case None:
                failed.append(f"{entry} is not None")
            case _:
                failed.append(f"{entry} != {value!r}")
    if failed:
        writer.lines += [f"if {' or '.join(failed)}:", "    return None"]


def _check_guards(writer: _Writer, guards: Sequence[BranchGuard]) -> None:
    failed: list[str] = []
    for guard in guards:
        before = len(writer.lines)
        condition = guard.condition
        negated = _NEGATED.get(condition.op) if guard.outcome else None
        text = writer.text(PythonCall(negated, condition.args) if negated else condition, inline=True)
        new_lines = writer.lines[before:]
        if failed and new_lines:
            del writer.lines[before:]
            writer.lines += [f"if {' or '.join(failed)}:", "    return None", *new_lines]
            failed = []
        test = f"not {text}" if guard.outcome and not negated else text
        if test not in failed:
            failed.append(test)
    if failed:
        writer.lines += [f"if {' or '.join(failed)}:", "    return None"]


def _commit(writer: _Writer, key: str, state: ScalarState) -> str:
    """The line that writes the new value of a scalar state; whatever it reads of other states is in variables."""
    value = state.value
    if state.dtype is None:
        return f'state["{key}"] = {writer.text(value)}'
    assert isinstance(value, EXPR_TYPES)
    if isinstance(value, MakeTensor):
        return f'state["{key}"].fill_({writer.text(value.value)})'
    in_place = isinstance(value, TensorCall) and base_name(value.op) in ("add", "sub", "mul", "div")
    if in_place and isinstance(value, TensorCall) and writer.used_once(value) and len(value.args) == 2:
        own = value.args[0] == StateScalar(key, is_tensor=True) and not value.kwargs
        if own and not isinstance(value.args[1], (StateScalar, TensorCall, Cast, MakeTensor)):
            symbol = {"add": "+", "sub": "-", "mul": "*", "div": "/"}[base_name(value.op)]
            return f'state["{key}"] {symbol}= {writer.text(value.args[1])}'
    return f'state["{key}"].copy_({writer.assign(value, f"new_{key}")})'


def _hypers(roots: Sequence[Any]) -> list[Hyper]:
    hypers: dict[Hyper, None] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Hyper):
            hypers.setdefault(value)
        elif isinstance(value, EXPR_TYPES):
            for child in children(value):
                visit(child)

    for root in roots:
        visit(root)
    return list(hypers)


def _wanted_name(expr: Expr) -> str:
    """A name for an expression: the state it is read from, else a letter."""
    names = _state_names(expr)
    if len(names) == 1 and isinstance(expr, (ItemOf, StateScalar)):
        return next(iter(names))
    if len(names) == 1 and isinstance(expr, (TensorCall, Cast)):
        return f"new_{next(iter(names))}"
    return "x"


def _state_names(expr: Any) -> set[str]:
    if isinstance(expr, StateScalar):
        return {expr.name}
    return {n for child in children(expr) for n in _state_names(child)} if isinstance(expr, EXPR_TYPES) else set()


def _literal(value: Any) -> ast.expr:
    if isinstance(value, torch.dtype):
        return ast.parse(str(value), mode="eval").body
    return ast.Constant(value)
