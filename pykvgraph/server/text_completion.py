"""/v1/completions: OpenAI's form of a text."""

from __future__ import annotations

from typing import Any

from pykvgraph.server.form import Form, new_id, now
from pykvgraph.server.logprobs import content_logprobs
from pykvgraph.server.sample import Sample
from pykvgraph.server.vocabulary import Vocabulary
from pykvgraph.server.wire_json import dumps
from pykvgraph.types import Piece


class TextForm(Form):
    """model: its name, as the answer tells it. fingerprint: of the program."""

    closing = b"data: [DONE]\n\n"

    def __init__(self, model: str, fingerprint: str, vocabulary: Vocabulary) -> None:
        self._head = {
            "created": now(),
            "model": model,
            "system_fingerprint": fingerprint,
            "object": "text_completion",
        }
        self._vocabulary = vocabulary
        self._id = new_id()
        self._back = dumps({**self._head, "id": self._id})[1:]

    def events(self, sample: Sample, pieces: list[Piece]) -> list[bytes]:
        """One for each piece that has text."""
        return [
            b'{"choices":[{"text":%b,"index":%d,"logprobs":%b,"finish_reason":null}],%b'
            % (dumps(piece.text), sample.index, dumps(self._probs(sample, [piece])), self._back)
            for piece in pieces
            if piece.text
        ]

    def last_events(self, sample: Sample) -> list[bytes]:
        """Why it ended, and its usage."""
        choice = {"text": "", "index": sample.index, "logprobs": None, "finish_reason": sample.finish_reason}
        return [dumps(self._told([choice], sample))]

    def whole(self, samples: list[Sample]) -> Any:
        """All texts; the usage is that of the first."""
        choices = [
            {
                "text": sample.text,
                "index": sample.index,
                "logprobs": self._probs(sample, sample.with_probs),
                "finish_reason": sample.finish_reason,
            }
            for sample in samples
        ]
        return self._told(choices, samples[0])

    def _probs(self, sample: Sample, pieces: list[Piece]) -> dict[str, Any] | None:
        return content_logprobs(sample, pieces, self._vocabulary)

    def _told(self, choices: list[dict[str, Any]], sample: Sample) -> dict[str, Any]:
        end = {"usage": sample.usage(), "id": self._id, "timings": sample.timings()}
        return {"choices": choices, **self._head, **end}
