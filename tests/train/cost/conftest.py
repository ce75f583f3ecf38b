"""What tests of costs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from zerofx.scheduler.cost.cpu import kernel_memory


@pytest.fixture
def nothing_known() -> Iterator[None]:
    """What is known of calls is nothing that other tests have left, and nothing is left to them."""
    kernel_memory._memory_cache.cache_clear()
    yield
    kernel_memory._memory_cache.cache_clear()
