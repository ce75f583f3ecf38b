"""Weights from files: the values that load_state_dict would give, read by slices; and files that do not fit."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import CASES, batches
from tests.lib.users import Tiny, adamw, facts, ids, tiny
from zerofx import RankMismatchError, UsageError, ZeroFXWarning


def in_one_file(state: dict[str, Tensor], folder: Path) -> Path:
    save_file({name: one.contiguous() for name, one in state.items()}, folder / "all.safetensors")
    return folder / "all.safetensors"


def in_a_folder(state: dict[str, Tensor], folder: Path) -> Path:
    half = dict(list(state.items())[::2])
    save_file(half, folder / "a.safetensors")
    save_file({name: one for name, one in state.items() if name not in half}, folder / "b.safetensors")
    return folder


def with_an_index(state: dict[str, Tensor], folder: Path) -> Path:
    in_a_folder(state, folder)
    placed = {name: "ab"[index % 2] + ".safetensors" for index, name in enumerate(state)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    save_file({"other": torch.ones(1)}, folder / "unused.safetensors")
    return folder


def distributed(state: dict[str, Tensor], folder: Path) -> Path:
    save_distributed(state, checkpoint_id=folder, no_dist=True)
    return folder


def distributed_with_more(state: dict[str, Tensor], folder: Path) -> Path:
    save_distributed({"optimizer": {"step": 3}, "network": state}, checkpoint_id=folder, no_dist=True)
    return folder


FORMS = [in_one_file, in_a_folder, with_an_index, distributed, distributed_with_more]


def saved_state() -> dict[str, Tensor]:
    """Other values than `tiny()` has."""
    torch.manual_seed(11)
    return Tiny().state_dict()


def compile_eager(model: nn.Module, path: Path, stage: int = 3) -> zerofx.Step:
    return zerofx.compile(model, adamw(model), stage, backend="eager", weights=path)


def built(how: str) -> nn.Module:
    if how == "deferred":
        with zerofx.empty_init():
            return Tiny()
    with torch.device("meta" if how == "meta" else "cpu"):
        return Tiny()


@pytest.mark.sweep(5)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("save", FORMS, ids=lambda save: save.__name__)
@pytest.mark.parametrize("how", ["real", "deferred", "meta"])
def test_values_are_those_of_the_files(how: str, save: Callable[..., Path], tmp_path: Path) -> None:
    expected = saved_state()
    step = compile_eager(built(how), save(expected, tmp_path))
    step.prepare(ids(), labels=ids(1))
    found = step.full_state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], one) for name, one in expected.items())


@pytest.mark.sweep(4)
@pytest.mark.parametrize("how", ["deferred", "meta"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "batchnorm", "channels last", "tied", "one scalar", "mixed dtypes"])
def test_models_train_as_if_loaded(name: str, how: str, tmp_path: Path) -> None:
    case = CASES[name]
    torch.manual_seed(11)
    expected = case.model()
    shared: dict[int, str] = {}
    state = {n: one for n, one in expected.state_dict().items() if shared.setdefault(one.data_ptr(), n) == n}
    path = in_one_file(state, tmp_path)
    if how == "meta":
        with torch.device("meta"):
            model = case.model()
    else:
        with zerofx.empty_init():
            model = case.model()
    steps = [
        zerofx.compile(expected, case.optimizer(expected), 3, backend="eager"),
        zerofx.compile(model, case.optimizer(model), 3, backend="eager", weights=path),
    ]
    for args, kwargs in batches(case, 0, 2):
        one, other = (step(*args, **kwargs) for step in steps)
        assert torch.equal(one, other)
    found = steps[1].full_state_dict()
    assert all(torch.equal(found[n], value) for n, value in steps[0].full_state_dict().items())


def _save_sharded(path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = saved_state()
    sharded: dict[str, DTensor] = {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in state.items()}
    save_distributed(sharded, checkpoint_id=path)


def _load(path: str, stage: int) -> bool:
    with zerofx.empty_init():
        model = Tiny()
    step = compile_eager(model, Path(path), stage)
    step.prepare(ids(), labels=ids(1))
    return all(torch.equal(step.full_state_dict()[name], one) for name, one in saved_state().items())


def _ranks(path: str) -> list[bool]:
    _save_sharded(path)
    return [_load(path, stage) for stage in (0, 2, 3)]


def test_two_ranks_read_what_two_have_saved(tmp_path: Path) -> None:
    assert run_ranks(_ranks, 2, str(tmp_path)) == [[True] * 3] * 2


class Reads:
    """Counts what is read of a file."""

    def __init__(self, files: Any) -> None:
        self._files, self.path, self.tensors, self.num_bytes, self.largest = files, files.path, files.tensors, 0, 0

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        found: Tensor = self._files.rows(name, start, stop)
        self.num_bytes += found.nbytes
        self.largest = max(self.largest, found.nbytes)
        return found

    def release(self) -> None:
        self._files.release()


def _count(path: str) -> tuple[int, int]:
    with zerofx.empty_init():
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = zerofx.compile(model, optimizer, 3, backend="eager", weights=path, loss_fn=lambda y, x: y.sum())
    reads = step._steps.values._files = Reads(step._steps.values._files)
    step.prepare(torch.ones(1, 64))
    return reads.num_bytes, reads.largest


def test_each_rank_reads_its_own_slices(tmp_path: Path) -> None:
    one = 64 * 64 * 4
    path = in_one_file({f"{i}.weight": torch.ones(64, 64) for i in range(2)}, tmp_path)
    for num_bytes, largest in run_ranks(_count, 2, str(path)):
        assert num_bytes == one and largest == one // 2


def test_weights_are_converted_with_a_warning_where_that_rounds(tmp_path: Path) -> None:
    state = saved_state()
    path = in_one_file({name: one.double() for name, one in state.items()}, tmp_path)
    with pytest.warns(ZeroFXWarning, match=r"rounded from float64 to the model's float32, as embed.weight is"):
        step = compile_eager(tiny(), path)
    step.prepare(ids(), labels=ids(1))
    assert all(torch.equal(step.full_state_dict()[name], one) for name, one in state.items())
    (tmp_path / "half").mkdir()
    half = {name: one.bfloat16() for name, one in state.items()}
    step = compile_eager(tiny(), in_one_file(half, tmp_path / "half"))
    step.prepare(ids(), labels=ids(1))
    assert all(torch.equal(step.full_state_dict()[name], one.float()) for name, one in half.items())


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    state = saved_state()
    state["head.more"] = state.pop("head.bias")
    state["embed.weight"] = state["embed.weight"][:5]
    state["layers.0.0.bias"] = torch.zeros(4, dtype=torch.long)
    model = tiny()
    before = facts(model, None)
    with pytest.raises(UsageError) as caught:
        compile_eager(model, in_one_file(state, tmp_path))
    for part in (
        "expected the 7 tensors of Tiny.state_dict()",
        "1 missing (head.bias)",
        "1 that the model has not (head.more)",
        "2 of another shape (embed.weight (float32[5, 4] for float32[11, 4]), layers.0.0.bias (int64[4] for float32[4]",
    ):
        assert part in str(caught.value)
    assert facts(model, None) == before


def test_tied_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    case = CASES["tied"]
    with zerofx.empty_init():
        model = case.model()
    state = {name: one.clone() for name, one in case.model().state_dict().items()}
    state["head.weight"] += 1
    step = compile_eager(model, in_one_file(state, tmp_path))
    args, kwargs = next(batches(case, 0, 1))
    with pytest.raises(UsageError, match=r"embed.weight and head.weight.* differ"):
        step.prepare(*args, **kwargs)


def test_paths_without_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"not a header")
    (tmp_path / "pickled.pt").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    for name, match in (
        ("nowhere", "found nothing there"),
        ("empty", "found none of them"),
        ("pickled.pt", "found none of them: convert"),
        ("broken.safetensors", "cannot be read: SafetensorError"),
        (index.name, r"found that 1 are missing: gone.safetensors"),
    ):
        with pytest.raises(UsageError, match=match):
            compile_eager(tiny(), tmp_path / name)
    with pytest.raises(UsageError, match="weights to be a path, or None, found 3"):
        zerofx.compile(tiny(), adamw(tiny()), weights=3)  # type: ignore[arg-type]  # what is tested


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file(saved_state(), tmp_path / f"{name}.safetensors")
    with pytest.raises(UsageError, match=r"found embed.weight in a.safetensors and b.safetensors"):
        compile_eager(tiny(), tmp_path)


def _one_rank_fails(path: str) -> str:
    mine = Path(path) / f"{dist.get_rank()}.safetensors"
    save_file(saved_state(), mine)
    with zerofx.empty_init():
        model = Tiny()
    step = compile_eager(model, mine)
    if dist.get_rank() == 1:
        mine.unlink()
    try:
        step.prepare(ids(), labels=ids(1))
    except (UsageError, RankMismatchError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_a_file_that_goes_on_one_rank_stops_all(tmp_path: Path) -> None:
    first, second = run_ranks(_one_rank_fails, 2, str(tmp_path))
    assert first.startswith("RankMismatchError: expected all ranks to read the weights of") and "rank 1 could" in first
    assert (
        second.startswith("UsageError: expected to read the weights of") and "no parameter has been changed" in second
    )


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = in_one_file(saved_state(), tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UsageError, match=r"found no module safetensors: pip install 'zerofx\[safetensors\]'"):
        compile_eager(tiny(), path)
