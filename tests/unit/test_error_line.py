from __future__ import annotations

import pytest

from inflight.error_line import LONGEST, first_line, one_line, with_kind


class Unreadable(Exception):
    def __str__(self):
        raise SystemExit("an exception of its own")


class Silent(Exception):
    def __str__(self):
        return ""

    def __repr__(self):
        raise RuntimeError("an exception of its own")


@pytest.mark.parametrize(
    "said, text, named",
    [
        (ValueError("no number"), "no number", "ValueError: no number"),
        (KeyError("answer"), "'answer'", "KeyError: 'answer'"),
        (ValueError("\n two\tlines\r\n of it\n"), "two lines of it", "ValueError: two lines of it"),
        (ValueError("\x1b[2J\x07gone\x9b"), "[2J gone", "ValueError: [2J gone"),
        (ValueError("right\u202eto left\u2028next"), "right to left next", "ValueError: right to left next"),
        (ValueError("half \ud800 a pair"), "half a pair", "ValueError: half a pair"),
        (ValueError("Übung 😀"), "Übung 😀", "ValueError: Übung 😀"),
        (TimeoutError(), "TimeoutError()", "TimeoutError"),
        (ValueError("\n"), "ValueError('\\n')", "ValueError"),
        (type("a\nb", (Exception,), {})("c"), "c", "a b: c"),
        (Unreadable(), "Unreadable, whose text can't be read", "Unreadable: Unreadable, whose text can't be read"),
        (Silent(), "Silent, whose text can't be read", "Silent"),
    ],
)
def test_an_exception_is_one_line(said, text, named):
    assert one_line(said) == text
    assert with_kind(said) == named


def test_a_text_is_one_line():
    assert one_line("http 500:\n\x1b[31mno") == "http 500: [31mno"
    assert one_line("") == ""


def test_a_line_has_a_longest_length():
    long = ValueError("x" * 10_000_000)
    assert len(one_line(long)) == len(with_kind(long)) == LONGEST
    assert one_line(long, 7) == "x" * 7
    assert one_line(ValueError("\n" * 20 + "after blanks"), 12) == "after blanks"


@pytest.mark.parametrize(
    "error, first",
    [
        (RuntimeError("the store is gone\nException raised from recv\n#0 0x7f"), "the store is gone"),
        (RuntimeError("\x1b[31mred"), "[31mred"),
        (RuntimeError("\n\n  the store is gone\nException raised from recv"), "the store is gone"),
        (ConnectionError(), "ConnectionError"),
        (Unreadable(), "Unreadable, whose text can't be read"),
    ],
)
def test_what_libraries_print_below_the_first_line_is_left_out(error, first):
    assert first_line(error) == first
