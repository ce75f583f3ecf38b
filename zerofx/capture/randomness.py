"""Random generators: restore them after tracing, and refuse forwards that draw from Python's or numpy's."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Iterator

import numpy as np
import torch

from zerofx.errors import CaptureError


@contextlib.contextmanager
def preserve_randomness(device: torch.device) -> Iterator[None]:
    """Leave the random generators of torch, numpy and Python as they were, bit for bit."""
    with _preserve_python_and_numpy(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


@contextlib.contextmanager
def require_torch_randomness() -> Iterator[None]:
    """While open, torch alone may draw at random: anything else would be drawn once, for all steps.

    Tracing does not advance torch's generators; if the forward seeds them, they are restored.

    Raises:
        CaptureError: the generator of Python or of numpy has been drawn from; both are restored first.
    """
    with _preserve_python_and_numpy(), torch.random.fork_rng([]):
        before = _states()
        yield
        drawn = [name for name, state in _states().items() if state != before[name]]
        if drawn:
            raise CaptureError(
                f"expected a forward that draws at random with torch alone, found that it draws with "
                f"{' and '.join(drawn)}: a step is captured once, and what is drawn then would be in all steps. Draw "
                f"with torch (and torch.where instead of an if), or where the batch is made, as a tensor of it; "
                f"or turn off what draws (layers skipped at random, masks of SpecAugment)"
            )


@contextlib.contextmanager
def _preserve_python_and_numpy() -> Iterator[None]:
    plain, array = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(plain)
        np.random.set_state(array)


def _states() -> dict[str, bytes]:
    return {"Python's random": pickle.dumps(random.getstate()), "numpy.random": pickle.dumps(np.random.get_state())}
