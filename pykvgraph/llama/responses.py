"""The dictionaries of OpenAI's interface: completions, chats, calls of functions; whole and in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

Answer = dict[str, Any]


@dataclass(frozen=True)
class CompletionHeader:
    """What all dictionaries of one completion begin with."""

    id: str
    created: int
    model: str

    def chunk(self, text: str, logprobs: Any, finish_reason: str | None = None) -> Answer:
        """A piece of a streamed completion; also the choice of a whole one."""
        choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish_reason}
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }

    def completion(
        self, text: str, logprobs: Any, finish_reason: str | None, n_prompt: int, n_said: int
    ) -> Answer:
        """A whole completion."""
        usage = {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_said,
            "total_tokens": n_prompt + n_said,
        }
        return {**self.chunk(text, logprobs, finish_reason), "usage": usage}


def chat(completion: Answer, function: str | None = None) -> Answer:
    """A completion as an assistant's message; function: as a call of that function."""
    choice = completion["choices"][0]
    message: Answer = {"role": "assistant", "content": choice["text"]}
    finish_reason = choice["finish_reason"]
    if function is not None:
        called = {"name": function, "arguments": choice["text"]}
        call = {"id": _call_id(function, completion), "type": "function", "function": called}
        message = {"role": "assistant", "content": None, "function_call": called, "tool_calls": [call]}
        finish_reason = "tool_calls"
    return {
        "id": "chat" + completion["id"],
        "object": "chat.completion",
        "created": completion["created"],
        "model": completion["model"],
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": _logprobs(choice["logprobs"]),
                "finish_reason": finish_reason,
            }
        ],
        "usage": completion["usage"],
    }


def chat_chunks(chunks: Iterable[Answer]) -> Iterator[Answer]:
    """The chunks of a completion as those of a chat, after one that says who speaks."""
    for index, chunk in enumerate(chunks):
        if index == 0:
            yield _chat_chunk(chunk, {"role": "assistant"}, None)
        choice = chunk["choices"][0]
        finish_reason = choice["finish_reason"]
        delta = {"content": choice["text"]} if finish_reason is None else {}
        yield _chat_chunk(chunk, delta, finish_reason, choice["logprobs"])


def call_chunks(chunks: Iterable[Answer], function: str) -> Iterator[Answer]:
    """The chunks of a completion as those of a function's call."""
    silent: Answer = {"content": None, "function_call": None, "tool_calls": None}
    last = None
    for chunk in chunks:
        if last is None:
            yield _chat_chunk(chunk, {"role": "assistant", **silent}, None)
        last = last or chunk
        choice = chunk["choices"][0]
        called = {"name": function, "arguments": choice["text"]}
        call = {"index": 0, "id": _call_id(function, last), "type": "function", "function": called}
        delta = {"role": None, "content": None, "function_call": called, "tool_calls": [call]}
        yield _chat_chunk(chunk, delta, None, choice["logprobs"])
    if last is not None:
        yield _chat_chunk(last, {"role": None, **silent}, "tool_calls")


def _chat_chunk(chunk: Answer, delta: Answer, finish_reason: str | None, logprobs: Any = None) -> Answer:
    return {
        "id": "chat" + chunk["id"],
        "object": "chat.completion.chunk",
        "created": chunk["created"],
        "model": chunk["model"],
        "choices": [
            {"index": 0, "delta": delta, "logprobs": _logprobs(logprobs), "finish_reason": finish_reason}
        ],
    }


def _call_id(function: str, completion: Answer) -> str:
    return f"call__0_{function}_{completion['id']}"


def _logprobs(of_text: Any) -> Answer | None:
    """A completion's logprobs, laid out as a chat's."""
    if of_text is None:
        return None
    columns = zip(of_text["tokens"], of_text["token_logprobs"], of_text["top_logprobs"], strict=True)
    content = [
        {
            "token": token,
            "bytes": None,
            "logprob": logprob,
            "top_logprobs": [
                {"token": other, "logprob": value, "bytes": None} for other, value in (top or {}).items()
            ],
        }
        for token, logprob, top in columns
    ]
    return {"content": content, "refusal": None}
