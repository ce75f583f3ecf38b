"""An emitted file as data: read back it is the same file, and no data can have its text do anything else."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from tests.lib.graphs import Averaging, TwoBlocks, prepare
from tests.lib.plans import wired
from zerofx.codegen.emit import EmittedStep, emit
from zerofx.codegen.regions import cut
from zerofx.codegen.step_file import CallLine, RegionCall, RegionText, Repeated, StepFile, region_text
from zerofx.codegen.step_file_data import EVENTS, step_file_of, to_data
from zerofx.disk.cache import MALFORMED
from zerofx.ir.serialise import Name, decode
from zerofx.scheduler.cost.liveness import liveness

CODE = "__import__('os').system('false')"


def emitted(make: Callable[[], Any] = lambda: prepare(TwoBlocks())) -> EmittedStep:
    prepared = make().run()
    scalars = {index: program.scalars for index, program in prepared.programs.items()}
    return emit(prepared.step, cut(prepared.step), liveness(prepared.step, on_cpu=True), "A step.", scalars)


def as_text(file: StepFile) -> Any:
    return json.loads(json.dumps(to_data(file)))


@pytest.mark.parametrize(
    "make", [lambda: prepare(TwoBlocks()), lambda: wired("fp8"), lambda: prepare(Averaging(), num_micro_batches=5)]
)
def test_a_file_that_was_read_has_the_same_text(make: Callable[[], Any]) -> None:
    file = emitted(make).file
    found = step_file_of(as_text(file))
    assert found.text == file.text and found.functions == file.functions


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
        "body": [["region", "region", ["a"], ["y"], [], None, "note"]], "outputs": ["y"],
    } | changed  # fmt: skip
    return list(given.values())


def _loop(**changed: Any) -> list[Any]:
    given = {
        "num_rounds": 2, "batch": [["b", "b", ""]],
        "body": [["region", "region", ["b"], ["y"], [], None, "note"]], "reads": [["ys", "c"]], "takes": [["ys", "d"]],
        "lists": [["ys", "y"]], "carried": [["a", "y"]], "dead": ["c"],
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
    "a region that is none": _file(body=[["region", "exec", ["a"], ["y"], [], None, "note"]]),
    "a bucket": _file(body=[["region", "region", ["a"], ["y"], [], CODE, ""]]),
    "a number of rounds": _loop(num_rounds=CODE),
    "a name of a round's batch": _loop(batch=[[f"a={CODE};b", "b", ""]]),
    "a line of a round": _loop(body=[["region", "exec", ["a"], ["y"], [], None, "note"]]),
    "a loop in a loop": _loop(body=_loop()[4]),
    "a list": _loop(lists=[[CODE, "y"]]),
    "what is carried": _loop(carried=[["a", CODE]]),
    "a list that is read": _loop(reads=[[CODE, "c"]]),
    "a name of what is taken": _loop(takes=[["ys", f"d={CODE};d"]]),
    "a builtin that is read": _loop(reads=[["open", "c"]]),
    "a name that a round deletes": _loop(dead=[f"c;{CODE}"]),
    "an output": _file(outputs=[CODE]),
    "a name of the state": _file(state=[[f"a={CODE};b", "b", ""]]),
    "a builtin as an argument": _file(_call(args=[{"name": "open"}])),
    "a builtin in a list": _file(_call(args=[[{"name": "open"}]])),
    "a builtin as an input": _file(body=[["region", "region", ["open"], ["y"], [], None, "note"]]),
    "a builtin that is returned": _file(outputs=["open"]),
    "a builtin of a round": _loop(lists=[["ys", "open"]]),
    "what each value is made with": _file(_call(args=[{"slice": [{"name": "x0"}, None, None]}])),
    "a tensor": _file(_call(args=[{"tensor": ["float32", "cpu", [1], [1], 0, 1]}])),
    "a name that Python reads as another": _file(_call(targets=["\uff59"])),
    "a value of no call": _file(_call(function="", args=[], targets=["y", "open"], note="")),
    "the runtime in a region": _file(_call(function="runtime.wait")),
    "an item of nothing": _file(_call(function="getitem")),
    "no text": _file(header=["a"]),
    "too little": _file()[:3],
    "something else": ["region"] * 5,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_no_step_says_is_not_read(what: str) -> None:
    step_file_of(_file())
    step_file_of(_loop())
    with pytest.raises(MALFORMED):
        step_file_of(json.loads(json.dumps(HOSTILE[what])))


ENDS = ["\n", "\r", "\r\n", "\x0b", "\x0c", "\x85", "\u2028", "\0"]
LONG = "a" * 120
TEXTS = [
    *(f"a layer{end}{CODE}{end}    {CODE}" for end in ENDS),
    f"({LONG} {CODE}", f"[{LONG} # ( {CODE}", f"'{LONG} {CODE}", f"{LONG}' ( {CODE}", f'{LONG}" [ {CODE}', f"{LONG}\\",
]  # fmt: skip


def _with_text(text: str, *, argument: str, args: int) -> StepFile:
    """A file with a text wherever a file may have one."""
    call = CallLine(
        "aten.relu.default", (Name("x0"), *[argument] * args), (), ("y", "y_of_each"), dead=("x0",), note=text
    )
    host = RegionCall("region", ("a",) * args, ("y",), (), 0, text)
    region = RegionText("region", 1, (call,), ("y",))
    taken = (("a", argument, text),)
    loop = Repeated(
        2, (("b", argument, text),), (("ys", "c"),), (("ys", "d"),), (text, call, host), (("ys", "y"),), (("a", "y"),),
        ("c",),
    )  # fmt: skip
    return StepFile(text, {"ab": region}, taken, taken, (text, call, host, loop), ("y",))


@pytest.mark.parametrize("args", [1, 20])
@pytest.mark.parametrize("text", TEXTS)
def test_no_text_leaves_its_place(text: str, args: int) -> None:
    hostile = _with_text(text, argument=text, args=args)
    calm = _with_text("b", argument=text, args=args)
    found, expected = (ast.dump(ast.parse(file.text)) for file in (hostile, calm))
    assert found == expected
    (region,) = [node for node in ast.parse(hostile.text).body if getattr(node, "name", "") == "region"]
    (call,) = [node for node in ast.walk(region) if isinstance(node, ast.Call) and len(node.args) > 1]
    assert [ast.literal_eval(argument) for argument in call.args[1:]] == [text] * args


@pytest.mark.parametrize("text", [*TEXTS, "é", CODE, "live 1 B | compute # x"])
def test_a_note_is_one_that_is_written(text: str) -> None:
    for file in (_file(_call(note=text)), _file(batch=[["a", "a", text]]), _loop(batch=[["b", "b", text]])):
        with pytest.raises(ValueError, match="expected a note"):
            step_file_of(json.loads(json.dumps(file)))
    with pytest.raises(ValueError, match="expected a note"):
        step_file_of(_file(body=[["region", "region", ["a"], ["y"], [], None, text]]))


def _called(node: ast.Call) -> str:
    """What a call in a step's file calls: a dotted name."""
    return ast.unparse(node.func)


