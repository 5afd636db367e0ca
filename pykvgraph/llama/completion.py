"""create_completion: a prompt's tokens, what is said behind them, where it ends, and the chunks of it."""

from __future__ import annotations

import time
import uuid
import warnings
from collections.abc import Iterator
from typing import Any

from pykvgraph.errors import InvalidArgumentError, UnsupportedError
from pykvgraph.llama import responses
from pykvgraph.llama.logprobs import Logprobs
from pykvgraph.llama.request import CompletionRequest
from pykvgraph.llama.session import LlamaSession
from pykvgraph.llama.vocabulary import LlamaVocabulary
from pykvgraph.sequence.detokenizer import overlap


class CompletionText:
    """The tokens that follow a prompt, and the text that they add.

    room: cells behind the prompt; the text ends there at the latest.
    """

    def __init__(self, vocabulary: LlamaVocabulary, request: CompletionRequest, room: int) -> None:
        self._vocabulary = vocabulary
        self._stops = request.stops()
        self._longest = max(map(len, self._stops), default=1)
        self.tokens: list[int] = []
        self.ends: list[int] = []  # where the text of each token ends
        self.data = b""
        self.length: int | None = None  # of the text, once a stop string ended it
        self.finish_reason: str | None = None
        # after an empty prompt, BOS counts as said, and SentencePiece's space behind it is left out
        self._begins = len(request.prompt) == 0
        self.n_counted = int(self._begins)
        limit = request.max_tokens if request.max_tokens is not None and request.max_tokens > 0 else room
        self._max_tokens = min(limit, room)
        self._room = room

    def add(self, token: int) -> None:
        """The next token; finish_reason is set when it ends the text."""
        if self._vocabulary.is_eog(token):
            self.finish_reason = "stop"
            return
        piece = self._vocabulary.piece(token)
        if self._begins and not self.data:
            piece = piece.removeprefix(b" ")
        before = len(self.data)
        self.data += piece
        self.tokens.append(token)
        self.ends.append(len(self.data))
        self.n_counted += 1
        if is_cut(self.data) and self.n_counted < self._room:
            return  # the end is looked for between characters
        tail = max(0, before - self._longest - 3)  # 3: bytes of a character that were passed over
        for stop in self._stops:
            at = self.data.find(stop, tail)
            if at >= 0:
                self.finish_reason, self.length = "stop", at
                return
        if self.n_counted >= self._max_tokens:
            self.finish_reason = "length"

    @property
    def text(self) -> str:
        """The text so far, without a stop string."""
        return self.data[: self.length].decode("utf-8", "ignore")

    def held_back(self) -> int:
        """How many bytes at the end may become a stop string."""
        return max((overlap(self.data, stop) for stop in self._stops), default=0)


def is_cut(data: bytes) -> bool:
    """Whether the last character is there in part."""
    for n in range(1, min(3, len(data)) + 1):
        byte = data[-n]
        if byte >= 0xC0:  # a first byte, which says how many there are
            return n < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return False
    return False


