"""What a net brings back: a record a case, and files of them."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar, get_args

from tqdm import tqdm

from tests.lib.checkout import ROOT

Outcome = Literal["exact", "refused", "wrong"]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Record:
    """What became of one case of a net.

    Attributes:
        name: of what was tried, as its own library calls it: an operator, an optimizer, a model, a fault.
        variant: how it was tried, the dtype or the stage say; name and variant together are unique within a net.
        outcome: ``exact`` where all that the net promises holds; ``refused`` where zerofx said in an error of its own
            that it does not do this; ``wrong`` is everything else.
        detail: of a refusal its reason in one line, of what is wrong what was expected and what was seen.
    """

    name: str
    variant: str
    outcome: Outcome
    detail: str = ""

    def __post_init__(self) -> None:
        if self.outcome not in get_args(Outcome):
            raise ValueError(f"expected one of {get_args(Outcome)}, found {self.outcome!r} for {self.name}")


class Recorded(Protocol):
    """A case that knows the name and the variant of its record."""

    @property
    def record(self) -> tuple[str, str]: ...


CaseT = TypeVar("CaseT", bound=Recorded)


def results_path(net: str) -> Path:
    """The file with the records of the full sweep of ``net``."""
    return RESULTS / f"coverage_{net}.json"


def read_records(path: Path) -> list[Record]:
    """The records that ``write_records`` wrote; none where there is no such file."""
    return [Record(**fields) for fields in json.loads(path.read_text())] if path.exists() else []


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write a record a line, sorted by name and variant, so that a later sweep differs only where outcomes do.

    Raises:
        ValueError: two records have the same name and variant.
    """
    ordered = sorted(records, key=lambda record: (record.name, record.variant))
    for first, second in itertools.pairwise(ordered):
        if (first.name, first.variant) == (second.name, second.variant):
            raise ValueError(f"expected one record a case, found two for {first.name} ({first.variant})")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text("[\n" + ",\n".join(json.dumps(asdict(record)) for record in ordered) + "\n]\n")
    aside.replace(path)


def sweep(net: str, cases: Collection[CaseT], run: Callable[[CaseT], Record]) -> None:
    """Run each case that has no record yet, or one of what was wrong, and write the records after each."""
    path = results_path(net)
    records = {(record.name, record.variant): record for record in read_records(path)}
    for case in tqdm(cases, desc=net, unit="case"):
        if case.record not in records or records[case.record].outcome == "wrong":
            records[case.record] = run(case)
            write_records(path, records.values())


def report(net: str, records: Collection[Record]) -> None:
    """Write the records of a sweep that ran at one go, and print what is wrong, and how many there are of each."""
    write_records(results_path(net), records)
    for record in records:
        if record.outcome == "wrong":
            print(record)
    counted = Counter(record.outcome for record in records)
    print({outcome: counted[outcome] for outcome in get_args(Outcome)})
