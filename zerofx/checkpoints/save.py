"""Write a step's state to files: each rank writes its own part, one tensor of one bucket at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import xxhash

from zerofx.checkpoints.names import ModelNames, groups_of, number_of
from zerofx.checkpoints.pieces import Piece
from zerofx.checkpoints.random_states import random_states
from zerofx.checkpoints.together import run_on_all, run_on_first
from zerofx.checkpoints.training import OwnedValues, Training, parts_of, states_to_write
from zerofx.checkpoints.user_state import WORD, describe_state
from zerofx.disk.checkpoint.boxes import Box
from zerofx.disk.checkpoint.folder import Unfinished, begin, commit, prune
from zerofx.disk.checkpoint.marker import MODEL, STATE, Marker, OptimizerInfo, Scalar, TensorInfo, file_name
from zerofx.disk.checkpoint.plain import to_plain
from zerofx.disk.checkpoint.shard_file import Entry, ShardWriter, Written, bytes_of, sort_by_alignment
from zerofx.errors import CheckpointError, notify
from zerofx.optimizers.outside import attributes_to_save
from zerofx.runtime.comm.control import Control
from zerofx.runtime.state.on_host import ReadAhead, read_on_host

_FINISH = "finish a checkpoint"


@dataclass(frozen=True)
class StepCounts:
    """The numbers of steps done and skipped; other counters, as JSON."""

    num_steps: int
    num_skipped: int
    extra: Mapping[str, Any]


Show = Callable[[OwnedValues], AbstractContextManager[Callable[[Piece], AbstractContextManager[torch.Tensor]]]]


@dataclass(frozen=True)
class Content:
    """This rank's content: ``parts`` of buckets, ``loose`` tensors by file and name, and ``words`` as JSON."""

    rank: int
    num_ranks: int
    words: str
    loose: Mapping[str, Mapping[str, torch.Tensor]]
    parts: tuple[OwnedValues, ...]

    def copy(self) -> Content:
        """The same content with copies of the loose tensors, which others may change."""
        loose = {kind: {n: t.detach().cpu().clone() for n, t in named.items()} for kind, named in self.loose.items()}
        return replace(self, loose=loose)


@dataclass(frozen=True)
class Draft:
    """A checkpoint to be written into the folder ``part``; the other fields are None on ranks other than 0."""

    content: Content
    part: Path
    unfinished: Unfinished | None
    marker: Marker | None

    def commit(self, files: Mapping[str, Written], keep: int | None) -> tuple[Path, str]:
        """On rank 0, once all files of all ranks are on disk: move the checkpoint into place.

        Returns:
            Its path, and the checkpoints beyond ``keep`` that could not be removed, in words.
        """
        assert self.marker is not None and self.unfinished is not None, "rank 0 has them"
        sizes = {name: (file.num_bytes, file.digest) for name, file in files.items()}
        place = commit(self.unfinished, replace(self.marker, files=sizes))
        return place, prune(place, keep) if keep is not None else ""

    def abandon(self) -> None:
        """On rank 0: remove the written files."""
        if self.unfinished is not None:
            self.unfinished.abandon()


def start(training: Training, names: ModelNames, numbers: StepCounts, state: Mapping[str, Any], folder: Path) -> Draft:
    """Record the state to save, and make the folder for it. Collective.

    Delayed updates have been finished. ``state``: the user's own, as ``check_state`` returns it.

    Raises:
        CheckpointError: on all ranks; nothing of ``folder`` has been changed then.
    """
    control = training.control
    words, tensors = run_on_all(control, "take down the state to save", lambda: describe_state(state))
    own = {f"buffer.{name}": buffer for name, buffer in _own_buffers(training, names).items()}
    owned = states_to_write(training, names)
    in_stages = training.state.layout.mesh.pipe > 1
    has_owners = training.state.owners or in_stages  # of which other stages may have some
    listed = control.gather(owned.trees, "list the states of whole parameters") if has_owners else []
    trees = {name: tree for of_rank in listed for name, tree in of_rank.items()}
    loose: dict[str, dict[str, torch.Tensor]] = {
        MODEL: dict(names.buffers) if control.rank == 0 else {},
        STATE: {**random_states(training.device), **tensors, **own, **owned.tensors},
    }
    content = Content(control.rank, control.num_ranks, words, loose, tuple(parts_of(training, names)))
    known = run_on_all(control, "list the optimizer's states", lambda: _states_of(training, names))
    if in_stages:
        known = known.join(control.gather(known, "list the optimizer's states"))
    on_rank_0: list[tuple[Unfinished, Marker]] = []

    def make_folder() -> Path:
        marker = _marker(training, names, numbers, trees, known)
        on_rank_0.append((begin(folder, numbers.num_steps), marker))
        return on_rank_0[0][0].path

    part = run_on_first(control, "begin a checkpoint", make_folder)
    unfinished, marker = on_rank_0[0] if on_rank_0 else (None, None)
    return Draft(content, part, unfinished, marker)


