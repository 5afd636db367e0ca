"""Messages that templates refuse, and the forms of them that they take."""

from __future__ import annotations

from typing import Any

import pytest

from pykvgraph.chat.chat_template import ChatTemplate, MessagesRefusedError
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.server.requests.accepted_messages import rendered

SAYS = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
# as templates of published models refuse them
ONLY_FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
)
BY_TURNS = (
    "{% set own = messages[1:] if messages[0].role == 'system' else messages %}{% for m in own %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)


def said(*messages: tuple[str, str]) -> list[dict[str, Any]]:
    names = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": names[role], "content": content} for role, content in messages]


@pytest.mark.parametrize(
    ("rules", "messages", "wanted"),
    [
        ("", said(("u", "1"), ("s", "2"), ("s", "3"), ("u", "4")), "u:1|s:2|s:3|u:4|"),
        (ONLY_FIRST, said(("s", "1"), ("u", "2")), "s:1|u:2|"),
        (ONLY_FIRST, said(("s", "1"), ("s", "2"), ("u", "3")), "s:1\n\n2|u:3|"),
        (ONLY_FIRST, said(("u", "1"), ("s", "2"), ("u", "3")), "s:2|u:1|u:3|"),
        (ONLY_FIRST + BY_TURNS, said(("u", "1"), ("s", "2"), ("u", "3")), "s:2|u:1\n\n3|"),
        (BY_TURNS, said(("u", "1"), ("u", "2"), ("a", "3"), ("a", "4")), "u:1\n\n2|a:3\n\n4|"),
        (NO_SYSTEM, said(("s", "1"), ("u", "2"), ("a", "3")), "u:1\n\n2|a:3|"),
        (NO_SYSTEM, said(("s", "1")), "u:1|"),
        (NO_SYSTEM + BY_TURNS, said(("s", "1"), ("u", "2"), ("s", "3"), ("u", "4")), "u:1\n\n3\n\n2\n\n4|"),
        (NO_SYSTEM, said(("s", ""), ("u", "2")), "u:2|"),
    ],
)
def test_what_a_template_takes(rules: str, messages: list[dict[str, Any]], wanted: str) -> None:
    template = ChatTemplate(rules + SAYS)
    before = [dict(each) for each in messages]
    assert rendered(messages, template.render) == wanted
    assert messages == before


def test_calls_of_tools_stay_apart() -> None:
    """Two messages of the assistant are one only where both say nothing but text."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]}
    messages = [*said(("u", "1")), call, *said(("a", "2"))]
    with pytest.raises(MessagesRefusedError, match="roles must alternate"):
        rendered(messages, ChatTemplate(BY_TURNS + SAYS).render)


def test_the_first_refusal_is_told() -> None:
    """Of the messages as they came, not of what was made of them."""
    says = "{{ raise_exception(messages | length ~ ' are too many') }}"
    messages = said(("s", "1"), ("s", "2"), ("u", "3"))
    with pytest.raises(MessagesRefusedError, match="3 are too many"):
        rendered(messages, ChatTemplate(says).render)


def test_a_template_that_fails_is_asked_once() -> None:
    asked = []

    def render(messages: list[dict[str, Any]]) -> str:
        asked.append(messages)
        return ChatTemplate("{{ messages.none.at_all() }}").render(messages)

    with pytest.raises(InvalidArgumentError, match="failed"):
        rendered(said(("s", "1"), ("s", "2")), render)
    assert len(asked) == 1


# as Mistral's templates have it
NINE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "{{ c.id }} {% endfor %}{% if m.role == 'tool' %}={{ m.tool_call_id }} {% endif %}{% endfor %}"
)


@pytest.mark.parametrize("id", ["call_abcdefghi", "toolu_01Xy", "a-b_c.d", "", "é" * 5])
def test_ids_of_other_services(id: str) -> None:
    """A call and its result keep one id, which is the same in each turn."""
    call = {"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
    other = {**call, "id": "ABCdef123"}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "", "tool_calls": [call, other]},
        {"role": "tool", "tool_call_id": id, "content": "2"},
        {"role": "tool", "tool_call_id": "ABCdef123", "content": "3"},
    ]
    template = ChatTemplate(NINE, bos_token="", eos_token="")
    first, second, *results = rendered(messages, template.render).split()
    assert second == "ABCdef123" and results == [f"={first}", f"={second}"]
    assert len(first) == 9 and first.isascii() and first.isalnum()
    assert rendered(messages[:2], template.render).split() == [first, second]
