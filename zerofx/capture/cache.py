"""Captured graphs on disk, read back when the record of the model's forward equals the one of the written graph.

Running the whole forward on fake tensors and recording it takes a fraction of a capture, and determines the joint graph
(``forward_record.py``). The record's text is the key, so no change of code or of a global can give another model's
graph. Not kept: graphs of forwards that call operators or backwards that are not torch's own, that read tensors the
model holds outside its parameters and buffers, or graphs that would differ once read back. Tensors that the forward
writes as literals, ``torch.tensor(0.5)``, are kept by value. ``ZEROFX_DEBUG=1`` shows why a graph is not kept.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from zerofx.capture.by_layer.forward_record import ForwardRecord
from zerofx.capture.traceable import Forward
from zerofx.disk.cache import MALFORMED, DiskCache, key_of
from zerofx.ir.graph import StepGraph
from zerofx.ir.serialise import NAMESPACES, NotStorableError, from_json, same_graph, to_json
from zerofx.torch_private.capture import aot_configuration, fake_mode
from zerofx.torch_private.dispatch import default_device_type, flags_of_libraries


@dataclass(frozen=True)
class KeptCapture:
    """The place of one model's captured graph in the cache.

    ``key`` is None if the graph cannot be cached; ``reason`` says why, and is empty where nothing is kept at all.
    """

    cache: DiskCache
    key: str | None
    reason: str
    blank: StepGraph  # parameters and units of the model, and no node

    @staticmethod
    def locate(cache: DiskCache, record: ForwardRecord, forward: Forward) -> KeptCapture:
        """The place for the model whose ``forward`` has this ``record``."""
        parameters, units = forward.parameters(), forward.units()
        blank = StepGraph(fx.Graph(), torch.device("cpu"), parameters, units)
        if cache.folder is None:
            return KeptCapture(cache, None, "", blank)
        if record.foreign is not None:
            reason = f"it calls {record.foreign}, which is not torch's own: in the next run that may be other code"
            return KeptCapture(cache, None, reason, blank)
        parts = (
            *trace_settings(), record.text(), repr(parameters), repr(sorted(units)), repr(forward.batch.names),
            str(forward.compute_dtype), repr(forward.gpu),
        )  # fmt: skip
        return KeptCapture(cache, key_of("capture", parts), "", blank)

    def read(self) -> str | None:
        """The graph's text, if it was kept."""
        return self.cache.read(self.key) if self.key is not None else None

    def graph(self, text: str) -> StepGraph | None:
        """The graph that ``text`` holds; None if ``keep`` has not written it."""
        try:
            return from_json(text, self.blank, fake_mode(), NAMESPACES)
        except MALFORMED:
            return None

    def keep(self, step: StepGraph, say: Callable[[str], object]) -> StepGraph:
        """Write ``step`` for the next run, and return what that run will read, so that both continue alike.

        A graph that cannot be kept is returned as it is, and ``say`` is told why.
        """
        reason = self.reason
        if self.key is not None:
            try:
                text = to_json(step, NAMESPACES)
                stored = self.graph(text)
                if stored is not None and same_graph(stored, step):
                    self.cache.write(self.key, text)
                    return stored
                reason = "its graph is another once it is read"
            except NotStorableError as error:
                reason = f"its graph has {error}"
        if reason:
            say(f"not kept for the next run: {reason}")
        return step


def trace_settings() -> tuple[str, ...]:
    """Texts of all that tracing may depend on besides the model, its batch and installed versions."""
    kinds = ("cpu", "cuda")
    return (
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        aot_configuration(),
        f"{torch.get_default_dtype()} {default_device_type()}",
        f"{torch.is_grad_enabled()} {torch.is_inference_mode_enabled()}",
        f"autocast {[(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]}",
        _kernel_settings(),
        torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU",
    )


def per_call_settings() -> dict[str, str]:
    """Settings that programs change from call to call, under names of two words each."""
    autocast = [
        f"{torch.get_autocast_dtype(kind)} on {kind}" for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    ]
    defaults = {"default dtype": str(torch.get_default_dtype()), "default device": default_device_type()}
    return {**defaults, "autocast to": ", ".join(autocast) or "none", "choice of kernels": _kernel_settings()}


def _kernel_settings() -> str:
    """The settings by which torch chooses kernels, and which a forward may query."""
    deterministic, libraries = flags_of_libraries()
    precision = torch.get_float32_matmul_precision()
    processor = torch.backends.cpu.get_cpu_capability()  # oneDNN's kernels keep what they need for it
    return f"deterministic {deterministic}, libraries {libraries}, float32 products {precision}, for {processor}"
