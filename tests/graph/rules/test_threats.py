"""What docs/threats.md claims is held to by tests that are there, and only files that are known execute text."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.lib.checkout import ROOT

# What executes a text, or reads a format that can: by file, with why it may.
_MAY = {
    "codegen/kernels/choose.py": {"exec"},  # what has been emitted here
    "codegen/kernels/update.py": {"exec", "compile"},  # a kernel that has been written here
    "codegen/step_file.py": {"exec", "compile"},  # an emitted step, or an edited one
    "codegen/kernels/table.py": {"import_module"},  # triton, or a kernel of ours
    "zerofx/__init__.py": {"import_module"},  # a public name's module
    "zerofx/ir/op_kernels/own_operator.py": {"import_module"},  # an operator's kernel
    "zerofx/cli/arguments.py": {"exec_module", "import_module"},  # the user's own file
    "zerofx/integrations/transformers.py": {"torch.load(weights_only=True)"},
}
_EXECUTES = {"exec", "eval", "compile", "__import__", "exec_module", "import_module", "run_path", "run_module"}
_READS = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def _executing(path: Path) -> set[str]:
    """What a file calls that executes a text, or reads what can hold code."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        owner, _, method = name.rpartition(".")
        if (not owner and method in _EXECUTES) or method in {"exec_module", "import_module", "run_path", "run_module"}:
            found.add(method)
        if owner in _READS and method.startswith(("load", "Unpickler", "open")):
            found.add(name)
        if name in ("torch.load", "np.load", "numpy.load"):
            is_safe = any(ast.unparse(keyword) == "weights_only=True" for keyword in node.keywords)
            found.add(f"{name}(weights_only=True)" if is_safe else name)
    return found


def test_only_files_that_are_known_execute_text_or_read_what_can_hold_code() -> None:
    files = [
        path
        for folder in ("zerofx", "passes", "scheduler", "codegen")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(part.is_symlink() for part in path.parents if part != ROOT and ROOT in part.parents)
    ]
    executing = {str(path.relative_to(ROOT)): names for path in files if (names := _executing(path))}
    assert executing == _MAY


def test_each_claim_names_tests_that_are_there() -> None:
    page = (ROOT / "docs" / "threats.md").read_text()
    claims = page[page.index("## What holds it to that") :]
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", claims)
    assert len(named) > 20
    for file, test in named:
        path = ROOT / file
        assert path.is_file(), file
        assert not test or re.search(rf"^def {test}\(", path.read_text(), re.MULTILINE), f"{file} has no {test}"
