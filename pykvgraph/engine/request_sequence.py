"""One sample of a request: its tokens, how far they are decoded, and what was said."""

from __future__ import annotations

import bisect
import enum
import math
import time
from array import array
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pykvgraph.context.context import LastOutput
from pykvgraph.engine.context_window import Window
from pykvgraph.engine.earlier_texts import EarlierText
from pykvgraph.engine.fetch import Fetch
from pykvgraph.engine.own_rows import OwnRows
from pykvgraph.engine.speculation.gate import Acceptance
from pykvgraph.engine.speculation.lookup import Lookup
from pykvgraph.engine.types import CacheUse, Completion, Pin, PromptProgress, TextLook
from pykvgraph.model.adapter import Active, key_of
from pykvgraph.model.tokenizer import Tokenizer
from pykvgraph.params.params import SamplingParams
from pykvgraph.prefix.block import N_TOKENS
from pykvgraph.prefix.node import Node
from pykvgraph.sequence.output_text import OutputText
from pykvgraph.sequence.tokens import Tokens
from pykvgraph.tiers.rows import Saver
from pykvgraph.types import Piece


class Status(enum.Enum):
    """What a sample of a request is doing. Only one that runs has a sequence of the cache."""

    WAITING = "waiting"  # to run, again perhaps: one that was preempted waits, too
    LOADING = "loading"  # it runs, and rows come from a tier; nothing is decoded meanwhile
    PREFILL = "prefill"  # it runs, and more than its last token is to be decoded
    DECODE = "decode"  # it runs, and says a token a step
    PARKED = "parked"  # it waits for resume()
    DONE = "done"


class Tip(NamedTuple):
    """The token that a sequence decodes next, when its text says one a step."""

    token: int
    position: int
    seq: int


class SaidText(NamedTuple):
    """An answer: its text, its tokens but one that ended it, how many were sampled, what was likely of them.

    logprob: the sum of those of its pieces.
    """

    text: str
    tokens: tuple[int, ...]
    n: int
    logprob: float
    stopping_word: str


class CacheTerms(NamedTuple):
    """Of which other texts a text may have parts.

    key: the caller's salt. session: a digest of whose it is; b"": it has no name. edits: whether it may be an
    earlier text with other tokens in its midst, whose cells are approximate then. compressed: whether it may
    begin with a prefix of which only the best cells are left.
    """

    key: bytes = b""
    session: bytes = b""
    edits: bool = False
    compressed: bool = False


ANY_TERMS = CacheTerms()
COPIED_EVERY = 64  # positions of an answer from one resume point that copies get to the next


class SampleOwner(Protocol):
    """The request, as its samples know it."""

    _sequences: Sequence[RequestSequence]

    @property
    def done(self) -> bool:
        """Whether it has ended."""

    def _say(self, piece: Piece) -> None: ...

    def _report(self, progress: PromptProgress) -> None: ...

    def _complete(self, sample: int, completion: Completion) -> None: ...

    def _fail(self, error: BaseException) -> None: ...