def complete(session: LlamaSession, request: CompletionRequest, spm_infill: bool) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed completion, or one dictionary. Nothing is done before one is asked for."""
    prompt = prompt_tokens(session, request, spm_infill)
    if len(prompt) >= session.n_ctx():
        raise InvalidArgumentError(
            f"the prompt's {len(prompt)} tokens exceed the context window of {session.n_ctx()}, where one "
            "more must fit: open the Llama with a larger n_ctx"
        )
    if request.logprobs is not None and not session._logits_all:
        raise InvalidArgumentError("logprobs: open the Llama with logits_all=True")
    said = CompletionText(session._vocabulary, request, session.n_ctx() - len(prompt))
    head = responses.CompletionHeader(f"cmpl-{uuid.uuid4()}", int(time.time()), request.model)
    found = Logprobs(session, request, prompt, said.tokens)
    session._recall(prompt)
    session._next_seed(request.seed)
    n_returned = 0
    sampler = session._sampler(temp=request.temperature, **vars(request))
    for token in session._generated(prompt, sampler, True, request.stopping_criteria):
        said.add(token)
        if request.stream and said.finish_reason != "stop":
            for begin, end in _ready(said, n_returned, len(said.data) - said.held_back()):
                yield head.chunk(_text(said, begin, end), found.of(begin, end) if found else None)
                n_returned = end
        if said.finish_reason is not None:
            break
    else:  # stopping_criteria
        said.finish_reason = "stop"
    if said.finish_reason == "stop":
        session.kv.set_pending_token(0, None)  # it is no part of the text
    if request.stream:
        for begin, end in _rest(said, n_returned):
            yield head.chunk(_text(said, begin, end), found.of(begin, end) if found else None)
        yield head.chunk("", None, said.finish_reason)
    session._keep([*prompt, *said.tokens])
    if not request.stream:
        yield _whole(session, request, head, prompt, said, found)


def _whole(
    session: LlamaSession,
    request: CompletionRequest,
    head: responses.CompletionHeader,
    prompt: list[int],
    said: CompletionText,
    found: Logprobs,
) -> dict[str, Any]:
    text = said.text
    if request.echo:
        given = request.prompt
        if not isinstance(given, str):
            given = session.detokenize(given).decode("utf-8", "ignore")
        text = given + text
    return head.completion(
        text, found.whole() if found else None, said.finish_reason, len(prompt), said.n_counted
    )


def _ready(said: CompletionText, begin: int, certain: int) -> Iterator[tuple[int, int]]:
    """Runs of tokens from `begin` on that are whole characters, as far as the text is certain."""
    for end in range(begin + 1, len(said.tokens) + 1):
        if said.ends[end - 1] > certain:
            return
        try:
            said.data[_start(said, begin) : said.ends[end - 1]].decode()
        except UnicodeDecodeError:
            continue
        yield begin, end
        begin = end


def _rest(said: CompletionText, begin: int) -> Iterator[tuple[int, int]]:
    """Runs of tokens from `begin` on up to the end of the text, which may lie within the last run."""
    end_of_text = len(said.data) if said.length is None else said.length
    first = begin
    for run in _ready(said, begin, end_of_text):
        yield run
        begin = run[1]
    if begin < len(said.tokens) and (begin == first or _start(said, begin) < end_of_text):
        yield begin, len(said.tokens)


def _start(said: CompletionText, token: int) -> int:
    return said.ends[token - 1] if token else 0


def _text(said: CompletionText, begin: int, end: int) -> str:
    """The text of some tokens, as far as it comes before a stop string."""
    return said.data[: said.length][_start(said, begin) : said.ends[end - 1]].decode("utf-8", "ignore")


def prompt_tokens(session: LlamaSession, request: CompletionRequest, spm_infill: bool) -> list[int]:
    """The prompt as token ids, with what the model wants around a text unless ids were given."""
    prompt = request.prompt
    if isinstance(prompt, (bytes, bytearray)):  # whose items would be taken for token ids
        raise TypeError(f"prompt must be a str or a list of token ids, got {type(prompt).__name__}")
    if request.suffix:
        return _infill(session, request, spm_infill)
    if not isinstance(prompt, str):
        return [int(token) for token in prompt]
    tokens = session.tokenize(prompt.encode(), add_bos=True, special=True)
    if len(tokens) > 1 and tokens[:2] == [session.token_bos()] * 2:
        warnings.warn(
            "the prompt begins with the text of BOS, which is added anyway: leave it out",
            RuntimeWarning,
            stacklevel=5,
        )
    return tokens


def _infill(session: LlamaSession, request: CompletionRequest, spm_infill: bool) -> list[int]:
    """Prefix and suffix, with the tokens that say which is which; what is said comes between them."""
    vocabulary = session._vocabulary
    pre, suf, mid = (vocabulary.special(f"fim_{part}") for part in ("pre", "suf", "mid"))
    if min(pre, suf, mid) < 0:
        raise UnsupportedError(
            "suffix: this model has no tokens for filling in between a prefix and a suffix"
        )
    given = request.prompt
    prefix = session.tokenize(given.encode(), False, False) if isinstance(given, str) else list(given)
    suffix = vocabulary._tokenizer.encode(request.suffix or "", False, add_space_prefix=False)
    bos = [tokens[0]] if (tokens := session.tokenize(b"", add_bos=True)) else []
    if spm_infill:
        return [*bos, suf, *suffix, pre, *prefix, mid]
    return [*bos, pre, *prefix, suf, *suffix, mid]
