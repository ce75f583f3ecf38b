"""Files of checkpoints: boxes of tensors, values without pickles, safetensors files, markers, and folders."""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from zerofx import CheckpointError
from zerofx.disk.checkpoint import folder as folders
from zerofx.disk.checkpoint import shard_file
from zerofx.disk.checkpoint.boxes import Box, boxes_of_range
from zerofx.disk.checkpoint.contents import parse_marker
from zerofx.disk.checkpoint.marker import Marker, OptimizerInfo, Scalar, TensorInfo, file_name
from zerofx.disk.checkpoint.plain import from_plain, to_plain
from zerofx.disk.checkpoint.shard_file import Entry, OpenFiles, ShardFile, ShardWriter, sort_by_alignment

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shapes, st.data())
def test_boxes_of_a_range_are_its_elements_in_order_and_few(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    whole = torch.arange(numel).view(shape)
    boxes = boxes_of_range(shape, start, stop)
    elements = [element for box in boxes for element in box.select(whole, Box.whole(shape)).reshape(-1).tolist()]
    assert elements == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(shapes, st.data())
def test_overlaps_are_what_both_boxes_have(shape: tuple[int, ...], data: st.DataObject) -> None:
    def any_box() -> Box:
        offsets = [data.draw(st.integers(0, size - 1)) for size in shape]
        return Box(
            tuple(offsets),
            tuple(data.draw(st.integers(1, size - at)) for size, at in zip(shape, offsets, strict=True)),
        )

    first, second, whole = any_box(), any_box(), torch.arange(math.prod(shape)).view(shape)
    elements = [set(box.select(whole, Box.whole(shape)).reshape(-1).tolist()) for box in (first, second)]
    common = first.overlap(second)
    assert (set() if common is None else set(common.select(whole, Box.whole(shape)).reshape(-1).tolist())) == (
        elements[0] & elements[1]
    )
    if common is not None:
        begin, end = common.span(first)
        lying = first.select(whole, Box.whole(shape)).reshape(-1)[begin:end]
        assert {lying[0].item(), lying[-1].item()} <= elements[0] & elements[1]


def _bytes_of_reads(files: OpenFiles, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of what is filled from a file at once, from here on."""
    sizes: list[int] = []

    def fill(name: str, view: memoryview, offset: int) -> None:
        sizes.append(len(view))
        OpenFiles._fill(files, name, view, offset)

    monkeypatch.setattr(files, "_fill", fill)
    return sizes


VALUES: list[Any] = [
    None, True, 3, -0.5, 1e-300, "word", [1, [2]], (1, (2, 3)), {"a": {"b": 1}}, {1: "x", (2, 3): "y"}, b"\0\xff",
    {"$tensor": "no tensor"}, {4, 5}, complex(1, -2), torch.float16, torch.device("cpu"), OrderedDict(a=1),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values_come_back_as_they_were(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    plain = json.loads(json.dumps(to_plain(value, "state", tensors)))
    assert from_plain(plain, tensors.__getitem__) == value and not tensors
    assert type(from_plain(plain, tensors.__getitem__)) in (type(value), dict)


def test_numbers_that_json_has_not_and_tensors_come_back() -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {"inf": math.inf, "nan": math.nan, "t": torch.arange(3), "n": np.float32(0.1), "a": np.ones((2, 2))}
    plain = json.loads(json.dumps(to_plain(value, "state", tensors)))
    found = from_plain(plain, tensors.__getitem__)
    assert found["inf"] == math.inf and math.isnan(found["nan"]) and torch.equal(found["t"], torch.arange(3))
    assert found["n"] == float(np.float32(0.1)) and (found["a"] == np.ones((2, 2))).all()


@pytest.mark.parametrize(
    "array",
    [np.array(2.5), np.arange(12.0).reshape(3, 4).T, np.arange(5)[::-1], np.empty((0, 3))],
    ids=["of no dimension", "transposed", "backwards", "empty"],
)
def test_arrays_come_back_in_their_shape(array: np.ndarray[Any, Any]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    found = from_plain(json.loads(json.dumps(to_plain(array, "state", tensors))), tensors.__getitem__)
    np.testing.assert_array_equal(found, array, strict=True)


@pytest.mark.parametrize("array", [np.array([{}, 1], dtype=object), np.array(["a", "b"])], ids=["objects", "words"])
def test_arrays_of_no_numbers_are_refused_by_name(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"arrays of numbers .* at state\.names: save its tolist\(\)"):
        to_plain({"names": array}, "state", {})


def test_what_cannot_be_said_is_named_with_its_place() -> None:
    with pytest.raises(CheckpointError, match=r"builtins\.function|function.* at state\.a\[1\]"):
        to_plain({"a": [1, lambda: 1]}, "state", {})


def written(path: Path, values: dict[Entry, torch.Tensor], words: dict[str, str] | None = None) -> str:
    entries = sort_by_alignment(list(values))
    with ShardWriter(path, entries, words or {}) as writer:
        for entry in entries:
            writer.write(entry, values[entry])
        return writer.finish().digest


def header(path: Path) -> ShardFile:
    with path.open("rb") as file:
        return ShardFile.read(file.fileno(), path)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_no_file_stays_open_whatever_happens(tmp_path: Path) -> None:
    before, entry = num_descriptors(), Entry("t", torch.float32, (2,), Box.whole((2,)))
    with pytest.raises(RuntimeError, match="no values"), ShardWriter(tmp_path / "b", [entry], {}):
        raise RuntimeError("no values")
    assert num_descriptors() == before
    written(tmp_path / "a", {entry: torch.ones(2)})
    (placed,) = header(tmp_path / "a").placed["t"]
    files = OpenFiles(tmp_path)
    files.read("a", placed, entry.box, torch.empty(2))
    assert num_descriptors() == before + 2  # of the folder, too
    del files
    assert num_descriptors() == before


def test_files_are_read_by_the_safetensors_library_whatever_their_dtypes(tmp_path: Path) -> None:
    dtypes = [torch.bfloat16, torch.uint8, torch.float32, torch.bool, torch.float64, torch.int64, torch.float8_e4m3fn]
    tensors = {f"t{n}": torch.randn(3, n + 1).to(dtype) for n, dtype in enumerate(dtypes)}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}
    values = {Entry(name, t.dtype, tuple(t.shape), Box.whole(t.shape)): t for name, t in tensors.items()}
    digest = written(tmp_path / "a.safetensors", values)
    loaded = load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8)) if tensor.dim() else True
    assert loaded["scalar"] == 2.5 and OpenFiles(tmp_path).hash_of("a.safetensors") == digest


@pytest.mark.parametrize("most_bytes", [16, 200, 1 << 20])
def test_the_librarys_files_are_read_by_any_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    """What lies apart in a file is read some rows at a time, with what lies between them."""
    monkeypatch.setattr(shard_file, "_BLOCK_BYTES", most_bytes)
    whole = torch.randn(4, 5, 6)
    save_file({"t": whole}, tmp_path / "a.safetensors")
    (placed,) = header(tmp_path / "a.safetensors").placed["t"]
    files = OpenFiles(tmp_path)
    for box in (
        Box.whole(whole.shape),
        Box((1, 2, 3), (2, 2, 2)),
        Box((3, 0, 0), (1, 5, 6)),
        Box((0, 0, 5), (4, 5, 1)),
    ):
        for dtype in (torch.float32, torch.float64):
            part = torch.empty(box.sizes, dtype=dtype)
            sizes = _bytes_of_reads(files, monkeypatch)
            files.read("a.safetensors", placed, box, part)
            assert max(sizes) <= most_bytes or (dtype == torch.float32 and box.sizes[1:] == whole.shape[1:])
            assert torch.equal(part, box.select(whole, Box.whole(whole.shape)).to(dtype))
    files.close()


@pytest.mark.parametrize(
    "data", [b"", b"\1", b"\xff" * 40, (50).to_bytes(8, "little") + b'{"a":1}', (7).to_bytes(8, "little") + b'{"a":1}'],
    ids=["empty", "short", "no length", "longer than the file", "no entry"],
)  # fmt: skip
def test_what_is_no_safetensors_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"expected .* to be a safetensors file"):
        header(tmp_path / "a")


def test_a_box_outside_its_tensor_is_refused(tmp_path: Path) -> None:
    save_file({"t@9": torch.zeros(4)}, tmp_path / "a", metadata={"boxes": json.dumps({"t@9": ["t", [10], [9]]})})
    with pytest.raises(CheckpointError, match="does not lie where it says"):
        header(tmp_path / "a")


def marker(num_steps: int = 3, saved_at: str = "2026-01-01") -> Marker:
    optimizer = OptimizerInfo("torch.optim.Adam", ({"lr": 0.1, "params": ["w"]},), {"w": ("m",)}, (
        Scalar("step", 3.0, "float32", ("w",)),
    ))  # fmt: skip
    files = {file_name(kind, rank, 2): (8, "0" * 32) for kind in ("model", "state") for rank in (0, 1)}
    return Marker(
        2, num_steps, 0, saved_at, {"w": TensorInfo("float32", (2, 3))}, (), {"tied": "w"}, optimizer, files=files
    )


def test_markers_come_back_and_a_changed_one_is_found() -> None:
    text = marker().to_json()
    assert parse_marker(text, Path("here")) == marker()
    for changed in (text.replace("0.1", "0.2"), text[:-5], text.replace("checkpoint 1", "checkpoint 2"), "[]", ""):
        with pytest.raises(CheckpointError, match="expected here to be the marker"):
            parse_marker(changed, Path("here"))


def saved(folder: Path, num_steps: int, keep: int | None = None, saved_at: str | None = None) -> Path:
    unfinished = folders.begin(folder, num_steps)
    about = marker(num_steps, saved_at or f"2026-01-{num_steps:02}")
    for name in about.files:
        (unfinished.path / name).write_bytes(bytes(8))
    place = folders.commit(unfinished, about)
    assert keep is None or folders.prune(place, keep) == ""
    return place


def test_latest_is_the_one_that_was_finished_last(tmp_path: Path) -> None:
    assert folders.latest(tmp_path) is None
    first = saved(tmp_path, 5)
    assert folders.latest(tmp_path) == first == folders.resolve(tmp_path) == folders.resolve(first)
    lives, died = folders.begin(tmp_path, 6), folders.begin(tmp_path, 7)
    died.release()  # as the system does where a process is killed
    assert folders.latest(tmp_path) == first
    again = saved(tmp_path, 5)
    assert again != first and folders.latest(tmp_path) == again and first.is_dir()
    assert lives.path.exists() and not died.path.exists()  # which goes with the next save
    lives.abandon()
    assert sorted(os.listdir(tmp_path)) == ["latest", first.name, again.name]


def test_what_has_no_lock_goes_once_it_is_old(tmp_path: Path) -> None:
    """Of a file system without locks, or an earlier version."""
    parts = [tmp_path / f".step-00000001-{digit * 16}.part" for digit in "ab"]
    for part in parts:
        part.mkdir()
        (part / "file").touch()
    for path in (parts[0], parts[0] / "file"):
        os.utime(path, (1.0, 1.0))
    saved(tmp_path, 2)
    assert [part.exists() for part in parts] == [False, True]


def test_clocks_that_are_set_back_do_not_change_what_is_kept(tmp_path: Path) -> None:
    for number, year in ((1, 2030), (2, 2026), (3, 2020)):
        saved(tmp_path, number, keep=2, saved_at=f"{year}-01-01")
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000002", "step-00000003"]


def test_latest_takes_the_place_of_a_link_and_no_link_is_read_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    run, elsewhere = tmp_path / "run", saved(tmp_path / "elsewhere", 1)
    run.mkdir()
    (run / "latest").symlink_to(tmp_path / "precious")
    with pytest.raises(CheckpointError, match="symbolic links are not followed"):
        folders.latest(run)
    (run / "step-00000005").symlink_to("nowhere")
    place = saved(run, 5)
    assert place.name == "step-00000005-2" and folders.latest(run) == place
    assert (tmp_path / "precious").read_text() == "mine" and not (run / "latest").is_symlink()
    (run / "step-00000009").symlink_to(elsewhere)
    (run / "latest").write_text("step-00000009\n")
    with pytest.raises(CheckpointError, match="which is none: load"):
        folders.latest(run)
    (tmp_path / "given").symlink_to(elsewhere)
    assert folders.read_marker(folders.resolve(tmp_path / "given")).num_steps == 1  # a path that the user gives


def test_what_is_no_plain_file_or_too_large_is_not_read(tmp_path: Path) -> None:
    place = saved(tmp_path, 1)
    name = min(folders.read_marker(place).files)
    with (tmp_path / "latest").open("wb") as file:
        file.truncate(2 << 30)
    with pytest.raises(CheckpointError, match="2,147,483,648 bytes, where at most 256 are read"):
        folders.latest(tmp_path)
    for file_of, call in ((tmp_path / "latest", folders.latest), (place / "checkpoint.json", folders.read_marker)):
        file_of.unlink()
        os.mkfifo(file_of)
        with pytest.raises(CheckpointError, match="no plain file"):
            call(file_of.parent)
    (place / name).unlink()
    os.mkfifo(place / name)
    with folders.open_folder(place) as opened, pytest.raises(CheckpointError, match=f"{name} .*no plain file"):
        folders.check_sizes(opened, place, marker())


def test_keep_leaves_those_saved_last_and_whatever_is_none(tmp_path: Path) -> None:
    (tmp_path / "step-mine").mkdir()
    (tmp_path / "step-00000001").mkdir()
    for number in (2, 9, 4, 6):
        saved(tmp_path, number, keep=2, saved_at=f"2026-01-0{(2, 9, 4, 6).index(number) + 1}")
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001", "step-00000004", "step-00000006", "step-mine"]


def test_a_checkpoint_that_is_not_whole_is_not_finished(tmp_path: Path) -> None:
    first = saved(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"model-00000-of-00002.safetensors \(No such file"):
        folders.commit(folders.begin(tmp_path, 2), marker(2))
    assert folders.latest(tmp_path) == first


@pytest.mark.parametrize("text", ["", "step-00000009", "../elsewhere", "/etc", "step-00000001\nstep-00000002"])
def test_a_latest_that_names_no_checkpoint_is_refused(tmp_path: Path, text: str) -> None:
    saved(tmp_path, 1)
    (tmp_path / "latest").write_text(text)
    with pytest.raises(CheckpointError, match=r"by its own path \(step-00000001\)"):
        folders.resolve(tmp_path)


def test_a_path_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="expected a checkpoint, or a folder with some"):
            folders.resolve(path)
