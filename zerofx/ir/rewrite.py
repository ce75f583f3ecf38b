"""What a rewrite is, whatever it rewrites: a traced joint graph, a captured step, a planned step, a region."""

from __future__ import annotations

from typing import ParamSpec, Protocol

P = ParamSpec("P")


class Rewrite(Protocol[P]):
    """A frozen dataclass whose fields are its options. ``run`` edits in place what it is given first.

    ``name`` is what texts call it. A rewrite gets a valid graph and leaves a valid one.
    """

    @property
    def name(self) -> str: ...

    def run(self, *args: P.args, **kwargs: P.kwargs) -> None: ...
