"""Crafted checkpoints: markers, headers and files that were changed, with hashes that are right.

Each is refused with an error of zerofx's before anything is changed, or is loaded to the same bits; a marker's own
numbers (hyperparameters, counts) and the user's own state are what they say.
``python -m tests.nets.crafted`` runs all 500.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from tqdm import tqdm

import zerofx
from tests.lib.distributed import run_ranks
from tests.lib.models import batches
from tests.lib.runs.checkpoints import UNEVEN, Way, train
from tests.nets.mutations import mutated_bytes, mutated_text
from tests.nets.records import Record, report
from zerofx.errors import InternalError, ZeroFXError

NET, NUM_CASES = "crafted", 500
WAY = Way(3)
_KINDS = ("marker", "marker", "header", "header", "state", "nested", "file", "latest")
_DEEP = 100_000  # brackets: more than any reader of JSON follows


@dataclass
class World:
    """A checkpoint of two ranks in ``folder``, what it comes to, and a step of one rank that it is loaded into."""

    folder: Path
    place: Path
    step: zerofx.Step
    loaded: list[bytes]


def _save(folder: str) -> str:
    step, scheduler = WAY.step()
    train(step, scheduler, batches(UNEVEN, 0, 2))
    place = step.save_checkpoint(folder, state={"own": {"epoch": 3, "seen": (1, 2.5), "mean": torch.ones(3)}})
    step.close()
    return str(place)


def bits(step: zerofx.Step) -> list[bytes]:
    """Parameters, buffers and states that have a value for each element."""
    states = step.optimizer.state_dict()["state"]
    tensors = [*step.full_state_dict().values()]
    tensors += [value for index in states for value in states[index].values() if torch.as_tensor(value).numel() != 1]
    return [tensor.contiguous().numpy().tobytes() for tensor in tensors]


def make_world(folder: Path) -> World:
    place = Path(run_ranks(_save, 2, str(folder / "run"))[0])
    step, scheduler = WAY.step()
    train(step, scheduler, batches(UNEVEN, 0, 1))
    step.load_checkpoint(place, state={"own": {}})
    return World(folder, place, step, bits(step))


def _sealed(place: Path) -> None:
    """Make sizes and hashes of a marker those of its files, and its own hash fit."""
    path = place / "checkpoint.json"
    read = json.loads(path.read_text())
    content = read["checkpoint"]
    for name in content["files"]:
        if (place / name).is_file():
            data = (place / name).read_bytes()
            content["files"][name] = [len(data), xxhash.xxh3_128_hexdigest(data)]
    _write_marker(path, content)


def _write_marker(path: Path, content: Any) -> None:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    path.write_text(f'{{"format":"zerofx checkpoint 1","xxh3_128":"{digest}","checkpoint":{text}}}\n')


def _with_header(path: Path, header: bytes) -> None:
    """Put another header in the place of a file's own."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])


def _header_of(path: Path) -> bytes:
    data = path.read_bytes()
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def craft(place: Path, draw: random.Random) -> str:
    """Change the checkpoint at ``place``; returns how."""
    kind = draw.choice(_KINDS)
    marker, files = place / "checkpoint.json", sorted(place.glob("*.safetensors"))
    if kind == "marker":
        content = json.loads(marker.read_text())["checkpoint"]
        content["about"] = {key: value for key, value in content["about"].items() if key == "order"}
        changed, how = mutated_text(json.dumps(content).encode(), draw)
        try:
            _write_marker(marker, json.loads(changed))
        except ValueError:
            marker.write_bytes(changed)
        return f"marker: {how}"
    if kind == "header":
        path = draw.choice(files)
        changed, how = mutated_text(_header_of(path), draw)
        _with_header(path, changed)
        _sealed(place)
        return f"header: {how}"
    if kind == "state":
        path = next(path for path in files if path.name.startswith("state-00000"))
        header = json.loads(_header_of(path))
        changed, how = mutated_text(header["__metadata__"]["state"].encode(), draw)
        header["__metadata__"]["state"] = changed.decode(errors="replace")
        _with_header(path, json.dumps(header).encode())
        _sealed(place)
        return f"state: {how}"
    if kind == "nested":
        return _nest(place, draw)
    if kind == "latest":
        latest = place.parent / "latest"
        latest.unlink()
        how = draw.choice(["2 GiB", "pipe", "link", "folder", "../", "bytes", "device"])
        match how:
            case "2 GiB":
                with latest.open("wb") as file:
                    file.truncate(2 << 30)
            case "../":
                latest.write_text(draw.choice(["../run/step-00000002", "/etc", "step-00000002/..", "."]))
            case "bytes":
                latest.write_bytes(mutated_bytes(b"step-00000002\n", draw)[0])
            case _:
                _replaced(latest, how, draw)
        return f"latest: {how}"
    path = draw.choice([marker, *files])
    path.unlink()
    how = draw.choice(["pipe", "link", "folder", "device", "gone", "other name"])
    _replaced(path, how, draw)
    return f"file: {how}"