def _does_what_a_step_may(file: StepFile) -> bool:
    """Whether all that the file's text calls, imports and reads from outside is what a step has."""
    tree = ast.parse(file.text)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    others = [node for node in tree.body if not isinstance(node, ast.FunctionDef)]
    assert list(map(ast.unparse, others)) == ["import torch", "aten = torch.ops.aten"]
    for function in functions.values():
        given = {argument.arg for argument in function.args.args}
        nodes = list(ast.walk(function))
        own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        for node in nodes:
            assert not isinstance(node, ast.Import | ast.ImportFrom | ast.Lambda | ast.comprehension | ast.Global)
            if isinstance(node, ast.Name):
                assert node.id in own | given | {"aten", "torch", "float", "range", *functions}, node.id
            if isinstance(node, ast.Call):
                name = _called(node)
                owner, _, method = name.rpartition(".")
                assert (
                    name in {"inputs.clear", "torch.device", "float", "range"}
                    or name in functions
                    or (owner in own and method == "append")
                    or (owner == "runtime" and (name in EVENTS or method == "host"))
                    or name.startswith(("aten.", "torch.ops.prims.", "torch.ops.zerofx."))
                ), name
    return True


MUTANTS = [
    CODE, "open", "exec", "runtime", "torch", "x0", "x", "_", "", "(" + "a" * 120 + CODE, f"a\n{CODE}",
    "aten.relu.default", "getitem", "runtime.wait", "aten.from_file.default", None, 1, -1, True, 1e999, [], [CODE],
    {"name": "open"}, {"dtype": "load"}, {"device": "cpu"}, {"slice": [1, 2, 3]},
    {"tensor": ["float32", "cpu", [1], [1], 0, 1]}, {"eval": CODE}, {}, "call", "region", "loop",
]  # fmt: skip


