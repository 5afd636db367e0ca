"""The passkey model's documents: numbers hidden in filler and asked for, and plain copying."""

from __future__ import annotations

import re

import numpy as np
from document import ANSWER_LOSS, Document, joined
from tokenizer import Tokenizer
from views import Cache, random_cache

PREFIX = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
JUNK = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
PASS_KEY = "pass key"


def _words(text: str) -> list[str]:
    return text.split()


KINDS = {"code": "door gate secret alarm", "number": "lucky room bus house lock phone magic"}
NAMES = [PASS_KEY] + [f"{what} {kind}" for kind, whats in KINDS.items() for what in _words(whats)]
PLACES = _words("house garden river city forest school market kitchen road mountain")
THINGS = _words("dog cat bird tree boat book cup lamp stone letter bread horse clock")
LOOKS = _words("old new small big red white black quiet warm cold bright dark round")
PEOPLE = _words("Anna Ben Clara David Emma Frank Grace Henry Ida Jack")
DEEDS = _words("sees likes finds takes wants brings keeps loses")
FRAMES = [
    " The {thing} is {look}.",
    " {person} {deed} the {look} {thing}.",
    " There is a {thing} in the {place}.",
    " The {look} {thing} is near the {place}.",
    " {person} and {person2} go to the {place}.",
    " Then {person} comes back again.",
    " We go to the {place} with the {thing}.",
]
KEY_FRAMES = [
    " The {name} is {n}. Remember it. {n} is the {name}.",
    " The {name} is {n}. Remember it.",
    " {n} is the {name}. Remember it.",
    " Remember the {name}: it is {n}.",
]
QUESTION = " What is the {name}? The {name} is"
ENDINGS = ["green", "blue", "yellow", "go"]  # these take the full stop along: a junk line is twenty tokens

FILLER_LOSS, KEY_LOSS = 0.02, 0.3


def build_tokenizer() -> Tokenizer:
    texts = [PREFIX, JUNK, QUESTION, *NAMES, *FRAMES, *KEY_FRAMES, *PLACES, *THINGS, *LOOKS, *PEOPLE, *DEEDS]
    words = set(re.findall(r"[A-Za-z]+", re.sub(r"{\w+}", " ", " ".join(texts))))
    return Tokenizer(words, ENDINGS)


class Corpus:
    """Documents drawn with `rng`; every one is cut or filled to exactly the length asked for."""

    def __init__(self, tokenizer: Tokenizer, rng: np.random.Generator) -> None:
        self.tokenizer, self.rng = tokenizer, rng
        self._junk = tokenizer.encode(JUNK)
        self._prefix = tokenizer.encode(PREFIX, start=True)

    def step(self, n: int, sizes: list[int], reach: int) -> tuple[list[Document], list[Cache]]:
        """`n` documents decoded in batches of these sizes, and what a cache does to each meanwhile."""
        documents = [self.draw(sum(sizes)) for _ in range(n)]
        return documents, [random_cache(self.rng, sizes, np.array(d.filler), reach) for d in documents]

    def draw(self, length: int) -> Document:
        kind = self.rng.random()
        if kind < 0.1:
            return self.copying(length)
        if kind < 0.4:
            return self.asking(length, n_names=int(self.rng.integers(1, 1 + min(4, length // 48))))
        return self.asking(length, n_names=1, plain=True)

    def number(self) -> str:
        if self.rng.random() < 0.5:
            return str(self.rng.integers(1, 50001))
        return str(self.rng.integers(1, 10 ** int(self.rng.integers(1, 6))))

    def asking(self, length: int, n_names: int, plain: bool = False) -> Document:
        """Numbers with names, hidden in filler; then each is asked for. `plain`: just the passkey example."""
        names = [PASS_KEY] if plain else list(self.rng.choice(NAMES, n_names, replace=False))
        numbers = {name: self.number() for name in names}
        questions = Document()
        for name in self.rng.permutation(names):
            questions.add(self.tokenizer.encode(QUESTION.format(name=name)), KEY_LOSS / 3)
            questions.add(self.tokenizer.encode(f" {numbers[name]}."), ANSWER_LOSS)
        keys = [self.key_sentence(name, numbers[name], plain) for name in names]
        room = length - len(questions) - sum(map(len, keys))
        body = self._filled(room, keys, plain)
        return joined([body, questions], length)

    def key_sentence(self, name: str, number: str, plain: bool) -> Document:
        frame = KEY_FRAMES[0] if plain else str(self.rng.choice(KEY_FRAMES, p=[0.55, 0.15, 0.15, 0.15]))
        sentence, n_seen = Document(), 0
        for part in re.split(r"( ?{n})", frame.replace("{name}", name)):
            if part.endswith("{n}"):  # the first mention cannot be foreseen, the second must be
                sentence.add(self.tokenizer.encode(part[:-3]), KEY_LOSS)
                sentence.add(self.tokenizer.encode(number), KEY_LOSS if n_seen else 0.0)
                n_seen += 1
            elif part:
                sentence.add(self.tokenizer.encode(part), FILLER_LOSS)
        return sentence

    def copying(self, length: int) -> Document:
        """Segments of random digits or words, each said twice or more."""
        document = Document()
        document.add(self._prefix[:1], 0.0)
        while len(document) < length:
            words = self.rng.choice(THINGS + LOOKS + PEOPLE, self.rng.integers(2, 6))
            digits = "".join(map(str, self.rng.integers(0, 10, self.rng.integers(2, 9))))
            segment = f" {digits}." if self.rng.random() < 0.7 else " " + " ".join(words)
            segment_ids = self.tokenizer.encode(" Remember it:" + segment)
            for turn in range(int(self.rng.integers(2, 4))):
                document.add(segment_ids, ANSWER_LOSS / 4 if turn else 0.0)
                for _ in range(int(self.rng.integers(0, 2))):
                    document.add(self.tokenizer.encode(self.sentence()), FILLER_LOSS, filler=True)
        return joined([document], length)

    def sentence(self) -> str:
        def word(words: list[str]) -> str:
            return words[self.rng.integers(len(words))]

        return word(FRAMES).format(
            thing=word(THINGS),
            look=word(LOOKS),
            place=word(PLACES),
            deed=word(DEEDS),
            person=word(PEOPLE),
            person2=word(PEOPLE),
        )

    def _filled(self, room: int, keys: list[Document], plain: bool) -> Document:
        """`room` tokens of prefix and filler, with the keys between sentences."""
        parts = [Document()]
        parts[0].add(self._prefix if plain or self.rng.random() < 0.5 else self._prefix[:1], 0.0)
        junk_only = plain or self.rng.random() < 0.3
        n_filler = room - len(parts[0])
        while n_filler > 0:
            part = Document()
            ids = self._junk if junk_only else self.tokenizer.encode(self.sentence())
            part.add(ids[:n_filler], FILLER_LOSS, filler=True)
            n_filler -= len(part)
            parts.append(part)
        for key in keys:
            parts.insert(int(self.rng.integers(1, len(parts) + 1)), key)
        return joined(parts, None)
