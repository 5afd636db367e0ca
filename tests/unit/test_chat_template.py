"""Chat templates: llama.cpp's own collection, rendered as by llama.cpp's own engine; and the sandbox."""

from __future__ import annotations

import datetime
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from pykvgraph.errors import InvalidArgumentError
from pykvgraph.text import chat_template
from pykvgraph.text.chat_template import ChatTemplate

DATA = Path(__file__).parents[1] / "data" / "chat_templates.json.xz"
RENDERED: dict[str, Any] = json.loads(lzma.decompress(DATA.read_bytes()))


@pytest.mark.parametrize("conversation", RENDERED["conversations"])
@pytest.mark.parametrize("name", RENDERED["templates"])
def test_rendered_as_by_llama_cpp(name: str, conversation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its engine refuses, so does ours."""
    day = datetime.date.fromisoformat(RENDERED["rendered_on"])
    monkeypatch.setattr(chat_template, "_strftime_now", day.strftime)
    given = dict(RENDERED["conversations"][conversation])
    tokens = {token: given.pop(token) for token in ("bos_token", "eos_token")}
    template = ChatTemplate(RENDERED["templates"][name], **tokens)
    expected = RENDERED["expected"][name][conversation]
    if expected is None:
        with pytest.raises(InvalidArgumentError, match="chat template"):
            template.render(**given)
    else:
        assert template.render(**given) == expected


def test_the_collection_is_large() -> None:
    assert len(RENDERED["templates"]) >= 60
    answers = [text for texts in RENDERED["expected"].values() for text in texts.values()]
    assert sum(text is not None for text in answers) >= 0.95 * len(answers)


def render(source: str, **given: Any) -> str:
    return ChatTemplate(source, bos_token="<s>").render(given.pop("messages", []), **given)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{% if add_generation_prompt %}A{% endif %}", "<s>A"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ('{{ {"a": "<é>", "b": [1, true]} | tojson }}', '{"a": "<é>", "b": [1, true]}'),
        ("{{ tools | map(attribute='n') | tojson }}", "[1, 2]"),
        ("{{ 'a' + missing.what + 'b' }}{{ missing }}", "ab"),
        ("{{ 'a' + 1 }}{{ 1 + 1 }}", "a12"),
        ("{% set l = [] %}{{ l.append('x') or l[0] }}", "x"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ '<b>' | safe + '&' }}", "<b>&"),
    ],
)
def test_what_templates_rely_on(source: str, expected: str) -> None:
    assert render(source, tools=[{"n": 1}, {"n": 2}]) == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.clear() }}",
        "{{ messages[0].update({'content': 'changed'}) }}",
        "{% for i in range(1000000000) %}{% endfor %}",
        "{{ 'a' * 10000000000 }}",
        "{{ 9 ** 9999999999 }}",
        "{{ 'a' * 9999 * 9999 * 9999 }}",
        "{{ '%s' | format(nothing.at.all()) }}",
        "{{ 'a' * 2 + raise_exception('no') }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_the_sandbox(source: str) -> None:
    messages = [{"content": "as it was"}]
    with pytest.raises(InvalidArgumentError, match="chat template"):
        ChatTemplate(source).render(messages)
    assert messages == [{"content": "as it was"}]


def test_what_is_given_stays_as_it_is() -> None:
    messages = [{"content": ["a"]}]
    assert (
        ChatTemplate("{{ messages[0].content.append('b') or messages[0].content | length }}").render(messages)
        == "2"
    )
    assert messages == [{"content": ["a"]}]


@pytest.mark.parametrize("source", ["{% if %}", "{{", "{% for %}", "{% unknown %}", "{{ 'a' | nofilter }}"])
def test_no_template(source: str) -> None:
    with pytest.raises(InvalidArgumentError, match="can't be read"):
        ChatTemplate(source)


def test_a_refusal_is_told_in_the_template_s_words() -> None:
    with pytest.raises(InvalidArgumentError, match="refuses the messages: no system role"):
        render("{{ raise_exception('no system role') }}")
