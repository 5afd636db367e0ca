"""--prepare-turns: where a template drops thoughts, the next turn decodes its own tokens only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import chance
from support.served import served
from support.thought_marks import with_marks

import pykvgraph as kvg
from pykvgraph.server.run import Server

N_TURNS = 20 if chance.THOROUGH else 4
SAYS = (
    "{{% for m in messages %}}<|{{{{ m.role }}}}|>{thoughts}{{{{ m.content.split('</think>')[-1] }}}}</s>"
    "{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|assistant|><think>\n{{% endif %}}"
)
DROPS = SAYS.format(thoughts="")
# as Qwen 3: thoughts stay behind the last words of a user
KEEPS_LAST = (
    "{% set ns = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.user = loop.index0 %}{% endif %}{% endfor %}"
) + SAYS.format(
    thoughts="{% if m.reasoning_content and loop.index0 > ns.user %}<think>\n{{ m.reasoning_content }}"
    "\n</think>\n\n{% endif %}"
)
KEEPS = SAYS.format(
    thoughts="{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}</think>{% endif %}"
)
BODY: dict[str, Any] = {"temperature": 0, "reasoning_budget_tokens": 12, "max_tokens": 40}
WORDS = ("Tell me of Lily.", "And her dog?", "Why was he sad?", "What did they play?")


@contextmanager
def serving(model: Path, template: str, **settings: Any) -> Iterator[tuple[httpx.Client, Server]]:
    def load() -> kvg.Engine:
        options: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "n_threads": 1, "n_threads_batch": 1}
        return kvg.Engine(kvg.Model(model, "cpu"), n_ctx=2048, n_seq_max=2, overcommit=True, **options)

    with (
        served(load, chat_template=template, n_slots=2, **settings) as (url, server),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client, server


@pytest.fixture(scope="module")
def thinking(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_marks(stories, tmp_path_factory.mktemp("thoughts") / "model.gguf")


def settle(server: Server) -> int:
    """Waits until nothing is left to do; the tokens that were decoded while nobody waited."""
    engine = server.service.engine
    time.sleep(0.2)  # for a thread with the template
    while not engine._loop.stepper.is_idle:
        time.sleep(0.01)
    return engine.stats().prepared_tokens


class Talk:
    """A client that sends answers back, with their thoughts or without."""

    def __init__(self, client: httpx.Client, *, returns: bool = False, **body: Any) -> None:
        self._client, self._returns, self._body = client, returns, BODY | body
        self.messages: list[dict[str, Any]] = []
        self.n_old: list[int] = []  # tokens up to the last answer's end that were decoded, of each turn

    def say(self, words: str) -> dict[str, Any]:
        n_old = self._n_tokens() if self.messages else 0
        self.messages.append({"role": "user", "content": words})
        told = self._client.post(
            "/v1/chat/completions", json={**self._body, "messages": self.messages}
        ).json()
        said: dict[str, Any] = told["choices"][0]["message"]
        message = dict(said)
        self.n_old.append(max(n_old - told["usage"]["prompt_tokens_details"]["cached_tokens"], 0))
        if not self._returns:
            message.pop("reasoning_content", None)
        self.messages.append(message)
        return said

    def _n_tokens(self) -> int:
        """Of what the next prompt begins with, by two that differ in the user's words."""
        texts = []
        for words in ("first", "Second"):
            messages = [*self.messages, {"role": "user", "content": words}]
            told = self._client.post("/apply-template", json={"messages": messages}).json()
            body = {"content": told["prompt"].partition(f"<|user|>{words}")[0], "add_special": True}
            texts.append(self._client.post("/tokenize", json=body | {"parse_special": True}).json()["tokens"])
        assert texts[0] == texts[1]
        return len(texts[0])


@pytest.mark.parametrize("template", [DROPS, KEEPS_LAST])
def test_old_tokens_are_not_decoded_while_a_user_waits(thinking: Path, template: str) -> None:
    with (
        serving(thinking, template) as (client, server),
        serving(thinking, template, prepares_turns=False) as (plain, other),
    ):
        ours, others = Talk(client), Talk(plain)
        for turn in range(N_TURNS):
            words = WORDS[turn % 4]
            told = ours.say(words)
            assert told == others.say(words)
            assert "reasoning_content" in told
            n_prepared, n_without = settle(server), settle(other)
        assert ours.n_old == [0] * N_TURNS
        assert min(others.n_old[1:]) > 10
        assert n_without == 0
        assert n_prepared >= sum(others.n_old)


def test_a_client_that_sends_thoughts_back(thinking: Path) -> None:
    """The template keeps them then: once it is seen that they come back, they are prepared with the rest."""
    with serving(thinking, KEEPS) as (client, server):
        talk = Talk(client, returns=True)
        for words in WORDS:
            talk.say(words)
            settle(server)
        assert all("reasoning_content" in each for each in talk.messages[1::2])
        assert talk.n_old[1] > 0
        assert talk.n_old[2:] == [0, 0]


@pytest.mark.parametrize(
    ("body", "settings"),
    [
        ({"cache_prompt": False}, {}),
        ({"n": 2}, {}),
        ({"reasoning_budget_tokens": 0, "chat_template_kwargs": {"enable_thinking": False}}, {}),
        ({"max_tokens": 5}, {}),  # amid its thoughts
        ({}, {"prepares_turns": False}),
    ],
    ids=["not cached", "several answers", "no thoughts", "no answer", "option"],
)
def test_where_nothing_is_prepared(thinking: Path, body: dict[str, Any], settings: dict[str, Any]) -> None:
    template = DROPS.replace("<think>\n", "{% if enable_thinking %}<think>\n{% endif %}")
    with serving(thinking, template, **settings) as (client, server):
        Talk(client, **body).say(WORDS[0])
        assert settle(server) == 0


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("streams", [False, True])
def test_every_interface(thinking: Path, path: str, streams: bool) -> None:
    with serving(thinking, DROPS) as (client, server):
        body: dict[str, Any] = {
            "temperature": 0,
            "stream": streams,
            "max_tokens": 40,
            "max_output_tokens": 40,
        }
        body |= {"thinking": {"type": "enabled", "budget_tokens": 12}, "reasoning_budget_tokens": 12}
        words = [{"role": "user", "content": WORDS[0]}]
        body |= {"input": words} if path.endswith("responses") else {"messages": words}
        assert client.post(path, json=body).status_code == 200
        assert settle(server) > 10
