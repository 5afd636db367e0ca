"""Bodies of other interfaces as those of a chat: what stands in their documentation, by hand."""

from __future__ import annotations

import itertools
import json
import threading
import time
from typing import Any

import pytest

from pykvgraph.openai import wire_json
from pykvgraph.openai.errors import NO_PICTURE, WireError
from pykvgraph.openai.wire_json import loads
from pykvgraph.server.requests.fields import Fields
from pykvgraph.server.requests.messages_request import chat_of_messages
from pykvgraph.server.requests.responses_request import chat_of_responses

HI = {"role": "user", "content": "Hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}


def messages(body: dict[str, Any]) -> Any:
    return chat_of_messages(Fields({"messages": [HI], **body}))


def responses(body: dict[str, Any]) -> Any:
    return chat_of_responses(Fields({"input": "Hi", **body}))


def test_a_conversation_of_messages() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": "é"}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "warm"}]}
    body = {
        "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "short."}],
        "messages": [
            HI,
            {"role": "assistant", "content": [thought, {"type": "text", "text": "I ask."}, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
        ],
    }
    assert messages(body).get("messages") == [
        {"role": "system", "content": "Be short."},
        HI,
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I ask."}],
            "tool_calls": [CALL],
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "tool_call_id": "a", "content": "warm"},
        {"role": "user", "content": [{"type": "text", "text": "Well?"}]},
    ]


def test_words_of_documents_and_searches() -> None:
    found = {
        "type": "search_result",
        "source": "x.org",
        "title": "T",
        "content": [{"type": "text", "text": "a"}],
    }
    words = {"type": "text", "media_type": "text/plain", "data": "words"}
    parts = {
        "type": "content",
        "content": [{"type": "text", "text": "of"}, {"type": "text", "text": "parts"}],
    }
    documents = [
        {"type": "document", "source": words},
        {"type": "document", "source": words, "title": "D", "context": "C"},
        {"type": "document", "source": parts},
    ]
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [found, picture]}
    chat = messages({"messages": [{"role": "user", "content": [result, *documents]}]}).get("messages")
    told = "[a picture, which this server can't show to the model]"
    assert chat == [
        {"role": "tool", "tool_call_id": "a", "content": f"T\nx.org\na{told}"},
        {
            "role": "user",
            "content": [{"type": "text", "text": text} for text in ("words", "D\nC\nwords", "of\nparts")],
        },
    ]


def test_tools_of_the_service_are_set_aside() -> None:
    own = {"name": "f", "input_schema": SCHEMA}
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    assert len(messages({"tools": [search, own]}).get("tools")) == 1
    assert messages({"tools": [search]}).get("tools") == []


def test_tools_of_messages() -> None:
    tool = {"name": "f", "description": "Tells.", "input_schema": SCHEMA}
    function = {"name": "f", "description": "Tells.", "parameters": SCHEMA}
    assert messages({"tools": [tool]}).get("tools") == [{"type": "function", "function": function}]
    named = {"type": "function", "function": {"name": "f"}}
    choices = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    for kind, wanted in choices.items():
        given = {"type": kind, "name": "f", "disable_parallel_tool_use": kind == "any"}
        chat = messages({"tools": [tool], "tool_choice": given})
        assert (chat.get("tool_choice"), chat.get("parallel_tool_calls")) == (wanted, kind != "any")


def test_settings_of_messages() -> None:
    chat = messages({"stop_sequences": ["a"], "temperature": 0.5, "stream": True, "metadata": {}})
    assert (chat.get("stop"), chat.get("temperature"), chat.get("max_tokens")) == (["a"], 0.5, 4096)
    for kind, thinks in (("enabled", True), ("disabled", False)):
        chat = messages({"thinking": {"type": kind, "budget_tokens": 9}})
        assert chat.get("chat_template_kwargs") == {"enable_thinking": thinks}
    form = {"type": "json_schema", "schema": SCHEMA}
    assert messages({"output_config": {"format": form}}).get("response_format") == form


def test_a_number_that_changes_is_out_of_the_way() -> None:
    stamped = "x-anthropic-billing-header: cc_version=2; cch=a51%s5;You are a clerk. cch=a5145;"
    told = {messages({"system": stamped % i}).get("messages")[0]["content"] for i in range(3)}
    assert told == {"x-anthropic-billing-header: cc_version=2; cch=fffff;You are a clerk. cch=a5145;"}


def test_a_conversation_of_responses() -> None:
    body = {
        "instructions": "Be short.",
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "Now."}]},
            {"type": "message", **HI},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I ask."}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": '{"x": "é"}'},
            {"type": "function_call_output", "call_id": "a", "output": "warm"},
        ],
    }
    assert responses(body).get("messages") == [
        {"role": "system", "content": "Be short."},
        {"role": "developer", "content": "Now."},
        HI,
        {"role": "assistant", "content": "I ask.", "reasoning_content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "warm"},
    ]


def test_items_of_codex() -> None:
    """Calls with a text as argument, pictures as results, and what the service did or keeps itself."""
    body = {
        "input": [
            HI,
            {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "*** Begin"},
            {"type": "custom_tool_call_output", "call_id": "a", "output": "ok"},
            {"type": "function_call", "call_id": "b", "name": "look", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "b",
                "output": [
                    {"type": "input_text", "text": "seen"},
                    {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
                ],
            },
            {"type": "item_reference", "id": "msg_1"},
            {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
            {"type": "reasoning", "summary": [], "content": None},
        ]
    }
    user, patch, patched, look, seen, _ = responses(body).get("messages")
    assert user == HI
    function = {"name": "patch", "arguments": '{"input": "*** Begin"}'}
    assert patch["tool_calls"] == [{"id": "a", "type": "function", "function": function}]
    assert patched == {"role": "tool", "tool_call_id": "a", "content": "ok"}
    assert look["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}
    assert seen["content"] == "seen\n[a picture, which this server can't show to the model]"


def test_settings_of_responses() -> None:
    tool = {"type": "function", "name": "f", "parameters": SCHEMA}
    chat = responses(
        {
            "tools": [tool, {"type": "web_search"}],
            "tool_choice": {"type": "function", "name": "f"},
            "max_output_tokens": 7,
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
            "temperature": 0.5,
        }
    )
    function = {"strict": True, "name": "f", "parameters": SCHEMA}
    assert chat.get("tools") == [{"type": "function", "function": function}]
    assert chat.get("tool_choice") == {"type": "function", "function": {"name": "f"}}
    assert (chat.get("max_tokens"), chat.get("reasoning_effort"), chat.get("temperature")) == (7, "low", 0.5)
    assert chat.get("response_format")["json_schema"]["schema"] == SCHEMA


PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "x"}}


@pytest.mark.parametrize(
    ("read", "body", "code"),
    [
        (messages, {"messages": None}, 400),
        (messages, {"messages": "Hi"}, 400),
        (messages, {"messages": [{"role": "user", "content": [IMAGE]}]}, 400),
        (messages, {"messages": [{"role": "user", "content": ["Hi"]}]}, 400),
        (messages, {"system": 5}, 400),
        (messages, {"messages": [{"role": "user", "content": [PDF]}]}, 400),
        (messages, {"tools": ["f"]}, 400),
        (messages, {"tool_choice": {"type": "often"}}, 400),
        (messages, {"tool_choice": {"type": ["auto"]}}, 400),
        (responses, {"input": None}, 400),
        (responses, {"input": 5}, 400),
        (responses, {"input": ["Hi"]}, 400),
        (responses, {"input": [{"type": "unheard_of", "id": "a"}]}, 400),
        (responses, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400),
        (responses, {"previous_response_id": "resp_a"}, 400),
        (responses, {"conversation": {"id": "conv_a"}}, 400),
        (responses, {"prompt": {"id": "pmpt_a"}}, 400),
        (responses, {"background": True}, 400),
        (responses, {"tools": ["f"]}, 400),
    ],
)
def test_what_has_no_equal(read: Any, body: dict[str, Any], code: int) -> None:
    with pytest.raises(WireError) as caught:
        read(body)
    assert caught.value.code == code


def test_probabilities_of_responses() -> None:
    """They are asked for by name there, and top_logprobs may be 0, as clients send it."""
    wants = {"include": ["message.output_text.logprobs"]}
    few: list[dict[str, Any]] = [{}, {"top_logprobs": 0}, wants]
    read = map(responses, [*few, {**wants, "top_logprobs": 2}, {"top_logprobs": 3}])
    told = [(body.get("logprobs"), body.get("top_logprobs")) for body in read]
    assert told == [(False, None), (False, None), (True, None), (True, 2), (True, 3)]


def test_tools_with_types_of_their_own() -> None:
    """A shell, patches: the client has run them."""
    action = {"type": "exec", "command": ["ls"]}
    items = [
        {"type": "local_shell_call", "id": "l", "call_id": "a", "status": "completed", "action": action},
        {"type": "local_shell_call_output", "id": "l", "output": "file", "call_id": "a"},
        {"type": "apply_patch_call", "call_id": "b", "operation": {"type": "delete_file", "path": "x"}},
        {"type": "apply_patch_call_output", "call_id": "b", "status": "completed"},
        {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "é"}]},
        {"type": "computer_call", "call_id": "d", "action": {"type": "screenshot"}},
        {
            "type": "computer_call_output",
            "call_id": "d",
            "output": {"type": "computer_screenshot", "image_url": "x"},
        },
    ]
    calls, results = [], []
    for message in responses({"input": items}).get("messages"):
        if message["role"] == "tool":
            results.append(message["content"])
        else:
            (call,) = message["tool_calls"]
            calls.append((call["function"]["name"], json.loads(call["function"]["arguments"])))
    assert calls == [
        ("local_shell", {"action": action}),
        ("apply_patch", {"operation": {"type": "delete_file", "path": "x"}}),
        ("shell", {"action": {"commands": ["ls"]}}),
        ("computer", {"action": {"type": "screenshot"}}),
    ]
    assert results == ["file", "completed", '[{"stdout": "é"}]', NO_PICTURE]


