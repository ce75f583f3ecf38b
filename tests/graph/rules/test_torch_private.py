"""What is private in torch is touched in ``zerofx/torch_private`` only, and what is private in a module there only."""

from __future__ import annotations

import ast
import re
from collections import namedtuple
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

import pytest

from tests.graph.rules.test_floors import modules

OWN = ("self", "cls", "super()")
PRIVATE = re.compile(r"_[^_]\w*")  # Python's own names have two underscores
OF_TORCH = re.compile(r"torch(\.\w+)*(\._[^_]\w*|\.distributed_c10d)(\.\w+)*")
OF_TUPLES = frozenset(dir(namedtuple("OfTuples", ())))  # what all of them have, in Python's own words
OPERATOR = re.compile(r"torch\.ops(\.\w+)?\.\w+")  # a name of the dispatcher's, as graphs show it
BY_NAME = ("getattr", "hasattr", "setattr", "delattr", "attrgetter")


def defined(tree: ast.AST) -> set[str]:
    """Names that the classes of a module define, in their bodies and as attributes of ``self``."""
    bodies = [statement for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for statement in node.body]
    stored = [one for one in ast.walk(tree) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)]
    fields = [n.id for one in bodies for n in ast.walk(one) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    methods = [one.name for one in bodies if isinstance(one, ast.FunctionDef)]
    return {*methods, *fields, *(one.attr for one in stored if isinstance(one.value, ast.Name) and one.value.id in OWN)}


def last_name(node: ast.expr) -> str:
    """``step`` of ``optimizer.step``; empty where there is none."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def private_uses(tree: ast.AST, of_all: AbstractSet[str]) -> Iterator[tuple[int, str]]:
    """Line and text of each use of what is private in torch, or in another class than those of the module.

    ``of_all``: what classes of any module define, which those derived from them may use of themselves.
    """
    own = defined(tree)
    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    named = {
        target.id: ast.unparse(node.value)
        for node in assignments
        if isinstance(node.value, ast.Attribute)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield from ((node.lineno, start + one.name) for one in node.names if OF_TORCH.fullmatch(start + one.name))
        elif isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            base = ast.unparse(node.value)
            first, dot, rest = base.partition(".")
            is_operator = OPERATOR.fullmatch(f"{named.get(first, first)}{dot}{rest}.{node.attr}")
            if node.attr not in (of_all if base in OWN else own) and not is_operator:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and OF_TORCH.fullmatch(node.value):
            yield node.lineno, node.value
        elif isinstance(node, ast.Call) and last_name(node.func) in BY_NAME:
            names = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            yield from ((node.lineno, name) for name in names if PRIVATE.fullmatch(name) and name not in own)


def test_private_names_are_used_at_home() -> None:
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules().items()}
    of_all = OF_TUPLES.union(*map(defined, trees.values()))
    uses = [
        f"{module}:{line} uses {text}"
        for module, tree in trees.items()
        if not module.startswith("zerofx.torch_private.")
        for line, text in private_uses(tree, of_all)
    ]
    assert uses == []


@pytest.mark.parametrize(
    "text",
    [
        "from torch._inductor import config",
        "import torch._dynamo",
        "from torch import _C",
        "from torch.utils import _pytree",
        "from torch.distributed import distributed_c10d",
        "from torch.distributed.distributed_c10d import default_pg_timeout",
        "torch._C.cpu()",
        "module._parameters",
        "self.tensor._version",
        "op = torch.ops.aten.add.Tensor; op._schema",
        "torch.ops.aten.add.Tensor._schema",
        "torch.compiler._is_compiling_flag = True",
        "getattr(module, '_modules')",
        "operator.attrgetter('_modules')",
        "logging.getLogger('torch._dynamo')",
        "self._modules",
        "def f(self):\n    self._step = 1\ndef g(other):\n    other._parameters",
    ],
)
def test_uses_are_seen(text: str) -> None:
    assert list(private_uses(ast.parse(text), {"_step"}))


@pytest.mark.parametrize(
    "text",
    [
        "from zerofx.torch_private.capture import FakeTensorMode",
        "aten = torch.ops.aten; aten._softmax.default",
        "torch.ops._c10d_functional.wait_tensor",
        "self._step",
        "class A:\n    _step: int\n    def of(other: A) -> int:\n        return other._step",
        "getattr(error, '__notes__', ())",
        "'what torch._check calls'",
    ],
)
def test_what_is_ones_own_is_not(text: str) -> None:
    assert not list(private_uses(ast.parse(text), {"_step"}))
