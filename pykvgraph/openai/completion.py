"""/completion: llama-server's own form of an answer."""

from __future__ import annotations

import json
from typing import Any

from pykvgraph.openai.echo import Echo
from pykvgraph.openai.form import MANY_PROBS, Form, new_id, now
from pykvgraph.openai.held_pieces import HeldPieces
from pykvgraph.openai.logprobs import logprobs_of
from pykvgraph.openai.sample import Sample, usage_of
from pykvgraph.openai.text_logprobs import text_logprobs
from pykvgraph.openai.vocabulary import Vocabulary
from pykvgraph.openai.wire_json import dumps, dumps_in_parts
from pykvgraph.types import Piece


class TextForm(Form):
    """model: its name, as the answer tells it. fingerprint: of the program. echo: what answers begin with.

    with_usage: a stream ends with that of all texts, as OpenAI's; otherwise each text's last event has its
    own, as llama-server's.
    details: tells how the answer was made, as `__verbose`; None: nobody wants to know.
    """

    closing = b"data: [DONE]\n\n"

    def __init__(
        self,
        model: str,
        fingerprint: str,
        vocabulary: Vocabulary,
        echo: Echo | None = None,
        *,
        with_usage: bool = False,
        details: CompletionForm | None = None,
        with_timings: bool = False,
    ) -> None:
        self._head = {
            "created": now(),
            "model": model,
            "system_fingerprint": fingerprint,
            "object": "text_completion",
        }
        self._vocabulary = vocabulary
        self._echo = echo
        self._with_usage = with_usage
        self._details = details
        self._with_timings = with_timings
        self.is_long = echo is not None and echo.n_probs > MANY_PROBS
        self._n_told: dict[int, int] = {}  # characters of each answer, in a stream
        self._held = HeldPieces()  # of samples whose probabilities are told
        self._id = new_id()
        self._back = dumps({**self._head, "id": self._id})[1:]

    def events(self, sample: Sample, pieces: list[Piece]) -> list[bytes]:
        """One for each piece that has text, behind one for the prompt if answers begin with it."""
        told = self._first_events(sample)
        for piece in pieces:
            if sample.tells_probs:
                self._held.add(sample, piece)
            if piece.text:
                probs = self._probs_of(sample, self._held.take(sample))
                told.append(self._event(sample, piece.text, probs, self._with_timings))
                self._n_told[sample.index] += len(piece.text)
        return told

    def progress_events(self, sample: Sample) -> list[bytes]:
        """One without text."""
        choice = {"text": "", "index": sample.index, "logprobs": None, "finish_reason": None}
        progress = sample.prompt_progress()
        told = {"choices": [choice], **self._head, "id": self._id, "prompt_progress": progress}
        return [dumps(told | ({"timings": sample.timings()} if self._with_timings else {}))]

    def last_events(self, sample: Sample) -> list[bytes]:
        """Why it ended."""
        first = self._first_events(sample)
        probs = self._probs_of(sample, self._held.take_last(sample))
        choice = {"text": "", "index": sample.index, "logprobs": probs, "finish_reason": sample.finish_reason}
        details = {} if self._details is None else {"__verbose": self._details.last(sample)}
        if self._with_usage:
            return [*first, dumps({"choices": [choice], **self._head, "id": self._id, **details})]
        return [*first, dumps({**self._told([choice], [sample]), **details})]

    def end(self, samples: list[Sample]) -> list[bytes]:
        """The usage of all, if that was asked for."""
        return [dumps(self._told([], samples))] if self._with_usage else []

    def whole(self, samples: list[Sample]) -> Any:
        """All texts."""
        choices = [
            {
                "text": self._prompt(sample) + sample.text,
                "index": sample.index,
                "logprobs": self._probs(sample, sample.with_probs, **self._echoed(sample)),
                "finish_reason": sample.finish_reason,
            }
            for sample in samples
        ]
        told = self._told(choices, samples)
        if self._details is not None:
            told["__verbose"] = self._details.whole(samples[:1])
        return told

    def _first_events(self, sample: Sample) -> list[bytes]:
        if sample.index in self._n_told:
            return []
        text = self._prompt(sample)
        self._n_told[sample.index] = len(text)
        if self._echo is None:
            return []
        return [self._event(sample, text, self._probs(sample, [], **self._echoed(sample)))]

    def _event(
        self, sample: Sample, text: str, probs: dict[str, Any] | None, with_timings: bool = False
    ) -> bytes:
        front = b'{"choices":[{"text":%b,"index":%d' % (dumps(text), sample.index)
        timings = b'"timings":%b,' % dumps(sample.timings()) if with_timings else b""
        end = timings + self._back
        return b'%b,"logprobs":%b,"finish_reason":null}],%b' % (front, dumps_in_parts(probs), end)

    def _prompt(self, sample: Sample) -> str:
        return "" if self._echo is None else self._echo.text(sample.index)

    def _echoed(self, sample: Sample) -> dict[str, Any]:
        """What text_logprobs() takes of a prompt."""
        if self._echo is None or not sample.tells_probs:
            return {}
        return {"asked": self._echo.pieces(sample.index), "prompt": self._prompt(sample)}

    def _probs(self, sample: Sample, said: list[Piece], **others: Any) -> dict[str, Any] | None:
        return text_logprobs(sample, said, self._vocabulary, **others) if sample.tells_probs else None

    def _probs_of(self, sample: Sample, held: list[Piece]) -> dict[str, Any] | None:
        """Of all tokens that came by now, and are not told yet."""
        return self._probs(sample, held, offset=self._n_told[sample.index]) if held else None

    def _told(self, choices: list[dict[str, Any]], samples: list[Sample]) -> dict[str, Any]:
        end = {"usage": usage_of(samples), "id": self._id, "timings": samples[-1].timings()}
        return {"choices": choices, **self._head, **end}