def _replaced(path: Path, how: str, draw: random.Random) -> None:
    match how:
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to(draw.choice(["/dev/zero", "/etc/hostname", "nowhere", path.name]))
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/tty")  # whoever may make a device is root
        case "other name":
            path.with_name(f"_{path.name}").touch()


def _nest(place: Path, draw: random.Random) -> str:
    marker = place / "checkpoint.json"
    text, deep = marker.read_text(), "[" * _DEEP + "]" * _DEEP
    where = draw.choice(["marker", "about", "header", "state", "digits"])
    path = next(path for path in sorted(place.glob("state-*")))
    if where == "marker":
        marker.write_text(deep)
    elif where == "about":
        marker.write_text(text.replace('"about":{', f'"about":{{"x":{deep},'))
    elif where == "digits":
        marker.write_text(text.replace('"num_steps":2', f'"num_steps":{"9" * _DEEP}'))
    elif where == "header":
        _with_header(path, deep.encode())
        _sealed(place)
    else:
        header = json.loads(_header_of(path))
        header["__metadata__"]["state"] = f'{{"own": {deep}}}'
        _with_header(path, json.dumps(header).encode())
        _sealed(place)
    return f"nested: {where}"


def run_case(world: World, number: int) -> Record:
    """Craft a checkpoint, and load it: every third time before the first step."""
    draw = random.Random(number)
    run = world.folder / f"case {number}"
    shutil.copytree(world.place.parent, run)
    how = craft(run / world.place.name, draw)
    path = run if how.startswith("latest") else run / world.place.name
    step = world.step if number % 3 else WAY.step()[0]
    ((args, _),) = batches(UNEVEN, 0, 1)
    before = bits(step) if number % 3 else None
    values = None if before is not None else [value.clone() for value in step.model.state_dict().values()]
    outcome, detail = "exact", ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step.load_checkpoint(path, state={"own": {}})
            if before is None:
                step.prepare(*args)
            if bits(step) != world.loaded:
                outcome, detail = "wrong", "other bits"
    except InternalError as error:
        outcome, detail = "wrong", f"InternalError: {str(error)[:300]}"
    except ZeroFXError as error:
        is_same = (
            bits(step) == before
            if before is not None
            else all(torch.equal(*pair) for pair in zip(values or [], step.model.state_dict().values(), strict=True))
        )
        outcome, detail = ("refused", "") if is_same else ("wrong", f"changed, then {str(error)[:300]}")
        if outcome == "refused":
            detail = type(error).__name__
    except Exception as error:  # noqa: BLE001 - what it is, is the outcome
        outcome, detail = "wrong", f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        if before is None:
            step.close()
        elif outcome != "refused":
            world.step.load_checkpoint(world.place, state={"own": {}})
        shutil.rmtree(run)
    return Record(f"case {number}, {how}", how.partition(":")[0], outcome, detail)  # type: ignore[arg-type]  # one of the three


def run(numbers: range) -> list[Record]:
    """The records of the cases with these numbers."""
    with tempfile.TemporaryDirectory() as folder:
        world = make_world(Path(folder))
        try:
            return [run_case(world, number) for number in tqdm(numbers, desc=NET, unit="case")]
        finally:
            world.step.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    report(NET, run(range(NUM_CASES)))
