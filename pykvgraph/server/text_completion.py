"""/v1/completions: OpenAI's form of a text."""

from __future__ import annotations

from typing import Any

from pykvgraph.openai.form import MANY_PROBS, Form, new_id, now
from pykvgraph.openai.sample import Sample
from pykvgraph.openai.text_logprobs import text_logprobs
from pykvgraph.openai.vocabulary import Vocabulary
from pykvgraph.openai.wire_json import dumps, dumps_in_parts
from pykvgraph.server.endpoints.echo import Echo
from pykvgraph.types import Piece


class TextForm(Form):
    """model: its name, as the answer tells it. fingerprint: of the program. echo: what answers begin with."""

    closing = b"data: [DONE]\n\n"

    def __init__(
        self, model: str, fingerprint: str, vocabulary: Vocabulary, echo: Echo | None = None
    ) -> None:
        self._head = {
            "created": now(),
            "model": model,
            "system_fingerprint": fingerprint,
            "object": "text_completion",
        }
        self._vocabulary = vocabulary
        self._echo = echo
        self.is_long = echo is not None and echo.n_probs > MANY_PROBS
        self._n_told: dict[int, int] = {}  # characters of each answer, in a stream
        self._id = new_id()
        self._back = dumps({**self._head, "id": self._id})[1:]

    def events(self, sample: Sample, pieces: list[Piece]) -> list[bytes]:
        """One for each piece that has text, behind one for the prompt if answers begin with it."""
        told = self._first_events(sample)
        for piece in pieces:
            if piece.text:
                probs = self._probs(sample, [piece], offset=self._n_told[sample.index])
                told.append(self._event(sample, piece.text, probs))
                self._n_told[sample.index] += len(piece.text)
        return told

    def last_events(self, sample: Sample) -> list[bytes]:
        """Why it ended, and its usage."""
        choice = {"text": "", "index": sample.index, "logprobs": None, "finish_reason": sample.finish_reason}
        return [*self._first_events(sample), dumps(self._told([choice], sample))]

    def whole(self, samples: list[Sample]) -> Any:
        """All texts; the usage is that of the first."""
        choices = [
            {
                "text": self._prompt(sample) + sample.text,
                "index": sample.index,
                "logprobs": self._probs(sample, sample.with_probs, **self._echoed(sample)),
                "finish_reason": sample.finish_reason,
            }
            for sample in samples
        ]
        return self._told(choices, samples[0])

    def _first_events(self, sample: Sample) -> list[bytes]:
        if sample.index in self._n_told:
            return []
        text = self._prompt(sample)
        self._n_told[sample.index] = len(text)
        if self._echo is None:
            return []
        return [self._event(sample, text, self._probs(sample, [], **self._echoed(sample)))]

    def _event(self, sample: Sample, text: str, probs: dict[str, Any] | None) -> bytes:
        front = b'{"choices":[{"text":%b,"index":%d' % (dumps(text), sample.index)
        return b'%b,"logprobs":%b,"finish_reason":null}],%b' % (front, dumps_in_parts(probs), self._back)

    def _prompt(self, sample: Sample) -> str:
        return "" if self._echo is None else self._echo.text(sample.index)

    def _echoed(self, sample: Sample) -> dict[str, Any]:
        """What text_logprobs() takes of a prompt."""
        if self._echo is None or not sample.n_probs:
            return {}
        return {"asked": self._echo.pieces(sample.index), "prompt": self._prompt(sample)}

    def _probs(self, sample: Sample, said: list[Piece], **others: Any) -> dict[str, Any] | None:
        return text_logprobs(sample, said, self._vocabulary, **others) if sample.n_probs else None

    def _told(self, choices: list[dict[str, Any]], sample: Sample) -> dict[str, Any]:
        end = {"usage": sample.usage(), "id": self._id, "timings": sample.timings()}
        return {"choices": choices, **self._head, **end}
