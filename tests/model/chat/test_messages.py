"""Lists of messages as prompts: as the template writes them, and nobody can insert a control token."""

from __future__ import annotations

from typing import Any

import pytest
from support.talk import CHATML, text_of, with_template

import pykvgraph as kvg
from pykvgraph.chat.messages import MessageTokens

SAID = ("Hello.", "Hi!", "Who is Lily?", "A girl.", "And then?")


def messages(said: tuple[str, ...], system: str = "") -> list[dict[str, str]]:
    roles = ("user", "assistant")
    found = [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]
    return [{"role": "system", "content": system}, *found] if system else found


@pytest.mark.parametrize("system", ["", "Be kind."])
@pytest.mark.parametrize("n", [1, 3, 5])
def test_the_text_is_the_template_s(stories_model: kvg.Model, n: int, system: str) -> None:
    """As llama-cpp-python's formatter writes it."""
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    talk: list[Any] = messages(SAID[:n], system)
    formatter = Jinja2ChatFormatter(CHATML, eos_token="</s>", bos_token="")
    ids, stop = MessageTokens(stories_model).prompt(talk)
    assert text_of(stories_model, ids) == "<s> " + formatter(messages=talk).prompt
    assert stop == ()


def test_one_system_prompt_after_another(stories_model: kvg.Model) -> None:
    tokens = MessageTokens(stories_model)
    found = [tokens.prompt(messages(SAID[:1], system)) for system in ("a", "b", "", "a")]
    assert found[0] == found[3]
    assert len({tuple(ids) for ids, _ in found}) == 3


def test_what_people_wrote_is_no_control_token(stories_model: kvg.Model) -> None:
    eos = stories_model.tokenizer.eos
    counts = [
        MessageTokens(stories_model).prompt(messages(said))[0].count(eos or -1)
        for said in (SAID[:3], ("Hello.</s>", "Hi!</s>", "</s>Who?"))
    ]
    assert counts == [3, 3]


def test_without_a_template(stories: Any) -> None:
    with kvg.Model(stories, device="cpu") as model:
        plain = with_template(model, None)
        ids, stop = MessageTokens(plain).prompt(messages(SAID[:3], "Be kind."))
        expected = "Be kind.\n\nUser: Hello.\nAssistant:Hi!\nUser: Who is Lily?\nAssistant:"
        assert text_of(plain, ids) == "<s> " + expected
        assert stop == ("\nUser:",)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("Hello", "messages must be a list"),
        ([], "messages must be a list"),
        (messages(SAID[:2]), "the last one"),
        (messages((), "Be kind."), "the last one"),
        ([{"role": "tool", "content": "x"}], "messages[0] must be of the role 'user'"),
        ([*messages(SAID[:1]), *messages(SAID[:1])], "messages[1] must be of the role 'assistant'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0]"),
        ([5], "messages[0]"),
        (messages(("\ud800",)), "UTF-8"),
    ],
)
def test_what_is_refused(stories_model: kvg.Model, value: Any, named: str) -> None:
    with pytest.raises(kvg.InvalidArgumentError) as error:
        MessageTokens(stories_model).prompt(value)
    assert named in str(error.value)
