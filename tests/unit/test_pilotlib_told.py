from __future__ import annotations

import pytest

from pilotlib.told import in_quotes, printable, text_of


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("plain, é and 你", "plain, é and 你"),
        ("a\x00b", r"a\x00b"),
        ("caf\udcff", r"caf\udcff"),
        ("two\nlines\tand\ra return\x1b[0m", "two\nlines\tand\\ra return\\x1b[0m"),
        ("\x85 \x7f", r"\x85 \x7f"),
    ],
)
def test_what_cannot_be_told_is_escaped(text: str, told: str) -> None:
    assert printable(text) == told
    assert printable(text).encode().decode() == told


def test_inside_quotes_line_breaks_are_escaped_too() -> None:
    assert in_quotes("a\n\tb\u2028\x00é") == r"a\n\tb\u2028\x00é"


def test_an_exception_that_cannot_say_its_text_has_one() -> None:
    class MuteError(RuntimeError):
        def __str__(self) -> str:
            raise KeyError("no")

    assert text_of(MuteError()) == "(its text cannot be shown: KeyError)"
    assert text_of(RuntimeError("a\x00")) == r"a\x00"
