"""/v1/messages: Anthropic's form of a conversation's answer."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

from pykvgraph.openai.blocks import AnswerBlock, Event
from pykvgraph.openai.chat_output import ChatOutput
from pykvgraph.openai.cut_json import as_far_as_it_goes, plain_json
from pykvgraph.openai.form import new_id
from pykvgraph.openai.sample import Sample, cache_told
from pykvgraph.reply.delta import Reasoning, ToolCall

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter:
    """model: its name, as the answer tells it. ttls: "5m" or "1h" for each of the sample's pins.

    applied: edits of the context that were made; None: no body asked for any.
    """

    def __init__(
        self, model: str, ttls: Sequence[str] = (), applied: list[dict[str, Any]] | None = None
    ) -> None:
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant"}
        self._model = model
        self._ttls = ttls
        self._edits = {} if applied is None else {"context_management": {"applied_edits": applied}}

    def begin(self, sample: Sample) -> list[Event]:
        """The prompt is decoded, and what it cost is known."""
        message = self._message([], None, None, {**self._usage(sample), "output_tokens": 0})
        return [{"type": "message_start", "message": message}]

    def progress(self, sample: Sample) -> list[Event]:
        """Anthropic has no event for it."""
        return []

    def opened(self, block: AnswerBlock) -> list[Event]:
        """A block begins."""
        return [{"type": "content_block_start", "index": block.index, "content_block": _content(block)}]

    def added(self, block: AnswerBlock, text: str, probs: list[dict[str, Any]]) -> list[Event]:
        """It goes on."""
        if isinstance(block.first, ToolCall):
            return [_delta(block, "input_json_delta", partial_json=text)]
        if isinstance(block.first, Reasoning):
            return [_delta(block, "thinking_delta", thinking=text)]
        return [_delta(block, "text_delta", text=text)]

    def closed(self, block: AnswerBlock) -> list[Event]:
        """It has ended; thoughts have a signature."""
        signature = _delta(block, "signature_delta", signature=_signature(block.text))
        signed = [signature] if isinstance(block.first, Reasoning) else []
        return [*signed, {"type": "content_block_stop", "index": block.index}]

    def end(self, sample: Sample, blocks: list[AnswerBlock], output: ChatOutput) -> list[Event]:
        """Why it ended, and what it cost."""
        reason, word = _reason(sample, output)
        delta = {"stop_reason": reason, "stop_sequence": word}
        usage = self._usage(sample)
        del usage["cache_creation"]  # which message_start has
        told = {"type": "message_delta", "delta": delta, "usage": usage, **self._edits}
        return [told, {"type": "message_stop"}]

    def whole(self, sample: Sample, blocks: list[AnswerBlock], output: ChatOutput) -> dict[str, Any]:
        """The answer of a body that wants no stream."""
        content = [_content(block, block.text) for block in blocks]
        return self._message(content, *_reason(sample, output), self._usage(sample)) | self._edits

    def _usage(self, sample: Sample) -> dict[str, Any]:
        """The prompt's tokens in three parts: read, those behind them that pins keep, and the others."""
        created = {"5m": 0, "1h": 0}
        end = sample.n_cached
        for ttl, n in zip(self._ttls, sample.pinned, strict=False):  # nothing is pinned before it is decoded
            created[ttl] += max(n - end, 0)
            end = max(n, end)
        return {
            **({} if sample.completion is None else {"cache": cache_told([sample])}),
            "cache_creation": {f"ephemeral_{ttl}_input_tokens": n for ttl, n in created.items()},
            "cache_creation_input_tokens": sum(created.values()),
            "cache_read_input_tokens": sample.n_cached,
            "input_tokens": len(sample.prompt) - end,
            "output_tokens": sample.n_said,
        }

    def _message(
        self, content: list[Any], reason: str | None, word: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        end = {"stop_reason": reason, "stop_sequence": word, "usage": usage}
        return {**self._head, "content": content, "model": self._model, **end}


def _content(block: AnswerBlock, text: str = "") -> dict[str, Any]:
    call = block.first
    if isinstance(call, ToolCall):
        return {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(text, block.breaks_off)}
    if isinstance(call, Reasoning):
        return {"type": "thinking", "thinking": text, "signature": _signature(text) if text else ""}
    return {"type": "text", "text": text}


def _signature(thoughts: str) -> str:
    """Nobody checks it; but some clients send thoughts back only if they have one."""
    return base64.b64encode(hashlib.sha256(thoughts.encode("utf-8", "replace")).digest()).decode()


def _input(arguments: str, breaks_off: bool) -> dict[str, Any]:
    """An object; where the answer breaks off, as clients read that of a stream.

    What can be no object is told as Anthropic advises its clients to.
    """
    read = as_far_as_it_goes if breaks_off else plain_json
    try:
        return dict(read(arguments or "{}"))
    except (TypeError, ValueError, RecursionError):
        return {"INVALID_JSON": arguments}


def _delta(block: AnswerBlock, kind: str, **text: str) -> Event:
    return {"type": "content_block_delta", "index": block.index, "delta": {"type": kind, **text}}


def _reason(sample: Sample, output: ChatOutput) -> tuple[str | None, str | None]:
    """Why it ended, and the stop string that did it."""
    if sample.stopped_by:
        return "stop_sequence", sample.stopped_by
    return _REASONS.get(output.finish_reason(sample.finish_reason) or ""), None
