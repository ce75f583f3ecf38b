"""The source of a model's values when a step takes it over: the model, its recipes, or files."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from zerofx.capture.checks import device_of
from zerofx.deferred import DeferredTensor, adopt_meta, check_recipes, make_buffers
from zerofx.runtime.comm.control import Control
from zerofx.runtime.comm.groups import Communicators
from zerofx.runtime.state.loaded_weights import LoadedWeights, Matched, describe, match
from zerofx.runtime.state.weights import ModelWeights, Weights

if TYPE_CHECKING:
    from zerofx.runtime.state.weight_files import WeightFiles


class Values:
    """Has found a source for every tensor of ``model``, and made the buffers that come from no file.

    Raises:
        ZeroFXError: a tensor has no source; on every rank.
    """

    def __init__(self, model: nn.Module, path: Path | None, control: Control) -> None:
        self._model = model
        self._path = path
        self._control = control
        self._files: WeightFiles | None = None
        self._matched = Matched({})  # names in the files of the model's tensors that are there
        self._loaded: frozenset[str] = frozenset()
        control.attempt("find the values of the model", self._find)
        if self._files is not None:
            control.agree("read weights", describe(self._files, self._matched), "weights", "Give every rank the same.")

    def source(
        self, tensors: Mapping[str, torch.Tensor], device: torch.device, communicators: Communicators
    ) -> Weights:
        """The values of the parameters ``tensors``, and of buffers that are in files (``fill_buffers``)."""
        transport = communicators.world
        if communicators.mesh.pipe > 1:
            assert transport is not None, "there are several ranks"
            # Stages ask for buckets of their own: rank 0's values are everywhere before one does.
            own = [tensor for name, tensor in tensors.items() if name not in self._loaded]
            for tensor in own:
                if isinstance(tensor, DeferredTensor):  # next to what files have: an adapter
                    tensor.data = tensor.materialise()
            transport.broadcast([tensor.detach() for tensor in own])
            transport = None
        of_model = ModelWeights(tensors, device, transport, self._control)
        if self._files is None:
            return of_model
        return LoadedWeights(self._files, self._matched, device, communicators, self._control, of_model)

    def _find(self) -> None:
        model = self._model
        with ExitStack() as undo:
            device = device_of(model)
            if self._path is not None:
                # What reads files takes long to import: only who has some pays.
                from zerofx.runtime.state.weight_files import open_weights

                self._files = open_weights(self._path)
                self._matched = match(model, self._files).adopt(self._files, device, undo)
            loaded = self._loaded = frozenset({*self._matched.keys, *self._matched.sources()})
            if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
                adopt_meta(model, device, loaded)
            check_recipes(model, loaded)
            make_buffers(model, loaded)
            undo.pop_all()
