"""Log probabilities of a completion's tokens, as OpenAI's interface has them."""

from __future__ import annotations

from typing import Any

from pykvgraph.llama.request import CompletionRequest
from pykvgraph.llama.session import LlamaSession
from pykvgraph.sampling.sampler import likeliest


class Logprobs:
    """Reads log probabilities off the scores of a Llama; false when the request wants none.

    said: the tokens behind the prompt; the caller appends to them.
    """

    def __init__(
        self, session: LlamaSession, request: CompletionRequest, prompt: list[int], said: list[int]
    ) -> None:
        self._session = session
        self._request = request
        self._prompt = prompt
        self._said = said

    def __bool__(self) -> bool:
        return self._request.logprobs is not None

    def of(self, begin: int, end: int) -> dict[str, Any]:
        """Those of a chunk: the tokens that were said from begin to end - 1."""
        return self._told(len(self._prompt), self._said, range(begin, end), len(self._request.prompt))

    def whole(self) -> dict[str, Any]:
        """Those of all that was said, with echo of the prompt too."""
        prompt, said = self._prompt, self._said
        if not self._request.echo:
            return self._told(len(prompt), said, range(len(said)), len(self._request.prompt))
        skipped = int(prompt[:1] == [self._session.token_bos()])
        tokens = [*prompt[skipped:], *said]
        told = self._told(skipped, tokens, range(len(tokens)), 0)
        if tokens:
            told["token_logprobs"][0] = told["top_logprobs"][0] = None
        return told

    def _told(self, position: int, tokens: list[int], which: range, offset: int) -> dict[str, Any]:
        """position: of the first of the tokens in the text. offset: where its characters begin."""
        told: dict[str, list[Any]] = {
            "tokens": [],
            "text_offset": [],
            "token_logprobs": [],
            "top_logprobs": [],
        }
        texts = [self._text(token) for token in tokens[: which.stop]]
        for index in which:
            token = tokens[index]
            row = self._row(position + index - 1)
            told["tokens"].append(texts[index])
            told["text_offset"].append(offset + sum(map(len, texts[:index])))
            told["token_logprobs"].append(None if row is None else float(row[token]))
            told["top_logprobs"].append(None if row is None else self._top(row, token))
        return told

    def _row(self, position: int) -> Any:
        """The log probabilities after the token at a position; None when there is none."""
        if not 0 <= position < self._session.n_tokens:
            return None
        return self._session.logits_to_logprobs(self._session.scores[position])

    def _top(self, row: Any, token: int) -> dict[str, float]:
        """The likeliest tokens, the highest id first among equals, and the one that was said."""
        top = {self._text(i): value for i, value in likeliest(row, self._request.logprobs or 0)}
        top[self._text(token)] = float(row[token])
        return top

    def _text(self, token: int) -> str:
        if token >= self._session.n_vocab():
            return ""
        return self._session.detokenize([token]).decode("utf-8", "ignore")