def _places(data: Any) -> list[tuple[Any, Any]]:
    """Each list or dictionary in ``data`` with each of its indices."""
    if not isinstance(data, list | dict):
        return []
    keys = list(data) if isinstance(data, dict) else range(len(data))
    return [(data, key) for key in keys] + [place for key in keys for place in _places(data[key])]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("seed", range(6))
def test_data_that_was_changed_anywhere_is_refused_or_does_what_a_step_may(seed: int) -> None:
    random = Random(seed)
    files = [as_text(emitted().file), as_text(emitted(lambda: prepare(Averaging(), num_micro_batches=5)).file)]
    num_read = 0
    for _ in range(150):
        data = json.loads(json.dumps(random.choice(files)))
        for _ in range(random.choice([1, 1, 2])):
            holder, key = random.choice(_places(data))
            other, from_key = random.choice(_places(data))
            holder[key] = random.choice([*MUTANTS, json.loads(json.dumps(other[from_key]))])
        try:
            file = step_file_of(data)
        except MALFORMED:
            continue
        num_read += _does_what_a_step_may(file)
    assert 0 < num_read < 150


def test_values_are_written_so_that_they_are_read_as_values() -> None:
    for text in (CODE, f"'); {CODE} #", '"""', "\\", "\n"):
        region = RegionText("f", 0, (CallLine("aten.relu.default", (text, (text,), [text])),), ())
        (call,) = [node for node in ast.walk(ast.parse(region_text(region))) if isinstance(node, ast.Call)][1:]
        assert ast.literal_eval(call.args[0]) == text


@pytest.mark.parametrize("key", ["{turn.real}", f"{{{CODE}}}", f"']; {CODE} #", "\\", "{{a}}"])
def test_the_key_of_a_rounds_batch_is_a_key(key: str) -> None:
    text = step_file_of(_loop(batch=[["b", key, ""]])).text
    (formatted,) = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.JoinedStr)]
    assert eval(compile(ast.Expression(formatted), "", "eval"), {"turn": 3}) == f"{key}[3]"


def test_a_name_is_one() -> None:
    assert decode({"name": "x0"}) == Name("x0")
    for text in ("", "a b", "a.b", "del", "1", "\ufb01", None, 1):
        with pytest.raises(ValueError, match="expected a name"):
            Name(text)  # type: ignore[arg-type]


def test_layers_may_have_any_name() -> None:
    model = torch.nn.Sequential()
    for name in ("3d", "a\nimport os", "class", "\ufb01", "(" + "a" * 120):
        model.add_module(name, torch.nn.Linear(4, 4))
    model.register_forward_hook(lambda module, args, output: output.sum())
    file = emitted(lambda: prepare(model, (torch.ones(2, 4),))).file
    assert step_file_of(as_text(file)) and ast.parse(file.text)
