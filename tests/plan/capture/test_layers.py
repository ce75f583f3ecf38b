"""Repeated layers are found by structure, whatever they are called."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from tests.lib.models import CASES, DIM, Layer, Stack
from zerofx.capture.layers import find_units
from zerofx.scheduler.plan.facts import unit_of


class _Nested(nn.Module):
    """`transformer.h.3`: a list deep inside, beside modules that are no layers."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            OrderedDict(wte=nn.Embedding(5, DIM), h=nn.ModuleList(Layer() for _ in range(4)), ln_f=nn.LayerNorm(DIM))
        )
        self.lm_head = nn.Linear(DIM, 5)


class _Attributes(nn.Module):
    """Layers of one class as plain attributes, and a module of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.lower = Layer()
        self.middle = Layer()
        self.upper = Layer()
        self.head = nn.Linear(DIM, DIM)


class _TwoTowers(nn.Module):
    """An encoder and a decoder of one class, each with layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Stack(2)
        self.decoder = Stack(3)


class _Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = Layer()
        self.layers = nn.ModuleList([shared, Layer(), shared])


class _Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Layer(), nn.ReLU(), nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]  # what calling a module gives is untyped


def test_layers_in_a_list_are_units() -> None:
    model = nn.Module()
    model.my_blocks = nn.ModuleList(Layer() for _ in range(8))
    assert find_units(model) == tuple(f"my_blocks.{i}" for i in range(8))


def test_layers_deep_inside_are_units() -> None:
    units = find_units(_Nested())
    assert [u for u in units if u.startswith("transformer.h")] == [f"transformer.h.{i}" for i in range(4)]
    assert "lm_head" not in units


def test_attributes_of_one_class_are_units_and_single_modules_are_not() -> None:
    assert find_units(_Attributes()) == ("lower", "middle", "upper")


def test_towers_of_one_class_are_not_units_but_their_layers_are() -> None:
    expected = ("encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1", "decoder.layers.2")
    assert find_units(_TwoTowers()) == expected


def test_a_module_under_two_paths_is_one_unit() -> None:
    assert find_units(_Looped()) == ("layers.0", "layers.1")


def test_items_of_a_sequence_are_units_and_what_is_in_them_is_not() -> None:
    assert find_units(_Wrapped()) == ("body.0", "body.2")


def test_modules_without_parameters_are_no_units() -> None:
    assert find_units(nn.Sequential(nn.ReLU(), nn.Tanh())) == ()


def test_units_of_transformers_models_are_their_layers() -> None:
    assert find_units(CASES["llama"].model()) == ("model.layers.0", "model.layers.1")
    assert find_units(CASES["gpt2"].model()) == ("transformer.h.0", "transformer.h.1")
    assert find_units(CASES["bert"].model())[:2] == ("bert.encoder.layer.0", "bert.encoder.layer.1")


def test_no_unit_is_inside_another() -> None:
    torch.manual_seed(0)
    for name in ("gpt", "batchnorm", "lora", "torch layers", "parametrised", "image layers"):
        units = find_units(CASES[name].model())
        assert not [u for u in units if unit_of(u.rpartition(".")[0], units)], name
