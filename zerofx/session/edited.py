"""An edited copy of a step's file, which runs in the place of the step that was generated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zerofx.codegen.kernels.current_device import device_guard
from zerofx.errors import warn
from zerofx.lowering.load import CompiledStep, load_step, read_edited
from zerofx.runtime.comm.control import Control
from zerofx.scheduler.search.target import Target


class EditedStep:
    """The edited file that was loaded last, if one was."""

    def __init__(self) -> None:
        self._path: Path | None = None

    def load(self, path: str | Path, compiled: CompiledStep, target: Target, control: Control) -> CompiledStep:
        """``compiled`` with the functions of the edited file. Collective.

        Raises:
            PlanError: the file cannot be loaded.
            CompilerError: an edited region cannot be compiled.
        """
        text = control.attempt("load an edited step", lambda: read_edited(path, compiled.emitted))
        control.agree("load an edited step", text, "edited step", "Give every rank the same file.")
        with device_guard(compiled.device):
            functions = compiled.emitted.functions
            loaded = load_step(text, str(path), compiled.regions, functions, target, control, edited=True)
        self._path = Path(path)
        return replace(
            compiled, function=loaded.function, updates=loaded.updates, source_path=self._path, allocations=None,
            emitted=replace(compiled.emitted, source=text),
        )  # fmt: skip

    def warn_of_another(self) -> None:
        """Warn where a step is generated next to one that was edited."""
        if self._path is not None:
            warn(
                f"the edited step {self._path} runs for the batch shape and optimizer options it was loaded for; "
                f"this call has others and runs a newly generated step"
            )

    def obstacle(self, compiled: CompiledStep) -> str:
        """The reason why kernels are launched one by one if ``compiled`` is the edited step; empty for others."""
        if self._path is None or compiled.source_path != self._path:
            return ""
        return f"every line of {self._path} is to run in every step"