def save(
    training: Training, names: ModelNames, numbers: StepCounts, state: Mapping[str, Any], folder: Path, keep: int | None
) -> Path:
    """Write a checkpoint into ``folder``, and move it into place once it is whole; returns its path. Collective.

    Raises:
        CheckpointError: on all ranks; nothing of the folder has been changed then.
    """
    control = training.control
    begun = start(training, names, numbers, state, folder)
    try:
        written = run_on_all(control, "write a checkpoint", lambda: _write_at_once(training, begun))
        files = {name: file for listed in control.gather(written, _FINISH) for name, file in listed.items()}
        place, left = run_on_first(control, _FINISH, lambda: begun.commit(files, keep))
    except BaseException:
        begun.abandon()
        raise
    warn_of_left(control, left)
    return place


def warn_of_left(control: Control, left: str) -> None:
    """On rank 0, warn of checkpoints that could not be removed."""
    if left and control.rank == 0:
        notify(
            f"expected to remove checkpoints that keep= does not keep, found that it cannot be done ({left}): remove "
            f"them, and look at who may write there; the drive may fill up"
        )


def _own_buffers(training: Training, names: ModelNames) -> dict[str, torch.Tensor]:
    """The buffers of this rank that differ from rank 0's. Collective."""
    mine = {
        name: xxhash.xxh3_128_hexdigest(bytes_of(buffer.detach().cpu().contiguous()))
        for name, buffer in names.buffers.items()
    }
    first = training.control.gather(mine, "compare the buffers")[0]
    return {name: buffer for name, buffer in names.buffers.items() if mine[name] != first.get(name)}


def write_files(
    content: Content, folder: Path, show: Show, on_block: Callable[[], None] = lambda: None
) -> dict[str, Written]:
    """Write this rank's two files to disk. ``show`` gives access to a part, and its pieces one by one; ``on_block`` is
    called before each block is written, and may raise."""
    written = {}
    for kind in (MODEL, STATE):
        jobs: dict[Entry, tuple[OwnedValues | torch.Tensor, Any]] = {
            entry: (part, piece) for part in content.parts if part.kind == kind for entry, piece in part.entries
        }
        for name, values in content.loose[kind].items():
            real = torch.view_as_real(values) if values.is_complex() else values
            jobs[Entry(name, real.dtype, tuple(real.shape), Box.whole(real.shape))] = (real, None)
        name = file_name(kind, content.rank, content.num_ranks)
        entries = sort_by_alignment(list(jobs))
        words = {WORD: content.words} if kind == STATE else {}
        with ShardWriter(folder / name, entries, words, on_block) as writer:
            for _, listed in groupby(entries, key=lambda entry: id(jobs[entry][0])):
                _write_run(show, writer, [(entry, *jobs[entry]) for entry in listed])
            written[name] = writer.finish()
    return written


def _write_run(show: Show, writer: ShardWriter, run: list[tuple[Entry, Any, Any]]) -> None:
    """Write entries of one tensor, which is copied to the host once."""
    source = run[0][1]
    if isinstance(source, torch.Tensor):
        ((entry, values, _),) = run
        writer.write(entry, values.detach().cpu())
        return
    with show(source) as shown:
        for entry, _, piece in run:
            with shown(piece) as values:
                writer.write(entry, values)


def _write_at_once(training: Training, begun: Draft) -> dict[str, Written]:
    """Write this rank's files directly from the tiers of the values."""
    written_in_order = sorted(
        (part for part in begun.content.parts if part.entries),
        key=lambda part: (part.kind != MODEL, -part.stored.dtype.itemsize),
    )
    ahead = ReadAhead([part.stored for part in written_in_order], training.tiers)

    @contextmanager
    def show_in_place(part: OwnedValues) -> Iterator[Callable[[Piece], AbstractContextManager[torch.Tensor]]]:
        first, last = part.begin - part.first, part.end - part.first
        with read_on_host(part.stored, first, last, training.tiers, ahead) as values:
            yield lambda piece: nullcontext(piece.view(values, part.begin))

    try:
        return write_files(begun.content, begun.part, show_in_place)
    finally:
        ahead.finish()


