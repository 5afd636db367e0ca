"""/v1/responses: OpenAI's newer form of a conversation's answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pykvgraph.openai.blocks import AnswerBlock, Event
from pykvgraph.openai.chat_output import ChatOutput
from pykvgraph.openai.form import new_id, now
from pykvgraph.openai.sample import Sample, cache_told
from pykvgraph.reply.delta import Reasoning, ToolCall

_SAMPLED = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
# before the answer has ended
_UNKNOWN = dict.fromkeys(("completed_at", "incomplete_details", "error", "usage"))


class ResponseWriter:
    """model: its name, as the answer tells it. asked: fields of the request that the answer repeats.

    count: tokens of a text, for those of thoughts. with_timings: each event of a text has them.
    """

    def __init__(
        self,
        model: str,
        asked: dict[str, Any],
        count: Callable[[str], int],
        *,
        with_timings: bool = False,
    ) -> None:
        self._head = {"id": new_id("resp_"), "object": "response", "created_at": now(), **asked}
        self._count = count
        self._model = model
        self._with_timings = with_timings
        self._sample: Sample | None = None  # of a stream
        self._n_events = 0

    def begin(self, sample: Sample) -> list[Event]:
        """It was created, and runs."""
        self._sample = sample
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._begun(sample)) for kind in kinds]

    def progress(self, sample: Sample) -> list[Event]:
        """It still runs, and how far the prompt is."""
        told = {"prompt_progress": sample.prompt_progress(), **self._timings()}
        return [self._event("response.in_progress", response=self._begun(sample), **told)]

    def opened(self, block: AnswerBlock) -> list[Event]:
        """An item begins, and in a message its one part."""
        item = _item(block, "in_progress")
        found = [self._event("response.output_item.added", output_index=block.index, item=item)]
        if item["type"] == "message":
            found.append(self._inside(block, "response.content_part.added", part=_part("", [])))
        return found

    def added(self, block: AnswerBlock, text: str, probs: list[dict[str, Any]]) -> list[Event]:
        """It goes on."""
        told = {**_logprobs(block, probs), **self._timings()}
        return [self._inside(block, f"{_kind(block)}.delta", delta=text, **told)]

    def closed(self, block: AnswerBlock) -> list[Event]:
        """Its text, its part and the item are done."""
        kind, item = _kind(block), _item(block, _end_of(block), block.text)
        name = "arguments" if isinstance(block.first, ToolCall) else "text"
        done = {name: block.text, **_logprobs(block, block.probs)}
        found = [self._inside(block, f"{kind}.done", **done)]
        if item["type"] == "message":
            part = _part(block.text, block.probs)
            found.append(self._inside(block, "response.content_part.done", part=part))
        return [*found, self._event("response.output_item.done", output_index=block.index, item=item)]

    def end(self, sample: Sample, blocks: list[AnswerBlock], output: ChatOutput) -> list[Event]:
        """All of it again."""
        response = self.whole(sample, blocks, output)
        kind = f"response.{response['status']}"
        return [{**self._event(kind, response=response), "timings": sample.timings()}]

    def whole(self, sample: Sample, blocks: list[AnswerBlock], output: ChatOutput) -> dict[str, Any]:
        """The answer of a body that wants no stream."""
        is_cut = sample.finish_reason == "length"
        thoughts = [block.text for block in blocks if isinstance(block.first, Reasoning)]
        n_prompt, n_cached = len(sample.prompt), sample.n_cached
        return {
            **self._told(sample),
            "completed_at": now(),
            "output": [_item(block, _end_of(block), block.text) for block in blocks],
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "usage": {
                "input_tokens": n_prompt,
                "output_tokens": sample.n_said,
                "total_tokens": n_prompt + sample.n_said,
                "input_tokens_details": {
                    "cached_tokens": n_cached,
                    "cache_write_tokens": n_prompt - n_cached,
                },
                "output_tokens_details": {"reasoning_tokens": sum(map(self._count, thoughts))},
                "cache": cache_told([sample]),
            },
        }

    def _begun(self, sample: Sample) -> dict[str, Any]:
        return {**self._told(sample), **_UNKNOWN, "status": "in_progress", "output": []}

    def _told(self, sample: Sample) -> dict[str, Any]:
        sampled = {name: sample.settings[name] for name in _SAMPLED}
        return {**self._head, **sampled, "model": self._model}

    def _timings(self) -> dict[str, Any]:
        tells = self._with_timings and self._sample is not None
        return {"timings": self._sample.timings()} if tells and self._sample else {}

    def _inside(self, block: AnswerBlock, kind: str, **values: Any) -> Event:
        where: dict[str, Any] = {"item_id": _id(block), "output_index": block.index}
        if not isinstance(block.first, ToolCall):
            where["content_index"] = 0
        return self._event(kind, **where, **values)

    def _event(self, kind: str, **values: Any) -> Event:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **values}


def _kind(block: AnswerBlock) -> str:
    if isinstance(block.first, ToolCall):
        return "response.function_call_arguments"
    return "response.reasoning_text" if isinstance(block.first, Reasoning) else "response.output_text"


def _id(block: AnswerBlock) -> str:
    if isinstance(block.first, ToolCall):
        return f"fc_{block.first.id}"
    return f"{'rs' if isinstance(block.first, Reasoning) else 'msg'}_{block.id}"


def _logprobs(block: AnswerBlock, probs: list[dict[str, Any]]) -> dict[str, Any]:
    """OpenAI's types require the field of a text, and others have none."""
    return {} if isinstance(block.first, (ToolCall, Reasoning)) else {"logprobs": probs}


def _part(text: str, probs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "annotations": [], "logprobs": probs, "text": text}


def _end_of(block: AnswerBlock) -> str:
    return "incomplete" if block.breaks_off else "completed"


def _item(block: AnswerBlock, status: str, text: str = "") -> dict[str, Any]:
    head, call = {"id": _id(block), "status": status}, block.first
    if isinstance(call, ToolCall):
        of_call = {"arguments": text, "call_id": f"call_{call.id}", "name": call.name}
        return {**head, "type": "function_call", **of_call}
    if isinstance(call, Reasoning):
        content = [{"type": "reasoning_text", "text": text}] if text else []
        return {**head, "type": "reasoning", "summary": [], "content": content, "encrypted_content": ""}
    parts = [_part(text, block.probs)] if text else []
    return {**head, "type": "message", "role": "assistant", "content": parts}
