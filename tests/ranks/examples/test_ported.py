"""Scripts as people publish them: how little differs for zerofx, that the documentation shows it, and that both run."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

import pytest

from tests.lib.checkout import ROOT
from tests.ranks.examples.test_examples import run

EXAMPLES = ROOT / "examples"
MOST_WRITTEN = {"nanogpt.py": 5, "image_classifier.py": 5, "finetune_trainer.py": 2}


def difference(script: str) -> list[str]:
    """The lines that differ between a script for plain torch and the one for zerofx, but for empty ones."""
    plain, ported = (
        (folder / script).read_text(encoding="utf-8").splitlines() for folder in (EXAMPLES / "plain", EXAMPLES)
    )
    lines = difflib.unified_diff(plain, ported, n=0, lineterm="")
    return [line for line in lines if not line.startswith(("---", "+++", "@@")) and line.strip("+- ")]


@pytest.mark.parametrize("script", MOST_WRITTEN)
def test_few_lines_are_written_and_the_documentation_shows_them(script: str) -> None:
    lines = difference(script)
    assert 0 < sum(line.startswith("+") for line in lines) <= MOST_WRITTEN[script]
    shown = (ROOT / "docs" / "loop.md").read_text(encoding="utf-8").split("```diff\n")[1:]
    assert "\n".join(lines) in [block.split("\n```")[0] for block in shown]


def test_every_plain_script_is_compared() -> None:
    assert {path.name for path in (EXAMPLES / "plain").glob("*.py")} == MOST_WRITTEN.keys()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("script", "options", "numbers"),
    [
        ("nanogpt.py", ("--steps", "60"), r"(?:train|val) loss ([\d.]+)"),
        ("image_classifier.py", ("--epochs", "1"), r"acc@1 ([\d.]+)"),
        ("finetune_trainer.py", ("--steps", "50"), r"perplexity ([\d.]+)"),
        ("finetune_trainer.py", ("--steps", "50", "--lora"), r"perplexity ([\d.]+)"),
    ],
)
def test_both_scripts_print_the_same_numbers(
    script: str, options: tuple[str, ...], numbers: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script == "finetune_trainer.py":
        pytest.importorskip("accelerate")
    if "--lora" in options:
        pytest.importorskip("peft")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(EXAMPLES), os.environ.get("PYTHONPATH")])))
    found = []
    for name in (f"plain/{script}", script):
        output = ("--output", str(tmp_path / name)) if script == "finetune_trainer.py" else ()
        found.append(
            [float(number) for number in re.findall(numbers, run(name, *options, *output, processes=processes))]
        )
    plain, mine = found
    assert plain and mine == pytest.approx(plain, rel=0.02)
