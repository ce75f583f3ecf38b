"""The source of a model's values when a step takes it over: the model, its recipes, or files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from zerofx.capture.checks import device_of
from zerofx.deferred import adopt_meta, check_recipes, make_buffers
from zerofx.runtime.comm.control import Control
from zerofx.runtime.comm.groups import Communicators
from zerofx.runtime.state.loaded_weights import LoadedWeights, describe, match
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
        self._keys: dict[str, tuple[str, ...]] = {}  # names in the files of the model's tensors that are there
        control.attempt("find the values of the model", self._find)
        if self._files is not None:
            control.agree("read weights", describe(self._files, self._keys), "weights", "Give every rank the same.")

    def source(
        self, tensors: Mapping[str, torch.Tensor], device: torch.device, communicators: Communicators
    ) -> Weights:
        """The values of the parameters ``tensors``. Buffers that are in files are given their values by this call."""
        if self._files is None and communicators.mesh.pipe > 1:
            assert communicators.world is not None, "there are several ranks"
            # Stages ask for buckets of their own: rank 0's values are everywhere before one does.
            communicators.world.broadcast([tensor.detach() for tensor in tensors.values()])
            return ModelWeights(tensors, device, None, self._control)
        if self._files is None:
            return ModelWeights(tensors, device, communicators.world, self._control)
        weights = LoadedWeights(self._files, self._keys, device, communicators, self._control)
        weights.fill_buffers(self._model)
        return weights

    def _find(self) -> None:
        model = self._model
        if self._path is not None:
            # What reads files takes long to import: only who has some pays.
            from zerofx.runtime.state.weight_files import open_weights

            self._files = open_weights(self._path)
            self._keys = match(model, self._files)
        loaded = frozenset(self._keys)
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            adopt_meta(model, device_of(model), loaded)
        check_recipes(model, loaded)
        make_buffers(model, loaded)
