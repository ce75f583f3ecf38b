"""Options are what was given to ``compile``, whatever becomes of it."""

from __future__ import annotations

from typing import Any

import pytest

from zerofx.options import CompileOptions, check_options


def _options(**given: Any) -> CompileOptions:
    required = {
        "stage": 3, "loss_fn": None, "precision": None, "backend": "eager", "machine": None, "plan": None,
        "prefetch": 1, "keep_gathered": (), "max_shapes": 8,
    }  # fmt: skip
    return check_options(**required | given)


def test_containers_that_are_changed_afterwards_change_no_options() -> None:
    tile, offload, kept = {"head": 2}, {"gradients": "host"}, ["layers.0"]
    options = _options(tile=tile, offload=offload, keep_gathered=kept, accumulate=2)
    tile["head"], offload["gradients"] = 1, "disk"
    kept.append("layers.1")
    assert options == _options(
        tile={"head": 2}, offload={"gradients": "host"}, keep_gathered=("layers.0",), accumulate=2
    )


@pytest.mark.parametrize("kept", [{"a", "b"}, {"a": 1, "b": 2}.keys(), {"a": "because", "b": "so"}, ["a", "b"], "all"])
def test_names_to_keep_may_be_in_any_collection(kept: Any) -> None:
    found = _options(keep_gathered=kept).policy.keep
    assert found == "all" if kept == "all" else set(found) == {"a", "b"}
