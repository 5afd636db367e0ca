"""Limits on thoughts beside llama-server: the same thoughts, cut off at the same token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.served import llama_server, served
from support.thought_marks import with_marks

import pykvgraph as kvg

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "<think>\n{% if enable_thinking is defined and not enable_thinking %}\n</think>{% endif %}{% endif %}"
)
ASKED = [{"role": "user", "content": "Tell me of Lily and her little dog."}]
BODIES: dict[str, dict[str, Any]] = {
    "no limit": {},
    "10 tokens": {"reasoning_budget_tokens": 10},
    "as Anthropic's clients name it": {"thinking_budget_tokens": 10},
    "with a message": {"reasoning_budget_tokens": 7, "reasoning_budget_message": " That is enough."},
    "3 tokens": {"reasoning_budget_tokens": 3},
    "more than there are": {"reasoning_budget_tokens": 1000},
    "drawn": {"reasoning_budget_tokens": 9, "temperature": 1.0, "seed": 5},
    "mirostat": {"reasoning_budget_tokens": 9, "temperature": 1.0, "seed": 8, "mirostat": 2},
    "with penalties": {"reasoning_budget_tokens": 9, "repeat_penalty": 1.3},
}


@pytest.fixture(scope="module")
def clients(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[httpx.Client]]:
    """llama-server's and ours, whose default is 12 tokens."""
    folder = tmp_path_factory.mktemp("thoughts")
    file = folder / "template.jinja"
    file.write_text(TEMPLATE)
    model = with_marks(stories, folder / "model.gguf")

    def load() -> kvg.Engine:
        return kvg.Engine(kvg.Model(model, "cpu"), n_ctx=512, n_seq_max=4)

    options = ["-c", "512", "-np", "1", "--jinja", "--chat-template-file", str(file)]
    options += ["--reasoning-budget", "12", "--reasoning-budget-message", " Stop."]
    settings = {"reasoning_budget": 12, "reasoning_budget_message": " Stop."}
    with (
        llama_server(model, *options) as rival,
        served(load, chat_template=TEMPLATE, **settings) as (ours, _),
        httpx.Client(base_url=rival, timeout=60) as theirs,
        httpx.Client(base_url=ours, timeout=60) as us,
    ):
        yield [theirs, us]


@pytest.mark.parametrize("name", BODIES)
def test_the_same_thoughts(clients: list[httpx.Client], name: str) -> None:
    body = {"messages": ASKED, "temperature": 0, "max_tokens": 40, **BODIES[name]}
    wanted, told = (client.post("/v1/chat/completions", json=body).json() for client in clients)
    message = told["choices"][0]["message"]
    other = wanted["choices"][0]["message"]
    # ours is without the space behind a mark
    assert message == {**other, "refusal": None, "content": other["content"].lstrip()}
    assert told["usage"]["completion_tokens"] == wanted["usage"]["completion_tokens"]
    is_cut = name != "more than there are"
    assert bool(message["content"]) == is_cut  # the mark ended them
    assert message["reasoning_content"]


def test_a_grammar_is_not_broken_off(clients: list[httpx.Client]) -> None:
    """Where it has no room for the mark, the thoughts are as long as it says."""
    fields = {"grammar": 'root ::= "a b c d e f </think>yes"', "reasoning_budget_tokens": 2}
    told = (
        clients[1].post("/v1/chat/completions", json={"messages": ASKED, "temperature": 0, **fields}).json()
    )
    message = told["choices"][0]["message"]
    assert (message["reasoning_content"].strip(), message["content"]) == ("a b c d e f", "yes")


def test_anthropic_names_its_budget(clients: list[httpx.Client]) -> None:
    thinking = {"type": "enabled", "budget_tokens": 5}
    body = {"messages": ASKED, "temperature": 0, "max_tokens": 40, "thinking": thinking}
    wanted, told = (client.post("/v1/messages", json=body).json() for client in clients)
    kinds = [block["type"] for block in told["content"]]
    assert kinds == ["thinking", "text"] == [block["type"] for block in wanted["content"]]
    for ours, theirs in zip(told["content"], wanted["content"], strict=True):
        kind = ours["type"]
        name = "thinking" if kind == "thinking" else "text"
        assert ours[name].strip() == theirs[name].strip()
