"""The dialogue model's documents: facts told, small talk, and questions about facts that may be gone."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from random import Random

import numpy as np
from document import ANSWER_LOSS, Document
from tokenizer import BOS, Tokenizer
from views import Cache, random_cache

from pykvgraph.demos import dialogue
from pykvgraph.demos.dialogue import DID_NOT_TELL, Fact, Kind

CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
HEARD_LOSS, TALK_LOSS = 0.02, 0.1  # of what the user says, and of answers that nothing depends on


def build_tokenizer() -> Tokenizer:
    kinds = [text for kind in dialogue.KINDS for text in (*kind.tellings, *kind.questions, kind.answer)]
    values = [text for kind in dialogue.KINDS for text in kind.values]
    talk = [*dialogue.SMALL_TALK, *dialogue.SMALL_TALK.values(), *dialogue.REMARKS, *dialogue.HEARD]
    said = [DID_NOT_TELL, *dialogue.SYSTEM, *dialogue.GOOD_TO_KNOW]
    parts = [*dialogue.PLACES, *dialogue.THINGS, *dialogue.LOOKS, *dialogue.DEEDS]
    text = re.sub(r"{\w+}", " ", " ".join(kinds + values + talk + said + parts))
    return Tokenizer(re.findall(r"[A-Za-z]+", text), roles=(SYSTEM, USER, ASSISTANT), space_prefix=False)


@dataclass
class Talk:
    """A dialogue as it grows: where facts were told, and which of its tokens a cache has discarded."""

    document: Document = field(default_factory=Document)
    told: dict[Kind, tuple[str, list[int]]] = field(default_factory=dict)  # value, numbers of turns
    asked: set[Kind] = field(default_factory=set)
    turns: list[tuple[int, int, bool]] = field(default_factory=list)  # tokens [begin, end), still there?

    def knows(self, kind: Kind) -> bool:
        return kind in self.told and any(self.turns[i][2] for i in self.told[kind][1])

    def fresh(self) -> list[Kind]:
        """What was told and not asked for."""
        return [kind for kind in self.told if kind not in self.asked]


class DialogueCorpus:
    """Dialogues drawn with `rng`, every one as long as its batches are together."""

    def __init__(self, tokenizer: Tokenizer, rng: np.random.Generator) -> None:
        self.tokenizer, self.rng = tokenizer, rng
        self.random = Random(int(rng.integers(2**63)))

    def step(self, n: int, sizes: list[int], reach: int) -> tuple[list[Document], list[Cache]]:
        """`n` dialogues decoded in batches of these sizes, and what a cache does to each meanwhile."""
        documents, caches = [], []
        for _ in range(n):
            document, drops = self.draw(sizes)
            documents.append(document)
            caches.append(random_cache(self.rng, sizes, np.array(document.filler), reach, drops))
        return documents, caches

    def draw(self, sizes: list[int]) -> tuple[Document, list[list[tuple[int, int]]]]:
        """A dialogue, and the ranges of its tokens that are discarded before each batch."""
        edges = np.cumsum(sizes).tolist()
        drops: list[list[tuple[int, int]]] = [[] for _ in sizes]
        talk = Talk()
        n_facts = self.random.randint(2, max(3, edges[-1] // 16))
        facts = [self._spelled(fact) for fact in dialogue.draw_facts(self.random, n_facts)]
        self._begin(talk, facts)
        n_prefix = len(talk.turns)
        batch = 0
        while len(talk.document) < edges[-1]:
            asked = self._exchange(talk, facts)
            while batch < len(sizes) - 1 and edges[batch] <= len(talk.document):
                drops[batch + 1] = self._discard(talk, n_prefix, edges[batch], asked)
                batch += 1
        return talk.document.cut(edges[-1]), drops

    def _spelled(self, fact: Fact) -> Fact:
        """One name in eight is made of syllables, so that a name is copied whatever its tokens are."""
        if fact.kind.values is not dialogue.NAMES or self.random.random() > 1 / 8:
            return fact
        n = self.random.randint(2, 3)
        name = "".join(self.random.choice(CONSONANTS) + self.random.choice(VOWELS) for _ in range(n))
        return Fact(fact.kind, (name + self.random.choice(("", *"nrlsx"))).capitalize())

    def _typed(self, text: str) -> str:
        """As people type: one text in ten lacks its last mark."""
        return text[:-1] if self.random.random() < 0.1 else text

    def _begin(self, talk: Talk, facts: list[Fact]) -> None:
        if self.random.random() < 0.9:
            talk.document.add([BOS], 0.0)
        if self.random.random() < 0.6:
            n = self.random.choice((0, 1, 2, 3))
            texts = [fact.told(self.random) for fact in facts[:n]]
            if n == 0 or self.random.random() < 0.5:
                texts.insert(0, self.random.choice(dialogue.SYSTEM))
            self._turn(talk, SYSTEM, " ".join(texts), 0.0, facts[:n])
            del facts[:n]

    def _turn(
        self, talk: Talk, role: str, text: str, loss: float, facts: list[Fact], filler: bool = False
    ) -> None:
        begin = len(talk.document)
        ids = self.tokenizer.turn(role, text)
        talk.document.add(ids[:1], 0.0, filler)
        talk.document.add(ids[1:], loss, filler)
        for fact in facts:
            talk.told.setdefault(fact.kind, (fact.value, []))[1].append(len(talk.turns))
        self._mark(talk.document, begin, facts)
        talk.turns.append((begin, len(talk.document), True))

    def _mark(self, document: Document, begin: int, facts: list[Fact]) -> list[range]:
        """Says at each value of a turn what it is the value of; returns where the values are."""
        places = []
        for fact in facts:
            ids = self.tokenizer.encode(f" {fact.value}")
            while document.ids[begin : begin + len(ids)] != ids:
                begin += 1
            document.subjects[begin] = dialogue.KINDS.index(fact.kind)
            places.append(range(begin, begin + len(ids)))
            begin += len(ids)
        return places

    def _exchange(self, talk: Talk, facts: list[Fact]) -> Kind | None:
        """What the user says and the answer; returns what was asked for."""
        kind = self.random.random()
        if facts and kind < (0.3 if talk.fresh() else 0.8):
            self._tell(talk, facts)
        elif kind > 0.88:
            said, answer = dialogue.small_talk(self.random)
            self._turn(talk, USER, self._typed(said), HEARD_LOSS, [], filler=True)
            self._turn(talk, ASSISTANT, answer, TALK_LOSS, [], filler=True)
        else:
            return self._ask(talk)
        return None

    def _tell(self, talk: Talk, facts: list[Fact]) -> None:
        n = self.random.choice((1, 1, 2, 3))
        told = [facts.pop() for _ in range(min(n, len(facts)))]
        texts = [fact.told(self.random) for fact in told]
        if self.random.random() < 0.1:
            texts.insert(0, self.random.choice(("Hello.", "Good morning.", dialogue.remark(self.random))))
        self._turn(talk, USER, self._typed(" ".join(texts)), HEARD_LOSS, told)
        self._turn(talk, ASSISTANT, self.random.choice(dialogue.GOOD_TO_KNOW), TALK_LOSS, [], filler=True)

    def _ask(self, talk: Talk) -> Kind:
        kinds = (self.random.random() < 0.6 and talk.fresh()) or list(talk.told)
        if kinds and self.random.random() < 0.75:
            kind = self.random.choice(kinds)
        else:
            kind = self.random.choice(dialogue.KINDS)
        talk.asked.add(kind)
        self._turn(talk, USER, self._typed(self.random.choice(kind.questions)), HEARD_LOSS, [])
        document, begin = talk.document, len(talk.document)
        facts = [Fact(kind, talk.told[kind][0])] if talk.knows(kind) else []
        self._turn(talk, ASSISTANT, facts[0].answer if facts else DID_NOT_TELL, TALK_LOSS, facts)
        # what tells whether the fact is there, and its value, count in full
        document.loss[begin + 1 : begin + 3] = [ANSWER_LOSS] * 2
        document.subjects[begin] = dialogue.KINDS.index(kind)
        for place in self._mark(document, begin, facts):
            document.loss[place.start : place.stop] = [ANSWER_LOSS] * len(place)
            document.subjects[place.start - 1] = dialogue.KINDS.index(kind)
        return kind

    def _discard(self, talk: Talk, n_prefix: int, edge: int, asked: Kind | None) -> list[tuple[int, int]]:
        """Turns that go when the first `edge` tokens are in the cache: often the oldest, sometimes any.

        What is asked for at that moment stays.
        """
        complete = [i for i, turn in enumerate(talk.turns) if i >= n_prefix and turn[1] <= edge and turn[2]]
        kept = set(talk.told[asked][1]) if asked in talk.told else set()
        how = self.random.random()
        if how < 0.5 or not complete:
            gone = []
        elif how < 0.85:
            gone = complete[: self.random.randint(1, len(complete))]
        else:
            gone = [i for i in complete if self.random.random() < 0.3]
        ranges = []
        for i in gone:
            if i not in kept:
                begin, end, _ = talk.turns[i]
                talk.turns[i] = begin, end, False
                ranges.append((begin, end))
        return ranges
