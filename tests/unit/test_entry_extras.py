"""What an extra sees of a request, and what its faults change: nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tritonpilot.entry.extras import Answer, Asked, Content, Extra, Extras, Waiting
from tritonpilot.entry.terms import ModelTerms, terms_of

TERMS = terms_of({"name": "m", "parameters": {"pilot_classes": {"string_value": "fast:1,slow:2"}}})


class Recording(Extra):
    """Wants what it is told to, and remembers."""

    def __init__(
        self, *, answer: Answer | Waiting | None = None, target: str = "m", wanted: tuple[str, ...] = ("m",)
    ) -> None:
        self.answer, self.wanted, self._target = answer, wanted, target
        self.ended: list[tuple[Answer | None, bool]] = []
        self.seen = 0

    def wants(self, terms: ModelTerms) -> bool:
        return terms.name in self.wanted

    def before(self, _: Asked) -> Answer | Waiting | None:
        self.seen += 1
        return self.answer

    def target(self, _: Asked) -> str:
        return self._target

    def after(self, _: Asked, answer: Answer | None, ok: bool) -> None:
        self.ended.append((answer, ok))


class Broken(Recording):
    """Fails at everything."""

    def before(self, *_: object) -> Answer | Waiting | None:
        raise ZeroDivisionError

    target = after = before  # type: ignore[assignment]


def asked_of(*extras: Extra, read: Callable[[], Content | None] = lambda: Content(b"{}"), say=print) -> Asked:
    them = Extras(extras, say)
    them.told(TERMS)
    mine = them.of("m")
    assert mine is not None
    return Asked(them, mine, TERMS, "", "", "slow", "http", "7", read)


def test_extras_are_found_by_the_models_that_they_want():
    first, second = Recording(), Recording(wanted=())
    them = Extras([first, second])
    assert them.of("m") is None
    them.told(TERMS)
    assert them.of("m") == (first,)
    second.wanted = ("m",)
    them.look()
    assert them.of("m") == (first, second)
    them.gone("m")
    assert them.of("m") is None


def test_first_answer_is_taken_and_those_behind_are_not_asked():
    silent, answering, behind = Recording(), Recording(answer=Answer(b"a")), Recording()
    assert asked_of(silent, answering, behind).before() == Answer(b"a")
    assert (silent.seen, answering.seen, behind.seen) == (1, 1, 0)


def test_after_a_wait_the_extras_behind_are_asked():
    waiting, behind = Recording(answer=Waiting()), Recording()
    asked = asked_of(waiting, behind)
    assert asked.before() is waiting.answer
    assert asked.before() is None
    assert (waiting.seen, behind.seen) == (1, 1)


def test_a_wait_is_told_once():
    told: list[Answer | None] = []
    waiting = Waiting()
    waiting.tell(None)  # nobody waits: nothing happens
    waiting.then = told.append
    waiting.tell(Answer(b"a"))
    waiting.tell(None)
    assert told == [Answer(b"a")]


def test_first_other_target_is_taken():
    asked = asked_of(Recording(), Recording(target="m__next"), Recording(target="x"))
    assert asked.choose_target() == asked.target == "m__next"
    assert asked.model == "m"


def test_the_end_is_told_once():
    extra = Recording()
    asked = asked_of(extra)
    asked.end(Answer(b"a"), True)
    asked.end(None, False)
    assert extra.ended == [(Answer(b"a"), True)]


def test_content_is_read_once_and_only_before_the_request_is_sent():
    reads: list[int] = []

    def read() -> Content:
        reads.append(1)
        return Content(b"text", b"tail")

    asked = asked_of(Recording(), read=read)
    assert asked.content() == asked.content() == Content(b"text", b"tail")
    asked.choose_target()
    assert asked.content() == Content(b"text", b"tail")
    assert reads == [1]
    late = asked_of(Recording(), read=read)
    late.choose_target()
    assert late.content() is None
    assert late.digest() == b""


def test_digest_tells_contents_apart():
    contents = [Content(b"ab", b"c"), Content(b"a", b"bc"), Content(b"abc"), Content(b"ab", b"d")]
    digests = {asked_of(Recording(), read=lambda content=content: content).digest() for content in contents}
    assert len(digests) == 4
    assert {len(digest) for digest in digests} == {16}
    assert asked_of(Recording(), read=lambda: None).digest() == b""


def test_an_extra_that_fails_changes_nothing_and_is_said_once():
    said: list[str] = []
    behind = Recording(target="m__next")
    asked = asked_of(Broken(), behind, say=said.append)
    assert asked.before() is None
    assert asked.choose_target() == "m__next"
    asked.end(None, False)
    assert behind.ended == [(None, False)]
    assert len(said) == 1
    assert "Broken" in said[0]


@pytest.mark.parametrize(("class_name", "level"), [("fast", 1), ("slow", 2), ("", 0)])
def test_level_is_that_of_the_class(class_name, level):
    them = Extras([Recording()])
    assert Asked(them, (), TERMS, "", "", class_name, "grpc", "", lambda: None).level == level
