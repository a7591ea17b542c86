r"""What text can a caller, or Triton's log, be told? Text that is UTF-8 and holds no control characters: a NUL would end it.

printable('caf\udcff \x00')     # the text 'caf\\udcff \\x00'; line breaks and tabs stay
in_quotes("a\nb")               # the text 'a\\nb': for a caller's value inside a message
text_of(error)                  # the exception's text, also when it cannot be asked for it
"""

from __future__ import annotations

import re

# Lone surrogates cannot be encoded; the C1 controls of Unicode hide what follows on some terminals.
_STRANGE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with what cannot be told written as Python escapes."""
    return text if text.isprintable() else _STRANGE.sub(_escaped, text)


def in_quotes(text: str) -> str:
    """The same for a value that is quoted: line breaks and tabs are escaped too."""
    return text if text.isprintable() else _UNSEEN.sub(_escaped, text)


def text_of(error: BaseException) -> str:
    """What an exception says, as it can be told; one whose own text fails says so."""
    try:
        return printable(str(error))
    except Exception as second:  # noqa: BLE001  somebody's __str__; the request still gets an answer
        return f"(its text cannot be shown: {type(second).__name__})"


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()
