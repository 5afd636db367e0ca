"""The language of the dialogue model: what is told can be asked for, and small talk tells nothing."""

from __future__ import annotations

import re
from random import Random

import pytest

from pykvgraph.demos.dialogue import KINDS, draw_facts, small_talk
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.models import NAMES, embedded_model


def test_facts_are_of_different_kinds_and_have_their_value_in_them() -> None:
    for seed in range(50):
        rng = Random(seed)
        facts = draw_facts(rng, 5)
        assert len({fact.kind for fact in facts}) == 5
        for fact in facts:
            assert fact.value in fact.kind.values
            assert fact.value in fact.told(rng)
            assert fact.value in fact.answer


def test_a_seed_gives_the_same_texts() -> None:
    def drawn(seed: int) -> list[object]:
        rng = Random(seed)
        return [draw_facts(rng, 3), *(small_talk(rng) for _ in range(20))]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_no_question_or_telling_belongs_to_two_kinds() -> None:
    texts = [text for kind in KINDS for text in (*kind.tellings, *kind.questions)]
    assert len(texts) == len(set(texts))


def test_small_talk_tells_no_fact() -> None:
    tellings = [re.compile(telling.format(v=r"\w+")) for kind in KINDS for telling in kind.tellings]
    rng = Random(1)
    for _ in range(300):
        assert not any(telling.match(text) for text in small_talk(rng) for telling in tellings)


def test_embedded_models_go_by_name() -> None:
    assert [embedded_model(name).name for name in NAMES] == ["passkey.gguf", "dialogue.gguf"]
    assert embedded_model() == embedded_model("passkey")
    with pytest.raises(InvalidArgumentError, match="passkey, dialogue"):
        embedded_model("../passkey")
