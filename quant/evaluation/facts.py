"""Long texts with facts to be found again, made from a seed without any data.

Sentences of a small grammar fill the text. At its start and in its middle stands a group of facts,
`The pass code of Maria is 48213.`, and each one's question is the sentence up to its number. A
model without any training on questions answers that by looking its context up, and has to tell
the facts of a text apart.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

from llmbuild.errors import RequestError

Place = Literal["start", "middle"]
Encode = Callable[[str], list[int]]

PLACES: tuple[Place, ...] = ("start", "middle")
FACTS_TOGETHER = 5  # in each place of a text
_DIGITS = 5


def _words(text: str) -> list[str]:
    return text.split()


_NAMES = _words(
    "Alice Anton Bella Boris Carlos Clara David Diana Edgar Elena Fiona Frank Greta Gustav Hannah "
    "Henry Irene Ivan Jacob Julia Karen Kevin Laura Louis Maria Martin Nadia Nora Olga Oscar Paula "
    "Peter Quentin Rosa Ruth Simon Stefan Teresa Tina Ursula Victor Wendy Xavier Yvonne Zoe"
)
_PEOPLE = _words("teacher farmer painter sailor doctor baker writer singer gardener traveller")
_VERBS = _words("visited remembered described painted crossed admired avoided studied passed left")
_ADJECTIVES = _words("old quiet small busy green narrow bright distant famous empty")
_PLACES = _words(
    "garden river market library bridge harbour forest village museum station bakery castle "
    "orchard theatre school"
)
_TIMES = (
    "In the morning",
    "Last winter",
    "After the rain",
    "Every Sunday",
    "On the way home",
    "Years later",
    "Before dinner",
    "At noon",
    "During the summer",
    "Late at night",
)
_SENTENCES = (
    " {time} the {person} {verb} the {adjective} {place}.",
    " The {person} {verb} the {place} near the {adjective} {place2}.",
    " {time}, a {adjective} {place} was {verb} by the {person}.",
)


@dataclass(frozen=True, slots=True)
class Question:
    """A fact to be completed: its sentence's tokens up to the number, and the number's."""

    place: Place
    stem: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class FactText:
    """Tokens of a text, and the questions that may follow it."""

    tokens: list[int]
    questions: list[Question]


def make_text(encode: Encode, context: int, seed: str, bos: list[int]) -> FactText:
    """A text that with any one of its questions and the answer has at most `context` tokens, and
    less than a sentence fewer. bos: what it starts with. Raises RequestError when its facts don't
    fit that."""
    rng = Random(seed)
    names = rng.sample(_NAMES, 2 * FACTS_TOGETHER)
    places = [place for place in PLACES for _ in range(FACTS_TOGETHER)]
    questions = [
        Question(place, encode(f" The pass code of {name} is"), encode(f" {_number(rng)}"))
        for place, name in zip(places, names, strict=True)
    ]
    end = encode(".")
    facts = {
        place: [t for q in questions if q.place == place for t in (*q.stem, *q.answer, *end)]
        for place in PLACES
    }
    asked = max(len(question.stem) + len(question.answer) for question in questions)
    needed = len(bos) + len(facts["start"]) + len(facts["middle"]) + asked
    if context < needed:
        raise RequestError(
            f"a context of {context} tokens is too short: its facts and a question take {needed}"
        )
    room = context - needed
    before = _filler(encode, rng, room // 2)
    after = _filler(encode, rng, room - len(before))
    return FactText([*bos, *facts["start"], *before, *facts["middle"], *after], questions)


def _number(rng: Random) -> int:
    return rng.randrange(10 ** (_DIGITS - 1), 10**_DIGITS)


def _filler(encode: Encode, rng: Random, room: int) -> list[int]:
    """As many whole sentences as have room, in tokens."""
    tokens: list[int] = []
    while True:
        sentence = encode(_sentence(rng))
        if len(tokens) + len(sentence) > room:
            return tokens
        tokens += sentence


def _sentence(rng: Random) -> str:
    place, place2 = rng.sample(_PLACES, 2)
    return rng.choice(_SENTENCES).format(
        time=rng.choice(_TIMES),
        person=rng.choice(_PEOPLE),
        verb=rng.choice(_VERBS),
        adjective=rng.choice(_ADJECTIVES),
        place=place,
        place2=place2,
    )
