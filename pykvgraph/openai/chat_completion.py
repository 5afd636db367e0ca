"""/v1/chat/completions: OpenAI's form of a conversation's answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pykvgraph.openai.chat_output import ChatOutput
from pykvgraph.openai.completion import CompletionForm
from pykvgraph.openai.form import Form, new_id, now
from pykvgraph.openai.held_pieces import HeldPieces
from pykvgraph.openai.logprobs import content_logprobs
from pykvgraph.openai.sample import Sample, usage_of
from pykvgraph.openai.vocabulary import Vocabulary
from pykvgraph.openai.wire_json import dumps
from pykvgraph.reply.delta import CallPart, Content, Delta, Reasoning, ToolCall
from pykvgraph.types import Piece


class ChatForm(Form):
    """new_output: makes what divides a sample's text into content, thoughts and calls.

    with_usage: the stream ends with it. details: tells how the answer was made, as `__verbose`; None: nobody
    wants to know.
    """

    closing = b"data: [DONE]\n\n"

    def __init__(
        self,
        model: str,
        fingerprint: str,
        vocabulary: Vocabulary,
        new_output: Callable[[], ChatOutput],
        *,
        with_usage: bool = False,
        with_timings: bool = False,
        details: CompletionForm | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._new_output = new_output
        self._outputs: dict[int, ChatOutput] = {}  # by the sample's index
        self._held = HeldPieces()  # of samples whose probabilities are told
        self._with_usage = with_usage
        self._with_timings = with_timings
        self._details = details
        self._head = {"created": now(), "model": model, "system_fingerprint": fingerprint}
        self._id = new_id()
        self._back = dumps({**self._head, "id": self._id, "object": "chat.completion.chunk"})[1:]

    def events(self, sample: Sample, pieces: list[Piece]) -> list[bytes]:
        """One for each delta; the first one says who speaks. Clients append choices: they begin in order."""
        found = []
        for index in range(len(self._outputs), sample.index + 1):
            self._outputs[index] = self._new_output()
            found.append(self._event([_opening(index)]))
        output = self._outputs[sample.index]
        for piece in pieces:
            if sample.tells_probs:
                self._held.add(sample, piece)
            if piece.text:
                found += self._chunks(sample, output, output.feed(piece.text))
        return found

    def progress_events(self, sample: Sample) -> list[bytes]:
        """One that says who is going to speak."""
        timings = {"timings": sample.timings()} if self._with_timings else {}
        progress = sample.prompt_progress()
        return [self._event([_opening(sample.index)], **timings, prompt_progress=progress)]

    def last_events(self, sample: Sample) -> list[bytes]:
        """What was held back, and why it ended."""
        output = self._outputs[sample.index]
        found = self._chunks(sample, output, output.end())
        reason = output.finish_reason(sample.finish_reason)
        end: dict[str, Any] = {"finish_reason": reason, "index": sample.index, "delta": {}}
        if sample.tells_probs and (held := self._held.take_last(sample)):
            end["logprobs"] = self._probs(sample, held)
        details = {} if self._details is None else {"__verbose": self._details.last(sample)}
        timings = {} if self._with_usage else {"timings": sample.timings()}
        return [*found, self._event([end], **timings, **details)]

    def end(self, samples: list[Sample]) -> list[bytes]:
        """The usage of all, if that was asked for."""
        if not self._with_usage:
            return []
        return [self._event([], usage=usage_of(samples), timings=samples[-1].timings())]

    def whole(self, samples: list[Sample]) -> Any:
        """All answers."""
        choices = []
        for sample in samples:
            output = self._new_output()
            output.feed(sample.text)
            output.end()
            reason = output.finish_reason(sample.finish_reason)
            message = _message(output)
            probs = self._probs(sample, sample.with_probs) if sample.tells_probs else None
            choices.append(
                {"finish_reason": reason, "index": sample.index, "message": message, "logprobs": probs}
            )
        end = {"usage": usage_of(samples), "id": self._id, "timings": samples[-1].timings()}
        if self._details is not None:
            end["__verbose"] = self._details.whole(samples[:1])
        return {"choices": choices, **self._head, "object": "chat.completion", **end}

    def _probs(self, sample: Sample, pieces: list[Piece]) -> Any:
        return content_logprobs(sample, pieces, self._vocabulary)

    def _chunks(self, sample: Sample, output: ChatOutput, deltas: Iterable[Delta]) -> list[bytes]:
        """One for each delta; the first has the probabilities of all tokens that came by now."""
        found = []
        for delta in deltas:
            held = self._held.take(sample)
            found.append(
                self._chunk(sample, _told(delta, output), self._probs(sample, held) if held else None)
            )
        return found

    def _event(self, choices: list[dict[str, Any]], **values: Any) -> bytes:
        told = {**self._head, "id": self._id, "object": "chat.completion.chunk"}
        return dumps({"choices": choices, **told, **values})

    def _chunk(self, sample: Sample, delta: dict[str, Any], probs: Any = None) -> bytes:
        told = b',"logprobs":%b' % dumps(probs) if probs else b""
        timings = b',"timings":%b' % dumps(sample.timings()) if self._with_timings else b""
        return b'{"choices":[{"finish_reason":null,"index":%d,"delta":%b%b}]%b,%b' % (
            sample.index,
            dumps(delta),
            told,
            timings,
            self._back,
        )


def _opening(index: int) -> dict[str, Any]:
    """The choice of an event that says who speaks."""
    return {"finish_reason": None, "index": index, "delta": {"role": "assistant", "content": None}}


def _told(delta: Delta, output: ChatOutput) -> dict[str, Any]:
    if isinstance(delta, Content):
        return {"content": delta.text}
    if isinstance(delta, Reasoning):
        return {"reasoning_content": delta.text}
    told = {"function": {"arguments": delta.text}} if isinstance(delta, CallPart) else _call(delta)
    return {"tool_calls": [{"index": output.number(delta), **told}]}


def _message(output: ChatOutput) -> dict[str, Any]:
    reply = output.reply
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [_call(call) for call in reply.calls]
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}