def _marker(
    training: Training, names: ModelNames, numbers: StepCounts, trees: Mapping[str, Any], known: _States
) -> Marker:
    ids = {id(training.state.parameter(own)): name for own, name in names.parameters.items()}
    extra = {
        key: _plain_without_tensors(value, key, "get_extra_state()", "buffers") for key, value in names.extra.items()
    }
    gives = "an optimizer's state_dict(), besides states and groups,"
    own = [
        _plain_without_tensors(attributes_to_save(each), type(each).__name__, gives, "state[p]")
        for each in training.optimizers.each
    ]
    return Marker(
        num_ranks=training.control.num_ranks,
        num_model=training.state.layout.mesh.model,
        num_pipe=training.state.layout.mesh.pipe,
        num_steps=numbers.num_steps,
        num_skipped=numbers.num_skipped,
        saved_at=datetime.now(UTC).isoformat(),
        tensors={name: TensorInfo.from_tensor(tensor) for name, tensor in names.tensors.items()},
        buffers=tuple(names.buffers),
        aliases=names.aliases,
        optimizer=replace(_optimizer(training, ids, known), owned=dict(trees)),
        extra={"numbers": dict(numbers.extra), "modules": extra} | ({"optimizers": own} if any(own) else {}),
        about={
            "torch": torch.__version__,
            "stage": training.state.stage,
            "model": type(training.model).__name__,
            "config": _config(training.model, "config"),
            "generation_config": _config(training.model, "generation_config"),
        },
    )


def _plain_without_tensors(value: Any, what: str, source: str, place: str) -> Any:
    """``value``, which ``source`` gives under the name ``what``, as JSON.

    Raises:
        CheckpointError: it has tensors, or what JSON cannot say; tensors are saved where ``place`` has them.
    """
    tensors: dict[str, torch.Tensor] = {}
    plain = to_plain(value, what, tensors)
    if tensors:
        raise CheckpointError(
            f"expected {source} to give what JSON can say, found tensors in {', '.join(tensors)}: keep them in {place}"
        )
    return plain


@dataclass(frozen=True)
class _States:
    """The names of the states of parameters, and numbers among them with the parameters that have them."""

    names: dict[str, tuple[str, ...]]
    scalars: dict[tuple[str, str, str | None], tuple[Any, dict[str, None]]]

    def join(self, of_ranks: Sequence[_States]) -> _States:
        """Those of all ranks, in order."""
        joint = _States({}, {})
        for each in of_ranks:
            joint.names.update(each.names)
            for key, (number, listed) in each.scalars.items():
                joint.scalars.setdefault(key, (number, {}))[1].update(listed)
        return joint


def _states_of(training: Training, names: ModelNames) -> _States:
    """List the states of this rank's buckets."""
    states: dict[str, tuple[str, ...]] = {}
    scalars: dict[tuple[str, str, str | None], tuple[Any, dict[str, None]]] = {}
    for bucket, held in training.buckets():
        if not bucket.trainable or not held.present or bucket.index in training.state.owners:
            continue
        mine = dict.fromkeys(names.parameters[slot.source] for slot in bucket.slots)
        states |= dict.fromkeys(mine, tuple(name for name in held.flat if name in held.present))
        for state, value in held.scalars.items():
            if state in held.present:
                number, dtype = number_of(value)
                scalars.setdefault((state, json.dumps(number), dtype), (number, {}))[1].update(mine)
    return _States(states, scalars)


def _optimizer(training: Training, ids: Mapping[int, str], known: _States) -> OptimizerInfo:
    return OptimizerInfo(
        training.optimizers.kind,
        tuple(groups_of(training.optimizers, ids)),
        known.names,
        tuple(Scalar(key[0], number, key[2], tuple(listed)) for key, (number, listed) in known.scalars.items()),
    )


def _config(model: Any, name: str) -> Any:
    """The configuration of a model of transformers', as its ``to_json_string`` gives it; None where it has none."""
    give: Callable[[], str] | None = getattr(getattr(model, name, None), "to_json_string", None)
    return json.loads(give()) if give is not None else None
