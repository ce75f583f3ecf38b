"""An emitted file as data: read back it is the same file, and no data can have its text do anything else."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.lib.graphs import Averaging, TwoBlocks, prepare
from tests.lib.plans import wired
from zerofx.codegen.emit import EmittedStep, emit
from zerofx.codegen.regions import cut
from zerofx.codegen.step_file import CallLine, RegionText, StepFile, region_text
from zerofx.codegen.step_file_data import as_data, step_file_of
from zerofx.disk.cache import MALFORMED
from zerofx.ir.serialise import Name, decoded
from zerofx.scheduler.cost.liveness import liveness

CODE = "__import__('os').system('false')"


def emitted(make: Callable[[], Any] = lambda: prepare(TwoBlocks())) -> EmittedStep:
    prepared = make().run()
    sources = [program.host_source for program in prepared.programs.values()]
    return emit(prepared.step, cut(prepared.step), liveness(prepared.step, on_cpu=True), "A step.", sources)


def as_text(file: StepFile) -> Any:
    return json.loads(json.dumps(as_data(file)))


@pytest.mark.parametrize(
    "make", [lambda: prepare(TwoBlocks()), lambda: wired("fp8"), lambda: prepare(Averaging(), num_micro_batches=5)]
)
def test_a_file_that_was_read_has_the_same_text(make: Callable[[], Any]) -> None:
    file = emitted(make).file
    found = step_file_of(as_text(file))
    assert found.text(["def host(): pass"]) == file.text(["def host(): pass"]) and found.functions == file.functions


def test_micro_batches_between_the_first_and_the_last_are_a_loop(golden: Callable[..., None]) -> None:
    source = emitted(lambda: prepare(Averaging(), num_micro_batches=5, num_ranks=1)).source
    golden(source[source.index("def step") :])


def _call(**changed: Any) -> list[Any]:
    given = {
        "function": "aten.relu.default", "args": [{"name": "x0"}], "keywords": [], "targets": ["y"], "unpacks": False,
        "dead": [], "note": "",
    } | changed  # fmt: skip
    return list(given.values())


def _file(call: list[Any] | None = None, **changed: Any) -> list[Any]:
    given = {
        "header": "", "regions": [["ab", "region", 1, [call or _call()], ["y"]]], "state": [],
        "batch": [["a", "a", "x"]],
        "body": [["region", "region", ["a"], ["y"], [], "", None, "note"]], "outputs": ["y"],
    } | changed  # fmt: skip
    return list(given.values())


def _loop(**changed: Any) -> list[Any]:
    given = {
        "num_rounds": 2, "batch": [["b", "b", ""]],
        "body": [["region", "region", ["b"], ["y"], [], "", None, "note"]], "lists": [["ys", "y"]],
        "carried": [["a", "y"]],
    } | changed  # fmt: skip
    return _file(body=[["loop", *given.values()]])


HOSTILE: dict[str, list[Any]] = {
    "a target": _file(_call(targets=[f"y={CODE};y"])),
    "a target that is another name": _file(_call(targets=["aten"])),
    "a deleted name": _file(_call(dead=[f"y;{CODE}"])),
    "an argument's name": _file(_call(args=[{"name": CODE}])),
    "a keyword": _file(_call(keywords=[[f"a={CODE},b", 1]])),
    "another function": _file(_call(function="os.system.default")),
    "a builtin": _file(_call(function="exec")),
    "a method of the runtime that runs what it is given": _file(_call(function="runtime.host")),
    "an attribute of the runtime": _file(_call(function="runtime.tiers.__init__")),
    "what loads libraries": _file(_call(function="load_library", args=["/tmp/a.so"])),
    "a method of an operator": _file(_call(function="aten.relu.__call__")),
    "an operator that opens files": _file(_call(function="aten.from_file.default", args=["/etc/passwd"])),
    "an operator with more in it": _file(_call(function=f"aten.relu.default(x0); {CODE}; aten.relu.default")),
    "something of torch": _file(_call(args=[{"dtype": "load"}])),
    "a kind that is none": _file(_call(args=[{"eval": CODE}])),
    "a region's name": _file(regions=[["ab", f"a():\n {CODE}\ndef b", 1, [], []]]),
    "a region that is the step": _file(regions=[["ab", "step", 1, [], []]], body=[]),
    "two regions of one name": _file(regions=[["ab", "a", 1, [], []], ["cd", "a", 1, [], []]], body=[]),
    "a region's key": _file(regions=[["../ab", "region", 1, [_call()], ["y"]]]),
    "a region that is none": _file(body=[["region", "exec", ["a"], ["y"], [], "", None, "note"]]),
    "another method of the runtime": _file(body=[["region", "region", ["a"], ["y"], [], "close", None, ""]]),
    "a bucket": _file(body=[["region", "region", ["a"], ["y"], [], "host_later", CODE, ""]]),
    "a number of rounds": _loop(num_rounds=CODE),
    "a name of a round's batch": _loop(batch=[[f"a={CODE};b", "b", ""]]),
    "a line of a round": _loop(body=[["region", "exec", ["a"], ["y"], [], "", None, "note"]]),
    "a loop in a loop": _loop(body=_loop()[4]),
    "a list": _loop(lists=[[CODE, "y"]]),
    "what is carried": _loop(carried=[["a", CODE]]),
    "an output": _file(outputs=[CODE]),
    "a name of the state": _file(state=[[f"a={CODE};b", "b", ""]]),
    "too little": _file()[:3],
    "something else": ["region"] * 6,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_no_step_says_is_not_read(what: str) -> None:
    step_file_of(_file())
    step_file_of(_loop())
    with pytest.raises(MALFORMED):
        step_file_of(json.loads(json.dumps(HOSTILE[what])))


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x85", "\u2028", "\0"])
def test_a_comment_ends_with_its_line(end: str) -> None:
    hostile = f"a layer{end}{CODE}{end}    {CODE}"
    body: list[Any] = [hostile, ["region", "region", ["a"], ["y"], [], "", None, hostile]]
    file = _file(_call(note=hostile), header=hostile, batch=[["a", hostile, hostile]], body=body)
    calm = _file(_call(note="b"), header="b", batch=[["a", hostile, "b"]], body=["b", [*body[1][:-1], "b"]])
    found, expected = (ast.dump(ast.parse(step_file_of(one).text([]))) for one in (file, calm))
    assert found == expected


def test_values_are_written_so_that_they_are_read_as_values() -> None:
    for text in (CODE, f"'); {CODE} #", '"""', "\\", "\n"):
        region = RegionText("f", 0, (CallLine("aten.relu.default", (text, (text,), [text])),), ())
        (call,) = [node for node in ast.walk(ast.parse(region_text(region))) if isinstance(node, ast.Call)][1:]
        assert ast.literal_eval(call.args[0]) == text


@pytest.mark.parametrize("key", ["{turn.real}", f"{{{CODE}}}", f"']; {CODE} #", "\\", "{{a}}"])
def test_the_key_of_a_rounds_batch_is_a_key(key: str) -> None:
    text = step_file_of(_loop(batch=[["b", key, ""]])).text([])
    (formatted,) = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.JoinedStr)]
    assert eval(compile(ast.Expression(formatted), "", "eval"), {"turn": 3}) == f"{key}[3]"


def test_a_name_is_one() -> None:
    assert decoded({"name": "x0"}) == Name("x0")
    for text in ("", "a b", "a.b", "del", "1", None, 1):
        with pytest.raises(ValueError, match="expected a name"):
            Name(text)  # type: ignore[arg-type]


def test_layers_may_have_any_name() -> None:
    model = torch.nn.Sequential()
    for name in ("3d", "a\nimport os", "class"):
        model.add_module(name, torch.nn.Linear(4, 4))
    model.register_forward_hook(lambda module, args, output: output.sum())
    file = emitted(lambda: prepare(model, (torch.ones(2, 4),))).file
    assert step_file_of(as_text(file)) and ast.parse(file.text([]))
