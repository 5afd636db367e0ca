"""Chat templates: llama.cpp's own collection, rendered as by llama.cpp's own engine; and the sandbox."""

from __future__ import annotations

import datetime
import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.chance import THOROUGH

from pykvgraph.chat import chat_template
from pykvgraph.chat.chat_template import ChatTemplate
from pykvgraph.errors import InvalidArgumentError

DATA = Path(__file__).parents[2] / "data" / "chat_templates.json.xz"
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
        ("{% set l = ['a', 'b', 'c'] %}{{ l.pop(0) }}{{ l.pop() }}{{ l }}", "ac['b']"),
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


DOUBLES = "{% for i in range(60) %}{% set ns.t = EXPRESSION %}{% endfor %}"
TOO_MUCH = {
    "ljust": "{{ 'a'.ljust(2000000000) }}",
    "rjust": "{{ 'a'.rjust(2000000000) }}",
    "center": "{{ 'a'.center(2000000000) }}",
    "zfill": "{{ '1'.zfill(2000000000) }}",
    "format": "{{ '{:2000000000}'.format(1) }}",
    "a given width": "{{ '{:{w}}'.format(1, w=2000000000) }}",
    "%": "{{ '%2000000000d' % 1 }}",
    "%*": "{{ '%*d' % (2000000000, 1) }}",
    "the filter format": "{{ '%2000000000d' | format(1) }}",
    "indent": "{{ 'a' | indent(2000000000, true) }}",
    "replace": "{{ ('a' * 9999).replace('a', 'b' * 9999) }}",
    "the filter replace": "{{ ('a' * 9999) | replace('a', 'b' * 9999) }}",
    "join": "{{ ('b' * 9999).join(range(99999) | map('string')) }}",
    "the filter join": "{{ range(99999) | join('b' * 9999) }}",
    "JSON": "{{ [1, [2]] | tojson(indent=2000000000) }}",
    "round": "{{ 1.5 | round(2000000000) }}",
    "~": "{% set ns = namespace(t='aaaaaaaa') %}" + DOUBLES.replace("EXPRESSION", "ns.t ~ ns.t"),
    "+": "{% set ns = namespace(t='aaaaaaaa') %}" + DOUBLES.replace("EXPRESSION", "ns.t + ns.t"),
    "lists": "{% set ns = namespace(t=[1]) %}" + DOUBLES.replace("EXPRESSION", "ns.t + ns.t"),
    "a block": "{% set ns = namespace(t='aa') %}{% for i in range(60) %}{% set ns.t %}{{ ns.t }}{{ ns.t }}"
    "{% endset %}{% endfor %}",
    "the text of lists": "{% set ns = namespace(t=[1]) %}"
    + DOUBLES.replace("EXPRESSION", "[ns.t, ns.t]")
    + "{{ ns.t }}",
    "lists that are compared": "{% set ns = namespace(t=[1]) %}"
    + DOUBLES.replace("EXPRESSION", "[ns.t, ns.t]")
    + "{% set first = ns.t %}{% set ns.t = [1] %}"
    + DOUBLES.replace("EXPRESSION", "[ns.t, ns.t]")
    + "{{ first == ns.t }}",
    "a list in itself": "{% set l = [] %}{{ l.append(l) or l }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops of nothing": "{% for a in range(99999) %}{% for b in range(99999) if false %}"
    "{% endfor %}{% endfor %}",
    "lists in loops": "{% for a in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "output": "{% for a in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "slices": "{% set x = 'a' * 9999 %}{% set x = x * 999 %}{% set l = [] %}"
    "{% for i in range(9999) %}{{ l.append(x[1:]) or '' }}{% endfor %}",
}


@pytest.mark.parametrize("source", TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_template_has_a_budget(source: str) -> None:
    """In a process of its own: without a budget it would take all of the memory, or hours."""
    script = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (20, 20))\n"
        "from pykvgraph.chat.chat_template import ChatTemplate\n"
        "from pykvgraph.errors import InvalidArgumentError\n"
        "try:\n    ChatTemplate(sys.argv[1]).render([])\n"
        "except InvalidArgumentError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, source], capture_output=True, text=True, check=False)
    assert "the chat template takes too much: it " in done.stdout, (done.returncode, done.stderr[-300:])


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a'.expandtabs(2000000000) }}",
        "{{ (1).to_bytes(2000000000, 'big') }}",
        "{{ 'a'.encode().ljust(2000000000) }}",
        "{{ lipsum(n=2000000000) }}",
        "{{ cycler(1, 2).next() }}",
        "{{ [1] | batch(2000000000, 0) | list }}",
        "{{ [1] | slice(2000000000) | list }}",
        "{{ 'a' | wordwrap(1, wrapstring='b' * 9999) }}",
        "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,
    ],
)
def test_what_no_template_needs(source: str) -> None:
    with pytest.raises(InvalidArgumentError, match="chat template"):
        render(source)


@pytest.mark.slow
def test_real_templates_take_a_thousand_messages() -> None:
    call = {
        "id": "call00001",
        "type": "function",
        "function": {"name": "test", "arguments": {"arg": "hello"}},
    }
    turn: list[dict[str, Any]] = [
        {"role": "user", "content": "Hello, how are you? " * 8},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "name": "test", "content": "it is done " * 10},
        {"role": "assistant", "content": "I am fine, thank you! " * 10},
    ]
    tools = RENDERED["conversations"]["tools"]["tools"] * 20
    n_rendered = 0
    sources = [*RENDERED["templates"].values()][:: 1 if THOROUGH else 8]
    for source in sources:
        template = ChatTemplate(source, bos_token="<s>", eos_token="</s>")
        for messages, given in (([turn[0], turn[3]] * 500, {}), (turn * 250, {"tools": tools})):
            try:
                n_rendered += bool(template.render(messages, **given))
            except InvalidArgumentError as error:
                assert "takes too much" not in str(error)
    assert n_rendered > 1.7 * len(sources)
