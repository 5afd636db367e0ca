"""/v1/chat/completions: OpenAI's form of a conversation's answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pykvgraph.server.formats import new_id, now
from pykvgraph.server.logprobs import logprobs_of
from pykvgraph.server.plain_output import PlainOutput
from pykvgraph.server.sample import Sample
from pykvgraph.server.vocabulary import Vocabulary
from pykvgraph.server.wire_json import dumps
from pykvgraph.types import Piece


class ChatForm:
    """new_output: makes what divides a sample's text into content, thoughts and calls.

    prefill: how the answer begins, by the request's last message. with_usage: the stream ends with it.
    """

    closing = b"data: [DONE]\n\n"

    def __init__(
        self,
        model: str,
        fingerprint: str,
        vocabulary: Vocabulary,
        new_output: Callable[[], PlainOutput] = PlainOutput,
        *,
        prefill: str = "",
        with_usage: bool = False,
        with_timings: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        self._new_output = new_output
        self._outputs: dict[int, PlainOutput] = {}  # by the sample's index
        self._begin: dict[int, str] = {}  # a prefill that is not told yet
        self._prefill = prefill
        self._with_usage = with_usage
        self._with_timings = with_timings
        self._head = {"created": now(), "model": model, "system_fingerprint": fingerprint}
        self._id = new_id()
        self._back = dumps({**self._head, "id": self._id, "object": "chat.completion.chunk"})[1:]

    def events(self, sample: Sample, pieces: list[Piece]) -> list[bytes]:
        """One for each delta; the first one says who speaks."""
        found = []
        if sample.index not in self._outputs:
            self._outputs[sample.index] = self._new_output()
            self._begin[sample.index] = self._prefill
            found.append(self._chunk(sample, {"role": "assistant", "content": None}))
        output = self._outputs[sample.index]
        for piece in pieces:
            if piece.text:
                text = self._begin.pop(sample.index, "") + piece.text
                probs = self._probs(sample, [piece])
                found += [self._chunk(sample, delta, probs) for delta in output.feed(text)]
        return found

    def last_events(self, sample: Sample) -> list[bytes]:
        """What was held back, why it ended, and its usage if that was asked for."""
        output = self._outputs[sample.index]
        deltas = [*output.feed(self._begin.pop(sample.index, "")), *output.end()]
        found = [self._chunk(sample, delta) for delta in deltas]
        reason = self._reason(sample)
        end: dict[str, Any] = {"finish_reason": reason, "index": sample.index, "delta": {}}
        told = {**self._head, "id": self._id, "object": "chat.completion.chunk"}
        if not self._with_usage:
            return [*found, dumps({"choices": [end], **told, "timings": sample.timings()})]
        usage = {"usage": sample.usage(), "timings": sample.timings()}
        return [*found, dumps({"choices": [end], **told}), dumps({"choices": [], **told, **usage})]

    def whole(self, samples: list[Sample]) -> Any:
        """All answers; the usage is that of the first."""
        choices = []
        for sample in samples:
            output = self._outputs[sample.index] = self._new_output()
            output.feed(self._prefill + sample.text)
            output.end()
            reason = self._reason(sample)
            message = output.message()
            probs = {"logprobs": self._probs(sample, sample.with_probs)} if sample.n_probs else {}
            choices.append({"finish_reason": reason, "index": sample.index, "message": message, **probs})
        end = {"usage": samples[0].usage(), "id": self._id, "timings": samples[0].timings()}
        return {"choices": choices, **self._head, "object": "chat.completion", **end}

    def _reason(self, sample: Sample) -> str | None:
        return sample.finish_reason

    def _probs(self, sample: Sample, pieces: list[Piece]) -> Any:
        if not sample.n_probs:
            return None
        return {"content": [logprobs_of(piece, self._vocabulary) for piece in pieces]}

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