def test_tools_of_the_service_among_those_that_are_allowed() -> None:
    function = {"type": "function", "name": "f", "parameters": SCHEMA}
    search = {"type": "web_search"}
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [search, {"type": "function", "name": "f"}],
    }
    body = responses({"tools": [function, search], "tool_choice": choice})
    allowed = body.get("tool_choice")["allowed_tools"]["tools"]
    assert allowed == [{"type": "function", "function": {"name": "f"}}]


def test_what_anthropics_service_did_itself_is_set_aside() -> None:
    found = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "text", "text": "It is so."},
    ]
    history = messages({"messages": [HI, {"role": "assistant", "content": found}, HI]}).get("messages")
    assert history == [HI, {"role": "assistant", "content": [{"type": "text", "text": "It is so."}]}, HI]


@pytest.mark.parametrize("number", [10**400, -(10**400), 1e400, float("nan")])
def test_numbers_that_are_none_or_too_long(number: float) -> None:
    """An integer may be longer than a float can be."""
    with pytest.raises(WireError, match="seed") as caught:
        Fields({"seed": number}).integer("seed", -1)
    assert caught.value.code == 400


def test_others_get_their_turn_while_numbers_are_read() -> None:
    """json.loads() lets no other thread run."""
    body = b"[" + b"262144, 0.5, " * 400_000 + b"0]"
    reads = threading.Thread(target=loads, args=(body,))
    moments = [time.monotonic()]
    reads.start()
    while reads.is_alive():
        time.sleep(0.001)
        moments.append(time.monotonic())
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    assert max(gaps) < (moments[-1] - moments[0]) / 2
    assert loads(b"[1, -2, 3.5, 1e3, 123456789012345678901234567890]") == [
        1,
        -2,
        3.5,
        1000.0,
        123456789012345678901234567890,
    ]
    with pytest.raises(WireError, match="no JSON"):
        loads(b"1" * 5000)  # which int() takes too long for


def test_long_json_is_written_in_short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one part is written nobody else runs: probabilities of a long answer took two seconds."""
    token = {"id": 1, "token": "é", "bytes": [195, 169], "logprob": -0.5}
    content = [token | {"top_logprobs": [token] * 5}] * 100
    value = {"choices": [{"index": 0, "text": "a", "logprobs": {"content": content}}], "usage": {}}
    lengths: list[int] = []
    whole = wire_json.dumps

    def dumps(value: Any) -> bytes:
        data = whole(value)
        lengths.append(len(data))
        return data

    monkeypatch.setattr(wire_json, "dumps", dumps)
    assert wire_json.dumps_in_parts(value) == whole(value)
    assert max(lengths) < 1000
