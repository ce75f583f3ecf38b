"""Which code was measured: a hash of the product's files alone, and the commit that has them."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterable

from benchmarks.gpu.case import ROOT

PRODUCT = ("codegen", "passes", "scheduler", "zerofx")  # what a result is of; tests and benchmarks may change
_MOST_COMMITS = 200


def code_hash() -> str:
    """Of the product's files as they are here."""
    paths = (path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py") if path.is_file())
    return _hash((path.relative_to(ROOT).as_posix(), _blob(path.read_bytes())) for path in paths)


def commit_of(code: str) -> str:
    """The latest commit whose product has this hash; empty where there is none, or no repository."""
    commits = _git("log", f"--max-count={_MOST_COMMITS}", "--format=%H", "--", *PRODUCT).split()
    return next((commit[:8] for commit in commits if hash_of_commit(commit) == code), "")


def hash_of_commit(commit: str) -> str:
    """Of the product's files as they were committed."""
    lines = (line.split(maxsplit=3) for line in _git("ls-tree", "-r", commit, "--", *PRODUCT).splitlines())
    return _hash((path, blob) for _, _, blob, path in lines if path.endswith(".py"))


def _hash(files: Iterable[tuple[str, str]]) -> str:
    return hashlib.sha256("".join(f"{path} {blob}\n" for path, blob in sorted(files)).encode()).hexdigest()[:16]


def _blob(data: bytes) -> str:
    """The name that git gives to a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _git(*arguments: str) -> str:
    try:
        answer = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return answer.stdout if answer.returncode == 0 else ""
