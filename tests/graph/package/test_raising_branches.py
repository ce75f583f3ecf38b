"""The answer that keeps a program from raising is read from its bytecode."""

from __future__ import annotations

import sys

from zerofx.capture.values.raising_branches import answer_without_raising


class Asked:
    """Notes what keeps whoever branches on it from raising, and gives that."""

    def __init__(self) -> None:
        self.answers: list[bool | None] = []

    def __bool__(self) -> bool:
        answer = answer_without_raising(sys._getframe(1))
        self.answers.append(answer)
        return bool(answer)

    def item(self) -> bool:
        answer = answer_without_raising(sys._getframe(1))
        self.answers.append(answer)
        return bool(answer)


def test_ifs_that_raise_are_false_and_what_is_asserted_true() -> None:
    asked = Asked()
    if asked:
        raise ValueError("never")
    if not asked:
        raise ValueError("never")
    assert asked, "never"
    if asked.item():
        raise ValueError("never")
    if not bool(asked):
        raise ValueError("never")
    if any([asked]) or not all([asked]):
        raise ValueError("never")
    assert asked.answers == [False, True, True, False, True, False, True]


def test_an_else_and_a_branch_in_a_branch_count() -> None:
    asked = Asked()
    if asked:
        passed = True
    else:
        raise ValueError("never")
    if asked:
        if len(sys.argv) > 1_000:
            raise ValueError("many")
        raise ValueError("few")
    assert passed and asked.answers == [True, False]


def test_branches_that_go_on_either_way_have_no_answer() -> None:
    asked = Asked()
    if asked:
        print("told")
    if asked:
        if len(sys.argv) > 1_000:
            raise ValueError("only at times")
        print("told")
    told = bool(asked)
    while asked:
        print("told")
    assert not told and asked.answers == [None] * 4