class RequestSequence(Tokens):
    """One sample of a request: tokens that the engine decodes and continues.

    While it runs it has a sequence of the cache, `seq`. What it is doing, `status` tells.

    ids: the prompt, and what was said behind it; what its window gave up is not there any more.
    forks: other samples of the request that wait for its prompt; it needs n_seqs sequences, for them too.
    most_cells: cells that it and its forks take at most, if nobody shares any.
    last: the deepest node of the index that its text begins with.
    places: positions where a resume point is to be kept.
    is_compared: whether these have the positions where its text parts from others.
    spacing: at multiples of it, the prompt has a spare resume point, for which steps end there; 0: no step
    ends for one, and where one ends behind a whole block it has one.
    window: of a text that may become longer than its part of the cache.
    own: its rows, while it has shifted and does not run. n_left: decoded tokens that its last shift left it.
    n_beyond: tokens of a draft that its sequence has behind what is decoded.
    record, lookup: what became of its drafts, and what they are made of.
    fetch: what comes from outside the cells; meanwhile it decodes nothing.
    unsaid: its last outputs, while its grammar takes long to tell what may follow; it decodes nothing then.
    adapters: those that it is decoded under; they are in `salt`, too.
    salt: under which the index has its cells; exact_salt: while none of them is approximate.
    anew: of the first n_decoded tokens those that are to be decoded in place, before what comes behind them.
    has_holes: whether it begins with a compressed prefix, some of whose tokens have no cells.
    earlier: what others may know of it. use: where the tokens came from that the cache had.
    copies: gets what the index has of it, as it comes, n_copied tokens so far; None: nobody does.
    pins: parts of its prompt that stay for a time; pinned: how much of each does, once the prompt is decoded.
    """

    def __init__(
        self,
        request: SampleOwner,
        sample: int,
        prompt: npt.NDArray[np.int32],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        salt: bytes,
        window: Window | None = None,
        adapters: Active = (),
        copies: Saver | None = None,
        terms: CacheTerms = ANY_TERMS,
    ) -> None:
        super().__init__()
        self.ids.frombytes(prompt.tobytes())
        self.request = request
        self.priority = params.priority
        self.salt = self.exact_salt = salt
        self.terms = terms
        self.adapters = adapters
        self.anew: array[int] = array("i")
        self.has_holes = False
        self.earlier: EarlierText | None = None
        self.use = CacheUse()
        self.copies = copies
        self.n_copied = 0
        self.n_prompt = len(prompt)
        self.seq = -1
        self.forks: list[RequestSequence] = []
        self.fork_seqs: list[int] = []  # reserved for the forks
        self.last: Node | None = None
        self.pins: tuple[Pin, ...] = ()
        self.pinned: tuple[int, ...] = ()
        self.places: list[int] = []
        self.is_compared = False
        self.spacing = 0
        self.order = 0  # of arrival; the youngest has the highest
        self.n_idle = 0  # steps in which it did not advance
        self.n_beyond = 0
        self.own: OwnRows | None = None
        self.fetch: Fetch | None = None
        self.unsaid: list[LastOutput] | None = None
        self.record = Acceptance()
        self.lookup = Lookup()
        self.is_parked = False
        self.is_done = False
        self.ended: Literal["stop", "length"] | None = None  # before it has begun
        self.n_cached = -1  # tokens of the prompt that the cache had; -1: not known yet
        self.n_again = 0
        self._sample = sample
        self._max_tokens = params.max_tokens
        fills = window is not None and len(prompt) + params.max_tokens - 1 >= window.n_ctx
        self.window = window if fills else None
        self._n_discarded = self.n_left = 0
        self._prompt = self.ids[:] if self.window is not None else self.ids[:0]
        self._output = OutputText(params, tokenizer, sample)
        self._output.begin(prompt)
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._n_said = 0
        self._logprob = 0.0
        self._n_reported = -1  # tokens of the prompt
        self._submitted = time.perf_counter()
        self._entered = math.nan
        self._first = math.nan

    @property
    def runs(self) -> bool:
        """Whether it has a sequence."""
        return self.seq >= 0

    @property
    def status(self) -> Status:
        """What it is doing."""
        if self.is_done or self.request.done:
            return Status.DONE
        if self.is_parked:
            return Status.PARKED
        if not self.runs:
            return Status.WAITING
        if self.fetch is not None:
            return Status.LOADING
        return Status.PREFILL if self.n_todo > 1 else Status.DECODE

    @property
    def n_todo(self) -> int:
        """Tokens that are known and to be decoded."""
        return len(self.ids) - self.n_there

    @property
    def forgets(self) -> bool:
        """Whether its window forgets tokens by what they are worth."""
        return self.window is not None and self.window.forget is not None

    @property
    def n_findable(self) -> int:
        """How many of its tokens the cache may have for it: the last one is decoded for its output, and its
        window has room for so many."""
        n = len(self.ids) - 1
        return n if self.window is None else min(n, self.window.n_ctx - 1)

    @property
    def n_there(self) -> int:
        """How many of its tokens have cells that stay as they are."""
        return self.n_decoded - len(self.anew)

    @property
    def n_shareable(self) -> int:
        """As Tokens.n_shareable; nothing while tokens are to be decoded anew, or some have no cells."""
        return 0 if self.anew or self.has_holes else super().n_shareable

    @property
    def decodes(self) -> bool:
        """Whether all but its last token is decoded, so that it says one a step."""
        return self.n_todo == 1

    @property
    def n_may_say(self) -> int:
        """How many tokens more it says at most."""
        return self._max_tokens - self._n_said

    @property
    def n_seqs(self) -> int:
        """How many sequences it takes to run."""
        return 1 + len(self.forks)

    @property
    def n_rows(self) -> int:
        """How many tokens a step decodes of it, and samples behind, when it says one a step."""
        return 1

    @property
    def tips(self) -> list[Tip]:
        """These tokens."""
        return [Tip(self.ids[-1], self.n_decoded, self.seq)]

    @property
    def most_cells(self) -> int:
        """Cells of the whole text and of its forks; the last token of each is never decoded."""
        if self.window is not None:
            return self.window.n_ctx
        return self.n_prompt + (self._max_tokens - 1) * self.n_seqs

    def cells_to_take(self, n_has: int) -> int:
        """How many it may take yet, when the cache has so many of its tokens."""
        if self.window is not None and not self.has_shifted:
            return self.most_cells  # others may share what it has, so that a shift copies it
        return self.most_cells - n_has

    def enter(self, n_cached: int, n_again: int) -> None:
        """It begins to run, with so many tokens of its prompt in the cache; n_again: n_decoded_again."""
        self.n_cached, self.n_again = min(n_cached, self.n_prompt), n_again
        self._entered = time.perf_counter()
        self.report(self._entered)

    def report(self, now: float) -> None:
        """Tells how far the prompt is, until something is said; if it is farther than was told."""
        n = min(self.n_there + self._n_discarded, self.n_prompt)
        if not self._n_said and n > self._n_reported:
            self._n_reported = n
            seconds = now - self._entered
            self.request._report(PromptProgress(self.n_prompt, self.n_cached, n, seconds, self.pinned))

    def next_tokens(self, n: int) -> list[tuple[int, int]]:
        """The numbers of the next n that are decoded, in runs: (begin, end)."""
        if not self.anew:
            return [(self.n_decoded, self.n_decoded + n)]
        runs: list[tuple[int, int]] = []
        behind = range(self.n_decoded, self.n_decoded + max(n - len(self.anew), 0))
        for at in (*self.anew[:n], *behind):
            if runs and runs[-1][1] == at:
                runs[-1] = (runs[-1][0], at + 1)
            else:
                runs.append((at, at + 1))
        return runs

    def advance(self, n: int) -> None:
        """The next n of its tokens are decoded."""
        n_anew = min(n, len(self.anew))
        del self.anew[:n_anew]
        self.n_decoded += n - n_anew

    def edit(self, salt: bytes, n_decoded: int, anew: Iterable[int]) -> None:
        """Its sequence has parts of an earlier text."""
        self.begin(n_decoded)
        self.salt, self.anew = salt, array("i", anew)

    def empty(self) -> None:
        """Its sequence has nothing any more."""
        if self.earlier is not None:
            self.earlier.n_read = max(self.earlier.n_read, self.n_shareable)
        self.n_decoded = self.n_beyond = 0
        self.anew = array("i")
        self.has_holes = False
        if self.own is None:  # those are as they were
            self.salt = self.exact_salt

    def known_as(self) -> EarlierText:
        """What others may know of it."""
        adapters, terms = key_of(self.adapters), self.terms
        return EarlierText(self.ids, self.salt, terms.key, terms.session, adapters, self.order)

    def discard(self, begin: int, end: int) -> None:
        """As Tokens.discard()."""
        super().discard(begin, end)
        self._n_discarded += end - begin
        self.n_left = self.n_decoded
        self.lookup = Lookup()  # which knows where the tokens were

    def read_ids(self) -> array[int]:
        """Its decoded tokens, also those that its window gave up."""
        whole = self._prompt + array("i", self._tokens)
        return whole[: self.n_decoded + self._n_discarded]

    def go_on_from(self, ids: array[int], n: int, n_true: int, n_left: int, own: OwnRows) -> None:
        """A text before it ran has read its first n tokens, and has left rows of these ids of them."""
        self.ids = ids + self.ids[n:]
        self.n_true, self.n_left, self.own = n_true, n_left, own
        self._n_discarded = n - len(ids)

    def go_back(self) -> None:
        """As it was before go_on_from(): it has read nothing."""
        self.begin(0)
        self.ids = self._prompt + array("i", self._tokens)
        self._n_discarded = self.n_left = 0

    def follow(self, other: RequestSequence) -> None:
        """It begins to run as a fork of another one, and has what that one has."""
        self.n_decoded, self.last, self.n_copied = other.n_decoded, other.last, other.n_copied
        self.salt, self.use, self.has_holes = other.salt, other.use, other.has_holes
        self.n_cached, self.n_again, self._entered = other.n_cached, other.n_again, other._entered
        self.pinned = other.pinned

    def add_place(self, position: int) -> None:
        """A resume point is to be kept at this position, unless it has passed."""
        at = bisect.bisect_left(self.places, position)
        if self.n_decoded < position < len(self.ids) and self.places[at : at + 1] != [position]:
            self.places.insert(at, position)

    def next_stop(self) -> int:
        """How many tokens at most the next step may decode of it, because of its places and its window.

        A text that filled its window and was preempted is shifted before its last token is decoded, as it
        would have been without that.
        """
        while self.places and self.places[0] <= self.n_decoded:
            del self.places[0]
        n = self.n_todo
        if self.window is not None:
            n = min(n, self.window.n_ctx - 1 - self.n_there)
        if self.places:
            n = min(n, self.places[0] - self.n_decoded)
        if self.spacing:
            n = min(n, self.spacing - self.n_decoded % self.spacing)
        return n

    @property
    def is_at_place(self) -> bool:
        """Whether it has come to a place where a resume point is to be kept."""
        return bool(self.places) and self.places[0] == self.n_decoded

    @property
    def is_at_spare_place(self) -> bool:
        """Whether it has come to a place where a spare resume point is to be kept.

        They are in its prompt, and in an answer that is copied.
        """
        if self.n_decoded >= self.n_prompt:
            return self.copies is not None and self.n_decoded % COPIED_EVERY == 0
        return self.n_decoded % (self.spacing or N_TOKENS) == 0

    def look(self, now: float) -> TextLook:
        """How far it is."""
        return TextLook(
            request=self.order,
            sample=self._sample,
            n_texts=self.n_seqs,
            seq=self.seq,
            n_prompt=self.n_prompt,
            n_cached=self.n_cached,
            n_decoded=self.n_there,
            n_said=self._n_said,
            seconds=now - self._submitted,
            status=self.status.value,
        )

    def can_say(self, seconds: float) -> bool:
        """Whether say() needn't wait for a grammar; waits so long. Raises as OutputText.ready does."""
        return self._output.ready(seconds)

    def say(self, outputs: Sequence[LastOutput], now: float) -> Literal["stop", "length"] | None:
        """Hands out the next token; returns why it was the last, or None. Raises as OutputText.say does.

        outputs: n_rows of them.
        """
        return self._add(self._output.say(outputs[0]), now)

    def start_over(self) -> None:
        """It has lost its sequence, and is to run again: what it has said, it goes on with."""

    def repeat(self, said: Iterable[int], n_vocab: int) -> None:
        """Hands out tokens of the answer that were chosen elsewhere; it goes on behind them, or has ended."""
        for token in said:
            piece = self._output.repeat(token, n_vocab)
            self.ended = None if piece is None else self._add(piece, time.perf_counter())
            if piece is None or self.ended:
                return

    def _add(self, piece: Piece, now: float) -> Literal["stop", "length"] | None:
        if math.isnan(self._first):
            self._first = now
        self._n_said += 1
        self._logprob += piece.logprob
        self._texts.append(piece.text)
        if piece.finish_reason != "stop":
            self.ids.append(piece.token)
            self._tokens.append(piece.token)
        self.request._say(piece)
        return piece.finish_reason

    def cancel(self, now: float) -> None:
        """It ends, and so do its forks."""
        for each in (self, *self.forks):
            each.end("cancelled", now)

    def end(self, reason: Literal["stop", "length", "cancelled"], now: float) -> None:
        """Hands out the completion."""
        self.is_done = True
        word = self._output.stopping_word
        said = SaidText("".join(self._texts), tuple(self._tokens), self._n_said, self._logprob, word)
        self._complete(self._sample, said, reason, now)

    def _complete(
        self, sample: int, said: SaidText, reason: Literal["stop", "length", "cancelled"], now: float
    ) -> None:
        completion = Completion(
            text=said.text,
            tokens=said.tokens,
            finish_reason=reason,
            n_prompt=self.n_prompt,
            n_cached=max(self.n_cached, 0),
            n_decoded_again=self.n_again,
            ttft=self._first - self._submitted,
            seconds=now - self._submitted,
            stopping_word=said.stopping_word,
            n_said=said.n,
            waited=self._entered - self._submitted,
            n_discarded=self._n_discarded,
            drafted=self.record.drafted,
            accepted=self.record.accepted,
            logprob=said.logprob,
            cache=self.use,
            pinned=self.pinned,
        )
        self.request._complete(sample, completion)
