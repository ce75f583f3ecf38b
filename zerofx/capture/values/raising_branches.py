"""Find in bytecode which outcome of an ``if`` does not raise."""

from __future__ import annotations

import dis
import functools
from bisect import bisect_right
from types import CodeType, FrameType

_LEAVES = ("RETURN_", "YIELD_", "SEND")


def answer_without_raising(frame: FrameType) -> bool | None:
    """The value of the condition that ``frame`` is about to branch on, for which the branch does not raise.

        if torch.any(variance < 0): raise ValueError(...)     # False
        assert mask.all(), "..."                              # True
        if flag: x = x + 1                                    # None: neither branch raises

    A branch counts as raising if every path through it ends in ``raise``. The instruction that ``frame`` is executing
    is the branch itself, or a call (``bool``, ``any``, ``item``) whose result it branches on.
    """
    code = _instructions(frame.f_code)
    places = {instruction.offset: index for index, instruction in enumerate(code)}
    # Within a call of Python the frame is somewhere in what stands after the instruction.
    index, opposite = bisect_right([instruction.offset for instruction in code], frame.f_lasti) - 1, False
    if not _is_branch(code[index]):
        opposite ^= code[index].opname == "UNARY_NOT"
        index += 2 if code[index].opname == "PRECALL" else 1
    while code[index].opname in ("UNARY_NOT", "TO_BOOL", "COPY", "NOP"):
        opposite ^= code[index].opname == "UNARY_NOT"
        index += 1
    if not _is_branch(code[index]):
        return None
    jump = code[index]
    jumps, falls = _raises(code, places, places[jump.argval], set()), _raises(code, places, index + 1, set())
    if jumps == falls:
        return None
    to_jump = "IF_TRUE" in jump.opname
    return (to_jump if falls else not to_jump) ^ opposite


@functools.lru_cache(maxsize=256)
def _instructions(code: CodeType) -> list[dis.Instruction]:
    """The instructions of code, which takes as long as a small trace to find for a long function."""
    return [instruction for instruction in dis.get_instructions(code) if instruction.opname != "CACHE"]


def _is_branch(instruction: dis.Instruction) -> bool:
    return "JUMP" in instruction.opname and ("IF_TRUE" in instruction.opname or "IF_FALSE" in instruction.opname)


def _raises(code: list[dis.Instruction], places: dict[int, int], index: int, passed: set[int]) -> bool:
    """True if every path from ``index`` on ends in ``raise``."""
    while index < len(code) and index not in passed:
        passed.add(index)
        instruction = code[index]
        name = instruction.opname
        if name in ("RAISE_VARARGS", "RERAISE"):
            return True
        if name.startswith(_LEAVES):
            return False
        if _is_branch(instruction) or name == "FOR_ITER" or "IF_NONE" in name or "IF_NOT_NONE" in name:
            if not _raises(code, places, places[instruction.argval], set(passed)):
                return False
        elif name.startswith("JUMP"):
            index = places[instruction.argval]
            continue
        index += 1
    return False
