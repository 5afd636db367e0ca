from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.clients import asked
from support.served import N_SLOTS, served

import pykvgraph as kvg

STORIES = Path(__file__).parents[2] / "data" / "stories260K.gguf"


# calls as Hermes writes them, behind thoughts
TEMPLATE = """
{%- for tool in tools or [] %}{{ tool.function.name }}/{{ tool.function | length }} {% endfor %}
{%- for message in messages %}<|{{ message.role }}|>
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}</s>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>{% endif %}{% endif %}"""


def load() -> kvg.Engine:
    """As `pykvgraph serve -c 2048 -np 4` does."""
    return kvg.Engine(kvg.Model(STORIES, device="cpu"), n_ctx=2048, n_seq_max=N_SLOTS, overcommit=True)


@pytest.fixture(scope="package")
def address() -> Iterator[str]:
    """A server of stories260K."""
    with served(load, model_path=str(STORIES), n_ctx_slot=512, metrics=True, max_body=1 << 16) as (url, _):
        yield url


@pytest.fixture
def client(address: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=address, timeout=30) as client:
        yield client


@pytest.fixture(scope="package")
def thinker() -> Iterator[str]:
    """The address of a server whose template has thoughts and calls of tools."""
    with served(load, n_ctx_slot=512, chat_template=TEMPLATE) as (url, _):
        yield url


@pytest.fixture(scope="package")
def guarded() -> Iterator[str]:
    """The address of a server that wants a key, has embeddings, and thinks where it is asked to."""
    settings: dict[str, Any] = {"embeddings": True, "pooling": "mean", "aliases": (asked.MODEL,)}
    settings |= {"template_variables": {"enable_thinking": False}, "api_keys": (asked.KEY,)}
    with served(load, n_ctx_slot=512, chat_template=TEMPLATE, **settings) as (url, _):
        yield url


@pytest.fixture
def chats(thinker: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=thinker, timeout=30) as client:
        yield client