class CompletionForm(Form):
    """fields: the only ones that the answer has; none: all. with_tokens: tokens are told without a stream."""

    closing = b""

    def __init__(
        self,
        model: str,
        vocabulary: Vocabulary,
        *,
        with_tokens: bool = False,
        with_timings: bool = False,
        fields: tuple[str, ...] = (),
    ) -> None:
        self._model = model
        self._vocabulary = vocabulary
        self._with_tokens = with_tokens
        self._with_timings = with_timings
        self._fields = fields
        self._held = HeldPieces()

    def events(self, sample: Sample, pieces: list[Piece]) -> list[bytes]:
        """One for each piece that has text."""
        front = f'{{"index":{sample.index},"content":'
        back = f'"tokens_evaluated":{len(sample.prompt)}'
        timings = f',"timings":{json.dumps(sample.timings())}' if self._with_timings else ""
        n_said = sample.n_said - len(pieces)
        found = []
        for piece in pieces:
            n_said += 1
            self._held.add(sample, piece)
            if piece.text:
                held = self._held.take(sample)
                text = json.dumps(piece.text, ensure_ascii=False)
                tokens = ",".join([str(each.token) for each in held])
                probs = (
                    f',"completion_probabilities":{dumps(self._probs(sample, held)).decode()}'
                    if sample.tells_probs
                    else ""
                )
                event = (
                    f'{front}{text},"tokens":[{tokens}],"stop":false,"id_slot":-1,'
                    f'"tokens_predicted":{n_said},{back}{timings}{probs}}}'
                )
                found.append(event.encode("utf-8", "replace"))
        return found

    def progress_events(self, sample: Sample) -> list[bytes]:
        """One without text."""
        told = {"index": sample.index, "content": "", "tokens": [], "stop": False, "id_slot": -1}
        told |= {"tokens_predicted": 0, "tokens_evaluated": len(sample.prompt)}
        timings = {"timings": sample.timings()} if self._with_timings else {}
        return [dumps({**told, **timings, "prompt_progress": sample.prompt_progress()})]

    def last_events(self, sample: Sample) -> list[bytes]:
        """The one with everything but the text."""
        return [dumps(self.last(sample))]

    def last(self, sample: Sample) -> dict[str, Any]:
        """That event."""
        told = self._told(sample, "", [])
        if sample.tells_probs and (held := self._held.take_last(sample)):
            told["completion_probabilities"] = self._probs(sample, held)
        return self._chosen(told)

    def whole(self, samples: list[Sample]) -> Any:
        """An object, or an array of them."""
        told = [self._chosen(self._whole(sample)) for sample in samples]
        return told[0] if len(told) == 1 else told

    def _whole(self, sample: Sample) -> dict[str, Any]:
        told = self._told(sample, sample.text, sample.tokens if self._with_tokens else [])
        if sample.tells_probs:
            told["completion_probabilities"] = self._probs(sample, sample.with_probs)
        return told

    def _probs(self, sample: Sample, pieces: list[Piece]) -> list[dict[str, Any]]:
        return [logprobs_of(sample, piece, self._vocabulary) for piece in pieces]

    def _told(self, sample: Sample, content: str, tokens: list[int]) -> dict[str, Any]:
        return {
            "index": sample.index,
            "content": content,
            "tokens": tokens,
            "id_slot": sample.slot,
            "stop": True,
            "model": self._model,
            "tokens_predicted": sample.n_said,
            "tokens_evaluated": len(sample.prompt),
            "generation_settings": sample.settings,
            "prompt": self._vocabulary.text(sample.prompt),
            "has_new_line": "\n" in sample.text,
            "truncated": sample.truncated,
            "stop_type": sample.stop_type,
            "stopping_word": sample.stopped_by,
            "tokens_cached": len(sample.prompt) + sample.n_said - 1 - sample.n_discarded,
            "timings": sample.timings(),
        }

    def _chosen(self, told: dict[str, Any]) -> dict[str, Any]:
        """The fields that were asked for; `a/b` is b of the object a."""
        if not self._fields:
            return told
        found = {}
        for name in self._fields:
            value: Any = told
            for part in name.split("/"):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                found[name] = value
        return found
