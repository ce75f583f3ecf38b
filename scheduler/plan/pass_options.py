"""A plan's decisions for each pass as the options of a pipeline's text, and a plan with other options instead.

A pass carries out some fields of some of the plan's decisions. Of ``GatherDecision``, say, where residencies begin and
end is for one pass, and how far ahead they start for another. An option is such a field, with a value for each
decision; fields that have their default in all of them are left out. Reasons and sizes are no options.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

from zerofx.errors import PlanError, UsageError
from zerofx.scheduler.plan.pipeline_text import Options, OptionValue
from zerofx.scheduler.plan.plan import Plan

# Fields of ``Plan``; of each those of a decision, or none for the field itself.
Decisions = Mapping[str, tuple[str, ...]]

# What decisions say besides, where a pipeline makes new ones.
_SAID_BESIDES: dict[str, Any] = {"reason": "given in a pipeline", "num_bytes": 0, "layer": ""}


def options_of(plan: Plan, decisions: Decisions) -> Options:
    """The options in ``plan`` for the pass that carries out ``decisions``."""
    options: list[tuple[str, tuple[OptionValue, ...]]] = []
    for entry, columns in decisions.items():
        rows = getattr(plan, entry)
        if not columns:
            if rows != _defaults(Plan)[entry]:
                options.append((entry, rows if isinstance(rows, tuple) else (rows,)))
            continue
        defaults = _defaults(_kind(entry))
        for column in columns:
            values = tuple(getattr(row, column) for row in rows)
            if any(column not in defaults or value != defaults[column] for value in values):
                options.append((column, values))
    return tuple(options)


def replace_options(plan: Plan, given: Iterable[tuple[str, Decisions, Options]]) -> Plan:
    """``plan`` with the decisions that options give: names of passes, what each carries out, its options.

    Passes without options have those of ``plan``.

    Raises:
        UsageError: a pass has no such option, or passes are told about different numbers of decisions.
    """
    data = json.loads(plan.to_json())
    changed: dict[str, dict[str, list[Any]]] = {}
    for name, decisions, options in given:
        if not options:
            continue
        known = [column for entry, columns in decisions.items() for column in columns or (entry,)]
        unknown = [key for key, _ in options if key not in known]
        if unknown:
            raise UsageError(
                f"expected options of {name} ({', '.join(known) or 'it has none'}), found {', '.join(unknown)}"
            )
        values = {key: _to_lists(option) for key, option in options}
        for entry, columns in decisions.items():
            if columns:
                own = {column: values[column] for column in columns if column in values}
                changed.setdefault(entry, {}).update(_fill_columns(name, entry, columns, own))
            elif isinstance(_defaults(Plan)[entry], tuple):
                data[entry] = values.get(entry, [])
            elif len(single := values.get(entry, [_defaults(Plan)[entry]])) == 1:
                data[entry] = single[0]
            else:
                raise UsageError(f"expected one value of {entry} of {name}, found {len(single)}")
    for entry, own in changed.items():
        data[entry] = _rows(entry, own, data.get(entry, []))
    try:
        return Plan.from_json(json.dumps(data))
    except PlanError as error:
        raise UsageError(
            f"expected values that a plan takes in the pipeline, found another: {error.__cause__}"
        ) from error


def _fill_columns(
    name: str, entry: str, columns: tuple[str, ...], given: Mapping[str, list[Any]]
) -> dict[str, list[Any]]:
    """All ``columns`` of a pass's decisions, those that are not ``given`` by their defaults."""
    number, defaults = len(next(iter(given.values()), [])), _defaults(_kind(entry))
    missing = [column for column in columns if number and column not in given and column not in defaults]
    if missing:
        raise UsageError(f"expected {', '.join(missing)} among the options of {name}, found {', '.join(given)} alone")
    return {column: given.get(column, [defaults.get(column)] * number) for column in columns}


def _rows(entry: str, changed: Mapping[str, list[Any]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Decisions with the columns ``changed``; others stay, where there are as many decisions as before."""
    numbers = {len(values) for values in changed.values()}
    if len(numbers) > 1:
        counts = ", ".join(f"{len(values)} of {column}" for column, values in changed.items())
        raise UsageError(f"expected a value of each option for each of the {entry}, found {counts}")
    (number,) = numbers
    names = [field.name for field in fields(_kind(entry))]
    known = {
        column: element for column, element in (_defaults(_kind(entry)) | _SAID_BESIDES).items() if column in names
    }
    rows = before if len(before) == number else [{}] * number
    missing = [
        name for name in names if name not in known and name not in changed and not all(name in row for row in rows)
    ]
    if missing:
        raise UsageError(
            f"expected {', '.join(missing)} for {number} {entry}, found a plan with {len(before)}: give the options of "
            f"the pass that is told so, too"
        )
    return [
        {**known, **row, **{column: values[place] for column, values in changed.items()}}
        for place, row in enumerate(rows)
    ]


def _to_lists(value: Any) -> Any:
    return [_to_lists(entry) for entry in value] if isinstance(value, tuple) else value


@functools.cache
def _kind(entry: str) -> Any:
    """The class of the decisions that a plan has in ``entry``."""
    return get_args(get_type_hints(Plan)[entry])[0]


def _defaults(kind: type[Any]) -> dict[str, Any]:
    return {field.name: field.default for field in fields(kind) if field.default is not MISSING}
