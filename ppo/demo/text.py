"""Short reviews: a person's first impression, written by a grammar over hand-written pieces."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ppo.demo.fragments import CLOSINGS, KINDS, OPENINGS, VERDICTS, Moods

Mood = Literal["positive", "negative", "neutral"]
MOODS: tuple[Mood, ...] = ("positive", "negative", "neutral")
# The negative pieces are a little milder under VADER; these weights bring its mean to about 0.
MOOD_WEIGHTS = (0.33, 0.37, 0.30)
FOLLOWS_MOOD = 0.5


@dataclass(frozen=True)
class Prompt:
    """The opening of a review; `kind` is what it is about."""

    kind: str
    text: str


@dataclass(frozen=True)
class Review:
    """A prompt and its continuation, which starts with a space."""

    prompt: str
    response: str


@dataclass(frozen=True)
class Preference:
    """Two continuations of one prompt, the better one first."""

    prompt: str
    chosen: str
    rejected: str


def all_prompts() -> list[Prompt]:
    """List every prompt of the grammar in a fixed order."""
    return [
        Prompt(name, opening.format(topic=topic, circumstance=circumstance, verb=KINDS[name].verb))
        for name in KINDS
        for topic in KINDS[name].topics
        for circumstance in KINDS[name].circumstances
        for opening in OPENINGS
    ]


def split_prompts(heldout: int, seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Shuffle the prompts and keep `heldout` of them apart: returns (training, held out)."""
    prompts = all_prompts()
    random.Random(seed).shuffle(prompts)
    return prompts[heldout:], prompts[:heldout]


def write_response(kind: str, rng: random.Random) -> str:
    """Write one continuation: a verdict, then at will a word on a part, an event and closings.

    Each clause follows the mood of the review with probability one half and is otherwise drawn
    anew, so mixed reviews are common.
    """
    mood = _draw_mood(rng)
    own = KINDS[kind]
    first = _clause_mood(mood, rng)
    sentence = _pick(own.verdicts if rng.random() < 0.6 else VERDICTS, first, rng)
    if rng.random() < 0.5:
        second = _clause_mood(mood, rng)
        joint = "but" if {first, second} == {"positive", "negative"} else "and"
        sentence += f", {joint} {rng.choice(own.parts)} {_pick(VERDICTS, second, rng)}"
    sentences = [f"{sentence}."]
    if rng.random() < 0.5:
        sentences.append(_pick(own.events, _clause_mood(mood, rng), rng))
    for _ in range(rng.choices((0, 1, 2), (0.2, 0.4, 0.4))[0]):
        closing = _pick(CLOSINGS, _clause_mood(mood, rng), rng)
        if closing not in sentences:
            sentences.append(closing)
    return " " + " ".join(sentences)


def write_reviews(prompts: list[Prompt], count: int, seed: str) -> list[Review]:
    """Write `count` reviews for prompts drawn at random."""
    rng = random.Random(seed)
    drawn = (rng.choice(prompts) for _ in range(count))
    return [Review(prompt.text, write_response(prompt.kind, rng)) for prompt in drawn]


def write_preferences(
    prompts: list[Prompt],
    count: int,
    seed: str,
    judge: Callable[[Sequence[str], Sequence[str]], Sequence[float]],
    margin: float = 0.05,
) -> list[Preference]:
    """Write `count` pairs of responses to one prompt, ordered by `judge`; near-ties are dropped."""
    rng = random.Random(seed)
    pairs: list[Preference] = []
    while len(pairs) < count:
        prompt = rng.choice(prompts)
        responses = [write_response(prompt.kind, rng) for _ in range(2)]
        scores = judge([prompt.text] * 2, responses)
        if abs(scores[0] - scores[1]) >= margin:
            better = 0 if scores[0] > scores[1] else 1
            pairs.append(Preference(prompt.text, responses[better], responses[1 - better]))
    return pairs


def _draw_mood(rng: random.Random) -> Mood:
    return rng.choices(MOODS, MOOD_WEIGHTS)[0]


def _clause_mood(mood: Mood, rng: random.Random) -> Mood:
    return mood if rng.random() < FOLLOWS_MOOD else _draw_mood(rng)


def _pick(moods: Moods, mood: Mood, rng: random.Random) -> str:
    pieces: tuple[str, ...] = getattr(moods, mood)
    return rng.choice(pieces)
