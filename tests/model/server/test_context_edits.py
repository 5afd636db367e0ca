"""`context_management` of /v1/messages: the prompt is that of a history that a hand has edited."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import anthropic.types.beta as beta
import httpx
import pytest
from support.served import events

from pykvgraph.server.requests.context_edits import CLEARED

MESSAGES = "/v1/messages"
THINKING, TOOL_USES = "clear_thinking_20251015", "clear_tool_uses_20250919"
BETAS = ["context-management-2025-06-27"]
NAMES = ["look", "weather", "look", "stop"]


def history(
    cleared: str = "", inputs: str = "", thoughts: str = "0123", n_turns: int = 2
) -> list[dict[str, Any]]:
    """Four calls of tools in two turns of the assistant, or one; without what a hand has cleared of some."""
    found: list[dict[str, Any]] = [{"role": "user", "content": "Look."}]
    for n, name in enumerate(NAMES):
        if n == 2 and n_turns == 2:
            found.append({"role": "assistant", "content": "A dog."})
            found.append({"role": "user", "content": "And now?"})
        given = {} if str(n) in inputs else {"at": n}
        thought = {"type": "thinking", "thinking": f"Hm {n}", "signature": "a"}
        call = {"type": "tool_use", "id": f"id{n}", "name": name, "input": given}
        said = CLEARED if str(n) in cleared else f"There was a big dog and a cat in the park {n}."
        result = {"type": "tool_result", "tool_use_id": f"id{n}", "content": said}
        found.append({"role": "assistant", "content": [*([thought] if str(n) in thoughts else []), call]})
        found.append({"role": "user", "content": [result]})
    return found


def body(messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "any", "messages": messages, **fields}


def counted(client: httpx.Client, messages: Any) -> int:
    reply = client.post(f"{MESSAGES}/count_tokens", json=body(messages))
    return int(reply.json()["input_tokens"])


@pytest.fixture
def claude(thinker: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=thinker, api_key="none", max_retries=0) as client:
        yield client


ALWAYS = {"trigger": {"type": "tool_uses", "value": 1}}


def kept(n: int) -> dict[str, Any]:
    return {"keep": {"type": "tool_uses", "value": n}}


OF_USES: list[tuple[dict[str, Any], str, str]] = [
    (ALWAYS, "0", ""),
    ({"trigger": {"type": "tool_uses", "value": 3}}, "0", ""),
    ({"trigger": {"type": "tool_uses", "value": 4}}, "", ""),
    ({"trigger": {"type": "input_tokens", "value": 100}}, "0", ""),
    ({}, "", ""),  # 100,000 tokens
    (ALWAYS | kept(0), "0123", ""),
    (ALWAYS | kept(9), "", ""),
    (ALWAYS | kept(1) | {"exclude_tools": ["weather"]}, "02", ""),
    (ALWAYS | kept(1) | {"clear_tool_inputs": True}, "012", "012"),
    (ALWAYS | kept(1) | {"clear_tool_inputs": ["weather", "stop"]}, "012", "1"),
    (ALWAYS | {"clear_at_least": {"type": "input_tokens", "value": 3}}, "0", ""),
    (ALWAYS | {"clear_at_least": {"type": "input_tokens", "value": 400}}, "", ""),
]


@pytest.mark.parametrize(("edit", "cleared", "inputs"), OF_USES)
def test_old_results_of_tools_are_cleared(
    claude: anthropic.Anthropic, chats: httpx.Client, edit: dict[str, Any], cleared: str, inputs: str
) -> None:
    managed: Any = {"edits": [{"type": TOOL_USES, **edit}]}
    by_hand = history(cleared, inputs)
    n_before, n = counted(chats, history()), counted(chats, by_hand)
    assert n < n_before or not cleared
    asked: Any = body(history())
    told = claude.beta.messages.count_tokens(**asked, betas=BETAS, context_management=managed)
    assert told.context_management is not None
    assert (told.input_tokens, told.context_management.original_input_tokens) == (n, n_before)
    said = claude.beta.messages.create(**asked, betas=BETAS, max_tokens=1, context_management=managed)
    assert said.context_management is not None
    applied = [each.to_dict() for each in said.context_management.applied_edits]
    one = {"type": TOOL_USES, "cleared_tool_uses": len(cleared), "cleared_input_tokens": n_before - n}
    assert applied == ([one] if cleared else [])
    again = claude.beta.messages.create(**body(by_hand), max_tokens=1).usage
    assert again.cache_read_input_tokens == n - 1, "the prompt was not that of the history by hand"


OF_THOUGHTS: list[tuple[Any, int, str, int]] = [
    (None, 2, "23", 1),
    (1, 2, "23", 1),
    (2, 2, "0123", 0),
    (9, 2, "0123", 0),
    ("all", 2, "0123", 0),
    (1, 1, "0123", 0),  # results of tools end no turn
]


@pytest.mark.parametrize(("keep", "n_turns", "left", "n_cleared"), OF_THOUGHTS)
def test_old_thoughts_are_cleared(
    claude: anthropic.Anthropic, chats: httpx.Client, keep: Any, n_turns: int, left: str, n_cleared: int
) -> None:
    edit: dict[str, Any] = {"type": THINKING}
    if keep is not None:
        edit["keep"] = {"type": "thinking_turns", "value": keep} if keep != "all" else keep
    given, by_hand = history(n_turns=n_turns), history(thoughts=left, n_turns=n_turns)
    n_before, n = counted(chats, given), counted(chats, by_hand)
    managed: Any = {"edits": [edit]}
    asked: Any = body(given)
    said = claude.beta.messages.create(**asked, betas=BETAS, max_tokens=1, context_management=managed)
    assert said.context_management is not None
    applied = [each.to_dict() for each in said.context_management.applied_edits]
    one = {"type": THINKING, "cleared_thinking_turns": n_cleared, "cleared_input_tokens": n_before - n}
    assert applied == ([one] if n_cleared else [])
    again = claude.beta.messages.create(**body(by_hand), max_tokens=1).usage
    assert again.cache_read_input_tokens == n - 1


def test_a_stream_tells_both_edits_at_its_end(chats: httpx.Client) -> None:
    edits: list[Any] = [{"type": THINKING}, {"type": TOOL_USES, **ALWAYS}]
    counts = [counted(chats, each) for each in (history(), history(thoughts="23"), history("0", "", "23"))]
    asked = body(history(), max_tokens=2, stream=True, context_management={"edits": edits})
    stream = events(chats.post(MESSAGES, json=asked).text)
    (end,) = (event for event in stream if event["type"] == "message_delta")
    told = beta.BetaRawMessageDeltaEvent.model_validate(end, strict=True)
    assert told.context_management is not None
    first, second = (each.to_dict() for each in told.context_management.applied_edits)
    n_thoughts, n_uses = counts[0] - counts[1], counts[1] - counts[2]
    assert first == {"type": THINKING, "cleared_thinking_turns": 1, "cleared_input_tokens": n_thoughts}
    assert second == {"type": TOOL_USES, "cleared_tool_uses": 1, "cleared_input_tokens": n_uses}
    usage = stream[0]["message"]["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == counts[2]
    plain = chats.post(MESSAGES, json=body(history(), max_tokens=1)).json()
    assert "context_management" not in plain


BAD: list[tuple[Any, str]] = [
    ([{"type": "compact_20260112"}], "compact_20260112"),
    ([{}], "no edit"),
    (["clear"], "object"),
    ("clear", "edits"),
    ([{"type": TOOL_USES}, {"type": THINKING}], "before the other"),
    ([{"type": TOOL_USES}, {"type": TOOL_USES}], "once"),
    ([{"type": TOOL_USES, "keep": {"type": "turns", "value": 1}}], "keep"),
    ([{"type": TOOL_USES, "keep": 3}], "keep"),
    ([{"type": TOOL_USES, "trigger": {"type": "input_tokens"}}], "trigger"),
    ([{"type": TOOL_USES, "trigger": {"type": "tool_uses", "value": -1}}], "value"),
    ([{"type": TOOL_USES, "clear_at_least": {"type": "tool_uses", "value": 1}}], "clear_at_least"),
    ([{"type": TOOL_USES, "exclude_tools": [3]}], "exclude_tools"),
    ([{"type": TOOL_USES, "clear_tool_inputs": "look"}], "clear_tool_inputs"),
    ([{"type": THINKING, "keep": {"type": "thinking_turns", "value": 0}}], "value"),
    ([{"type": THINKING, "keep": "some"}], "keep"),
]


@pytest.mark.parametrize(("edits", "told"), BAD)
def test_what_is_no_edit_is_refused(chats: httpx.Client, edits: Any, told: str) -> None:
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        asked = body(history(), max_tokens=1, context_management={"edits": edits})
        reply = chats.post(path, json=asked)
        assert reply.status_code == 400 and told in reply.json()["error"]["message"], reply.text
        assert reply.json()["error"]["type"] == "invalid_request_error"


def test_odd_histories_are_no_reason_to_fail(chats: httpx.Client) -> None:
    """A result without its call, a call without an id, contents that are words. What is broken is a 400."""
    edits = [{"type": THINKING}, {"type": TOOL_USES, **ALWAYS, **kept(0)}]
    odd: list[Any] = [
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "1"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "name": "look", "input": {}}]},
        {"role": "user", "content": "Go on"},
        *history()[1:3],
    ]
    asked = body(odd, max_tokens=1, context_management={"edits": edits})
    reply = chats.post(MESSAGES, json=asked)
    assert reply.status_code == 200, reply.text
    for broken in (3, [3], [{"role": "user"}], [{"role": "user", "content": [3]}]):
        asked = body(broken, max_tokens=1, context_management={"edits": edits})
        assert chats.post(MESSAGES, json=asked).status_code == 400
