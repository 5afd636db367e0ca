"""The dialogue model: what it is told in a chat it knows, as long as the cache has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.engines import run_of
from support.judge import judge

import pykvgraph as kvg
from pykvgraph.chat import Conversation, Discard
from pykvgraph.chat.chat_template import ChatTemplate
from pykvgraph.demos import recall
from pykvgraph.demos.dialogue import DID_NOT_TELL
from pykvgraph.models import NAMES, embedded_model

CHAT = [
    {"role": "system", "content": "You are a friendly assistant."},
    {"role": "user", "content": "My cat is called Tom. I live in Rome."},
    {"role": "assistant", "content": "Good to know."},
    {"role": "user", "content": "What is my cat called?"},
]
PROMPT = (
    "<s><|system|> You are a friendly assistant.</s><|user|> My cat is called Tom. I live in Rome.</s>"
    "<|assistant|> Good to know.</s><|user|> What is my cat called?</s><|assistant|>"
)


@pytest.fixture(scope="module")
def model() -> Iterator[kvg.Model]:
    with kvg.Model(embedded_model("dialogue"), device="cpu") as loaded:
        yield loaded


def template_of(model: kvg.Model) -> ChatTemplate:
    return ChatTemplate(model.metadata["tokenizer.chat_template"], bos_token="<s>", eos_token="</s>")


def answers(model: kvg.Model, messages: list[str], system: str = "", n_ctx: int = 512) -> list[str]:
    with kvg.Context(model, n_ctx=n_ctx) as ctx:
        talk = Conversation(ctx, system=system)
        return ["".join(p.text for p in talk.ask(text, recall.GREEDY)).strip() for text in messages]


def test_the_embedded_models_are_small() -> None:
    assert sum(embedded_model(name).stat().st_size for name in NAMES) <= 8e6


def test_the_template_writes_turns_and_refuses_other_roles(model: kvg.Model) -> None:
    assert template_of(model).render(CHAT) == PROMPT
    with pytest.raises(kvg.InvalidArgumentError, match="system, user and assistant"):
        template_of(model).render([{"role": "tool", "content": "4"}])


def test_a_turn_is_one_control_token_and_words(model: kvg.Model) -> None:
    pieces: list[Any] = model.metadata["tokenizer.ggml.tokens"]
    ids = model.tokenizer.encode("<|user|> My cat is called Tom.</s>", False, True)
    assert [pieces[i] for i in ids] == ["<|user|>", "▁My", "▁cat", "▁is", "▁called", "▁Tom", ".", "</s>"]


def test_logits_are_those_of_libllama(model: kvg.Model) -> None:
    ids = model.tokenizer.encode(PROMPT.removeprefix("<s>"), True, True)
    judge(embedded_model("dialogue"), lambda engine: engine.decode(run_of(ids)))


def test_it_knows_what_it_was_told_and_nothing_else(model: kvg.Model) -> None:
    told = ["Hello.", "My cat is called Tom. I live in Rome.", "My favourite colour is green."]
    asked = ["What is my cat called?", "Where do I live?", "What is my favourite colour?", "What is my name?"]
    assert answers(model, told + asked)[3:] == [
        "Your cat is called Tom.",
        "You live in Rome.",
        "Your favourite colour is green.",
        DID_NOT_TELL,
    ]


def test_it_knows_what_the_system_prompt_says(model: kvg.Model) -> None:
    asked = ["What is my job?", "What is my dog called?"]
    said = answers(model, asked, "You are a friendly assistant. I work as a baker.")
    assert said == ["You work as a baker.", DID_NOT_TELL]


def test_a_dialogue_longer_than_the_cache(model: kvg.Model) -> None:
    turns: list[recall.Said] = []
    discards: list[Discard] = []
    with kvg.Context(model, n_ctx=512) as ctx:
        played = recall.play(ctx, 5, 2, turns.append, discards.append)
    results = {each.place: each.result for each in played.recalls}
    assert results == {"kept prefix": "recalled", "window": "recalled", "given up": "denied"}
    assert played.n_tokens >= 2 * 512
    assert played.n_discards == len(discards) >= 2
    assert [(each.question, each.answer, each.place) for each in played.recalls] == [
        said[1:] for said in turns if said.why == "asked"
    ]


@pytest.mark.slow
def test_recall_by_place(model: kvg.Model) -> None:
    with kvg.Context(model, n_ctx=512) as ctx:
        counts = recall.totals(recall.play(ctx, seed) for seed in range(20))
    assert {place: count["asked"] for place, count in counts.items()} == dict.fromkeys(recall.PLACES, 20)
    assert counts["kept prefix"]["recalled"] >= 19
    assert counts["window"]["recalled"] >= 19
    assert counts["given up"]["recalled"] <= 1


def test_a_cache_too_small_is_refused(model: kvg.Model) -> None:
    with kvg.Context(model, n_ctx=256) as ctx, pytest.raises(kvg.InvalidArgumentError, match="384 cells"):
        recall.play(ctx, 1)


def test_the_seed_gives_the_dialogue(model: kvg.Model) -> None:
    with kvg.Context(model, n_ctx=512) as ctx:
        first, same, other = (recall.play(ctx, seed, 1) for seed in (1, 1, 2))
    assert first == same
    assert first != other
