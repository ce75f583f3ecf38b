"""Functions are verbs or the noun they return, and docstrings open with a verb or a noun phrase: counted, with a limit.

Codebases near this one have 3 to 5 % of functions that begin with a participle, a preposition or an adverb. The limits
are what there is, rounded up: they are lowered with what is renamed, and never raised. A word that is a noun as well
(``padding``, ``setting``) does not count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.graph.rules.test_words import files
from tests.lib.checkout import ROOT

PRODUCT = ("passes", "scheduler", "codegen", "zerofx")
MOST_NAMES = 0.02
MOST_DOCSTRINGS = 0.0

_NOUNS = frozenset(
    re.findall(
        r"\w+",
        """
        embedding padding sharding setting string mapping binding bucketing casting need seed speed embed
        feed thread timing offloading prefetching recomputing heading reading warning
        """,
    )
)
_IRREGULAR = frozenset(
    re.findall(
        r"\w+",
        """
        held kept made known given sent shown taken built found said told begun written drawn chosen left
        lent heard laid lost seen stood overwritten rewritten frozen broken gone done become
        """,
    )
)
_LITTLE_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
        of in on at by as for with within without under over after before between among along across through
        past beside besides below behind inside outside off about like unlike away again anew once twice
        only still always already now then where when how why what which together apart alone alike
        elsewhere everywhere lazily instead ahead inwards outwards also besides almost
        """,
    )
)
# Conventions of Python, each with its reason.
_EXCEPTIONS = {
    "from_": "constructors: `from_json`",
    "to_": "converters: `to_html`",
}
_RELATIVE = re.compile(r"(What|Whether|Which|Where|How|As|Who|Why)\b")


def _product() -> Iterator[tuple[str, ast.Module]]:
    for path, tree in files().items():
        name = str(path.relative_to(ROOT))
        if name.startswith(PRODUCT):
            yield name, tree


def _is_unverbal(name: str) -> bool:
    """Whether a function's name begins with a participle, a preposition or an adverb."""
    plain = name.strip("_")
    first = plain.partition("_")[0]
    if name.startswith("__") or any(plain.startswith(known) for known in _EXCEPTIONS) or first in _NOUNS:
        return False
    return first in _LITTLE_WORDS or first in _IRREGULAR or (len(first) > 4 and first.endswith(("ed", "ing")))


def test_functions_are_verbs_or_nouns() -> None:
    names = [
        (f"{path}:{node.lineno}", node.name)
        for path, tree in _product()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    others = [f"{place} {name}" for place, name in names if _is_unverbal(name)]
    assert len(others) <= MOST_NAMES * len(names), "\n".join(others)


def test_docstrings_open_with_a_verb_or_a_noun() -> None:
    texts = [
        (f"{path}:{getattr(node, 'lineno', 1)}", text)
        for path, tree in _product()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
    ]
    others = [f"{place} {text.splitlines()[0]}" for place, text in texts if _RELATIVE.match(text)]
    assert len(others) <= MOST_DOCSTRINGS * len(texts), "\n".join(others)
