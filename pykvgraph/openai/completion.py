"""/completion: llama-server's own form of an answer."""

from __future__ import annotations

import json
from typing import Any

from pykvgraph.openai.form import Form
from pykvgraph.openai.logprobs import logprobs_of
from pykvgraph.openai.sample import Sample
from pykvgraph.openai.vocabulary import Vocabulary
from pykvgraph.openai.wire_json import dumps
from pykvgraph.types import Piece


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
        self._held: dict[int, list[Piece]] = {}  # of samples whose text is not certain yet

    def events(self, sample: Sample, pieces: list[Piece]) -> list[bytes]:
        """One for each piece that has text."""
        front = f'{{"index":{sample.index},"content":'
        back = f'"tokens_evaluated":{len(sample.prompt)}'
        timings = f',"timings":{json.dumps(sample.timings())}' if self._with_timings else ""
        held = self._held.setdefault(sample.index, [])
        n_said = sample.n_said - len(pieces)
        found = []
        for piece in pieces:
            n_said += 1
            if piece.finish_reason != "stop":
                held.append(piece)
            if piece.text:
                text = json.dumps(piece.text, ensure_ascii=False)
                tokens = ",".join([str(each.token) for each in held])
                probs = (
                    f',"completion_probabilities":{dumps(self._probs(sample, held)).decode()}'
                    if sample.n_probs
                    else ""
                )
                event = (
                    f'{front}{text},"tokens":[{tokens}],"stop":false,"id_slot":-1,'
                    f'"tokens_predicted":{n_said},{back}{timings}{probs}}}'
                )
                found.append(event.encode("utf-8", "replace"))
                held.clear()
        return found

    def last_events(self, sample: Sample) -> list[bytes]:
        """The one with everything but the text."""
        return [dumps(self._chosen(self._told(sample, "", [])))]

    def whole(self, samples: list[Sample]) -> Any:
        """An object, or an array of them."""
        told = [self._chosen(self._whole(sample)) for sample in samples]
        return told[0] if len(told) == 1 else told

    def _whole(self, sample: Sample) -> dict[str, Any]:
        told = self._told(sample, sample.text, sample.tokens if self._with_tokens else [])
        if sample.n_probs:
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
