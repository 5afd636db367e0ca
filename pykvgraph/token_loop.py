"""The token loop: decodes a prompt, then samples a token, decodes it, samples the next, and so on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pykvgraph.checks import Integers, integer, integers, shown
from pykvgraph.context import Context
from pykvgraph.context_shift import ContextShift
from pykvgraph.errors import InvalidArgumentError, KVGraphError, UnsupportedError
from pykvgraph.feed import Feed
from pykvgraph.params import SamplingParams
from pykvgraph.text.sampling import Sampler
from pykvgraph.text.text_stream import TextStream
from pykvgraph.types import Piece


def generate(
    ctx: Context,
    prompt: str | Integers,
    *,
    seq: int = 0,
    max_tokens: int = SamplingParams.max_tokens,
    temperature: float = SamplingParams.temperature,
    top_k: int = SamplingParams.top_k,
    top_p: float = SamplingParams.top_p,
    min_p: float = SamplingParams.min_p,
    seed: int | None = SamplingParams.seed,
    stop: str | Iterable[str] = SamplingParams.stop,
    on_full: ContextShift | None = None,
) -> Iterator[Piece]:
    """Decodes a prompt and continues it; an iterator with one Piece for each sampled token.

    The prompt is appended to what sequence `seq` already has in the cache; nothing is cleared. When it is a
    str, it is tokenized: the tokens that the model wants before a text (BOS) are added only if the sequence
    is empty, and text that spells a control token stays text. Where Tokenizer.space_prefix is True, a space
    comes before the text, also when the sequence is not empty. Token ids are decoded as they are.

    When a piece is returned, its own token is not in the cache yet, but all tokens before it are. So to go on
    after the last piece, let the next prompt begin with `piece.token`, unless that token ended the text.

    A model without a tokenizer (Model.has_tokenizer) takes token ids only; the pieces have no text, and no
    token ends the generation.

    The last piece has finish_reason "length" after max_tokens tokens, or "stop" at an end-of-generation token
    or a stop string; the stop string is not part of the text. temperature, top_k, top_p, min_p and seed: as
    in Sampler.

    on_full: the policy that makes room when the cache is full; it removes tokens of sequence `seq` only.
    Without it a full cache raises CacheFullError; if the prompt doesn't fit, none of it is decoded. Several
    threads may generate on one context, each in its own sequence.

    Raises at once InvalidArgumentError for a bad argument, and UnsupportedError for a str prompt or stop
    strings where the model has no tokenizer; later, in the iteration, what Context.decode
    raises, CacheFullError when on_full can't make room, and KVGraphError when the model's logits are not
    finite.
    """
    if not isinstance(ctx, Context):
        raise InvalidArgumentError(f"ctx must be a pykvgraph.Context, got {shown(ctx)}")
    if not isinstance(prompt, str):
        prompt = _not_empty(integers(prompt, "prompt", 0))
    seq = integer(seq, "seq", 0, ctx.n_seq_max - 1)
    if on_full is not None and not isinstance(on_full, ContextShift):
        raise InvalidArgumentError(f"on_full must be a pykvgraph.ContextShift or None, got {shown(on_full)}")
    if isinstance(prompt, str) and not ctx.model.has_tokenizer:
        _ = ctx.model.tokenizer  # what it raises, at once
    chosen = SamplingParams(max_tokens, temperature, top_k, top_p, min_p, seed, stop)
    if chosen.stop and not ctx.model.has_tokenizer:
        raise UnsupportedError("stop: the model has no tokenizer, so its tokens have no text to stop at")
    sampler = Sampler(chosen.temperature, chosen.top_k, chosen.top_p, chosen.min_p, chosen.seed)
    feed = Feed(ctx, seq, on_full)
    return _loop(feed, prompt, chosen.max_tokens, sampler, TextStream(chosen.stop))


def _loop(
    feed: Feed,
    prompt: str | npt.NDArray[np.int32],
    max_tokens: int,
    sampler: Sampler,
    stream: TextStream,
) -> Iterator[Piece]:
    ids: Sequence[int] | npt.NDArray[np.int32] = _prompt_ids(feed, prompt)
    model = feed.ctx.model
    tokenizer = model.tokenizer if model.has_tokenizer else None
    # SentencePiece puts a space before the first word of a text; the user's text doesn't have it
    at_start = tokenizer is not None and tokenizer.space_prefix and int(ids[-1]) == tokenizer.bos
    for left in range(max_tokens - 1, -1, -1):
        last = feed.append(ids, copy_logits=not sampler.greedy)
        if not math.isfinite(last.log_sum):
            raise KVGraphError("the logits are broken: one is no number, or the largest is infinite")
        token, score = last.best, last.best_logprob
        if not sampler.greedy:
            token = sampler.sample(last.logits)
            score = float(last.logits[token]) - last.log_sum
        piece = b""
        # a model may have more rows than its tokenizer has tokens
        if tokenizer is not None and token < tokenizer.n_vocab:
            if tokenizer.is_eog(token):
                yield Piece(stream.finish(), token, score, "stop")
                return
            piece = tokenizer.token_to_piece(token)
        text = stream.feed(piece.removeprefix(b" ") if at_start else piece)
        if stream.stopped:
            yield Piece(text, token, score, "stop")
            return
        if left == 0:
            yield Piece(text + stream.finish(), token, score, "length")
            return
        yield Piece(text, token, score, None)
        at_start = False
        ids = [token]


def _prompt_ids(feed: Feed, prompt: str | npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    if not isinstance(prompt, str):
        return prompt
    empty = feed.ctx.kv.seq_pos_max(feed.seq) < 0
    return _not_empty(np.array(feed.ctx.model.tokenizer.encode(prompt, add_special=empty), np.int32))


def _not_empty(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    if len(ids) == 0:
        raise InvalidArgumentError(
            "the prompt is empty: it takes a token to say what comes after it. To go on after a generation, "
            "give the last piece's token"
        )
    return ids
