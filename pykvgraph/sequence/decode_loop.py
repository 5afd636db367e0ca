"""The token loop: decodes a prompt, then samples a token, decodes it, samples the next, and so on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pykvgraph.checks import Integers, integer, integers, shown
from pykvgraph.context.batch import Batch
from pykvgraph.context.context import Context, LastOutput
from pykvgraph.context.context_shift import ContextShift
from pykvgraph.context.forgetting import Forget
from pykvgraph.errors import CacheFullError, InvalidArgumentError, UnsupportedError
from pykvgraph.params.params import SamplingParams, ThoughtLimit, params_of
from pykvgraph.sequence.decode_text import decode_text
from pykvgraph.sequence.lookahead import Lookahead
from pykvgraph.sequence.output_text import OutputText
from pykvgraph.sequence.prefill import Prefill
from pykvgraph.types import Piece, ShiftReport


def generate(
    ctx: Context,
    prompt: str | Integers | Sequence[str | Integers],
    *,
    seq: int = 0,
    max_tokens: int = SamplingParams.max_tokens,
    temperature: float = SamplingParams.temperature,
    top_k: int = SamplingParams.top_k,
    top_p: float = SamplingParams.top_p,
    min_p: float = SamplingParams.min_p,
    seed: int | None = SamplingParams.seed,
    stop: str | Iterable[str] = SamplingParams.stop,
    typical_p: float = SamplingParams.typical_p,
    top_n_sigma: float = SamplingParams.top_n_sigma,
    xtc_probability: float = SamplingParams.xtc_probability,
    xtc_threshold: float = SamplingParams.xtc_threshold,
    dynatemp_range: float = SamplingParams.dynatemp_range,
    dynatemp_exponent: float = SamplingParams.dynatemp_exponent,
    repeat_penalty: float = SamplingParams.repeat_penalty,
    frequency_penalty: float = SamplingParams.frequency_penalty,
    presence_penalty: float = SamplingParams.presence_penalty,
    penalty_last_n: int = SamplingParams.penalty_last_n,
    dry_multiplier: float = SamplingParams.dry_multiplier,
    dry_base: float = SamplingParams.dry_base,
    dry_allowed_length: int = SamplingParams.dry_allowed_length,
    dry_penalty_last_n: int = SamplingParams.dry_penalty_last_n,
    dry_sequence_breakers: Iterable[str] = SamplingParams.dry_sequence_breakers,
    mirostat: int = SamplingParams.mirostat,
    mirostat_tau: float = SamplingParams.mirostat_tau,
    mirostat_eta: float = SamplingParams.mirostat_eta,
    min_keep: int = SamplingParams.min_keep,
    samplers: Iterable[str] = SamplingParams.samplers,
    adaptive_target: float = SamplingParams.adaptive_target,
    adaptive_decay: float = SamplingParams.adaptive_decay,
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = SamplingParams.logit_bias,
    grammar: str | None = SamplingParams.grammar,
    json_schema: str | Mapping[str, Any] | None = SamplingParams.json_schema,
    thoughts: ThoughtLimit | None = SamplingParams.thoughts,
    on_full: ContextShift | Forget | None = None,
    draft: Context | Literal["mtp"] | None = None,
    draft_max: int = 16,
) -> Iterator[Piece]:
    """Decodes a prompt and continues it; an iterator with one Piece for each sampled token.

    The prompt is appended to what sequence `seq` already has in the cache; nothing is cleared. When it is a
    str, it is tokenized: what the model wants before a text (BOS, and a space where Tokenizer.space_prefix is
    True) comes first only if the sequence is empty, and text that spells a control token stays text. Token
    ids are decoded as they are.

    When a piece is returned, its own token is not in the cache yet, but all tokens before it are. The cache
    remembers it (kv.pending_token), and the next generate() on the sequence decodes it before its prompt; so
    several calls say what one would. With a pending token the prompt may be empty, "" or []. A piece with
    finish_reason "stop" leaves no pending token: its token is not part of the text.

    Several prompts, each a str or token ids, are continued side by side: the first in sequence `seq`, the
    next in seq + 1, and so on; each as it would be by itself. Piece.seq says whose a piece is.

    A model without a tokenizer (Model.has_tokenizer) takes token ids only; the pieces have no text, and no
    token ends the generation.

    The last piece of a prompt has finish_reason "length" after max_tokens tokens, or "stop" at an
    end-of-generation token or a stop string; the stop string is not part of the text. All arguments from
    max_tokens to thoughts: as in SamplingParams.

    on_full: the policy that makes room when the cache is full, or a sequence has reached its budget; it
    removes tokens of the generated sequences only. When the cache is full of several, those of the longest.
    Without it a full cache raises CacheFullError; if the prompts don't fit, nothing is decoded. Several
    threads may generate on one context, each in its own sequences.

    draft: a context of a smaller model with the same vocabulary, whose sequence 0 is used: what it proposes,
    up to draft_max tokens, is decoded beside the next token, and what is said stays the same (Lookahead).
    "mtp": the model's own draft head does, of a model that was loaded with draft_heads=True.
    Between two pieces the cache may have cells of tokens that are not said yet; behind the last one it has
    none. It knows of the text what this call decodes. For one prompt.

    Raises at once InvalidArgumentError for a bad argument, and UnsupportedError for a str prompt or stop
    strings where the model has no tokenizer, for a draft where a cache can't go back, and for a policy of
    on_full that reads tokens once more where that can't be; later, in the iteration, what Context.decode
    raises, CacheFullError when on_full can't make room, and KVGraphError when the logits are not finite.
    """
    if not isinstance(ctx, Context):
        raise InvalidArgumentError(f"ctx must be a pykvgraph.Context, got {shown(ctx)}")
    ctx.model._require_whole()
    several = _are_several(prompt)
    prompts: list[Any] = list(prompt) if several else [prompt]
    seq = integer(seq, "seq", 0, ctx.n_seq_max - 1)
    if seq + len(prompts) > ctx.n_seq_max:
        raise InvalidArgumentError(
            f"{len(prompts)} prompts from sequence {seq} on need {seq + len(prompts)} sequences, and the "
            f"context has {ctx.n_seq_max} (n_seq_max)"
        )
    if on_full is not None and not isinstance(on_full, (ContextShift, Forget)):
        raise InvalidArgumentError(
            f"on_full must be a pykvgraph.ContextShift, a pykvgraph.Forget or None, got {shown(on_full)}"
        )
    if draft is not None and several:
        raise InvalidArgumentError("draft: drafts are for one prompt; an Engine has them for many")
    params = params_of(SamplingParams, locals())
    texts = [_Text(ctx, seq + i, each, params, on_full) for i, each in enumerate(prompts)]
    if several:
        return _side_by_side(ctx, texts, on_full is not None)
    return _alone(texts[0], None if draft is None else Lookahead(ctx, seq, draft, draft_max))


def _are_several(prompt: object) -> bool:
    """Whether this is a list of prompts, not one."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 2
    return (
        isinstance(prompt, (list, tuple))
        and len(prompt) > 0
        and all(isinstance(each, (str, list, tuple, np.ndarray)) for each in prompt)
    )


class _Held:
    """What a sequence has from the position `begin` on."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.begin = 0

    def shifted(self, report: ShiftReport) -> None:
        """Some of it was given up."""
        begin, end = (max(p - self.begin, 0) for p in (report.n_keep, report.n_keep + report.n_discard))
        del self.ids[begin:end]
        self.begin -= report.n_discard - (end - begin)


class _Text:
    """The text of one sequence: its prompt, and what is generated behind it."""

    def __init__(
        self,
        ctx: Context,
        seq: int,
        prompt: Any,
        params: SamplingParams,
        on_full: ContextShift | Forget | None,
    ) -> None:
        model = ctx.model
        if isinstance(prompt, str):
            _ = model.tokenizer  # what it raises, at once
        else:
            prompt = integers(prompt, "prompt", 0)
            if len(prompt) == 0 and ctx.kv.pending_token(seq) is None:
                raise _no_prompt()
        if params.stop and not model.has_tokenizer:
            raise UnsupportedError("stop: the model has no tokenizer, so its tokens have no text to stop at")
        self.seq = seq
        self._held = _Held()  # not a method of this object: it would keep itself, and its grammar's process
        self.prefill = Prefill(ctx, seq, on_full, after_shift=self._held.shifted)
        self._prompt: str | npt.NDArray[np.int32] = prompt
        self._tokenizer = model.tokenizer if model.has_tokenizer else None
        self._output = OutputText(params, self._tokenizer, seq)
        self._pending = ctx._pending

    def prompt_ids(self) -> npt.NDArray[np.int32]:
        """What is to be decoded first, the pending token in front."""
        pending = self._pending.get(self.seq)
        ids = self._prompt
        if isinstance(ids, str):
            assert self._tokenizer is not None
            begins = pending is None and self.prefill.ctx.kv.seq_pos_max(self.seq) < 0
            encoded = self._tokenizer.encode(ids, add_special=begins, add_space_prefix=begins)
            ids = np.array(encoded, np.int32)
        if pending is not None:
            ids = np.concatenate([np.array([pending], np.int32), ids])
        if len(ids) == 0:
            raise _no_prompt()
        self._output.begin(ids)
        self._held.begin = self.prefill.ctx.kv.seq_pos_max(self.seq) + 1
        return ids

    def append(self, ids: Sequence[int] | npt.NDArray[np.int32]) -> LastOutput:
        """Decodes ids at the sequence's end."""
        self._held.ids.extend(map(int, ids))
        return self.prefill.append(ids, copy_logits=self._output.needs_logits)

    def append_ahead(self, lookahead: Lookahead, token: int) -> LastOutput:
        """As append(), or what is known already of this token."""
        last = lookahead.append(lambda: self._held.ids, token, self.prefill.n_room)
        if last is None:
            return self.append([token])
        self._held.ids.append(token)
        self.prefill.told([token])
        return last

    def say(self, last: LastOutput) -> Piece:
        """The piece after what was decoded last; its token is pending from now on."""
        piece = self._output.say(last)
        if piece.finish_reason != "stop":
            self._pending.put(self.seq, piece.token)
        return piece


def _no_prompt() -> InvalidArgumentError:
    return InvalidArgumentError(
        "the prompt is empty: it takes a token to say what comes after it, and the sequence has none pending"
    )


def _alone(text: _Text, lookahead: Lookahead | None) -> Iterator[Piece]:
    def append(piece: Piece, _: None) -> LastOutput | None:
        if piece.finish_reason:
            return None
        return text.append_ahead(lookahead, piece.token) if lookahead else text.append([piece.token])

    try:
        yield from decode_text(text.append(text.prompt_ids()), text.say, append)
    finally:
        if lookahead:
            lookahead.drop()


def _side_by_side(ctx: Context, texts: list[_Text], shifts: bool) -> Iterator[Piece]:
    prompts = [text.prompt_ids() for text in texts]
    if not shifts:
        texts[0].prefill.make_room(sum(map(len, prompts)))  # which raises
    said: dict[int, tuple[_Text, int]] = {}  # by sequence, in their order
    for text, ids in zip(texts, prompts, strict=True):
        piece = text.say(text.append(ids))
        if piece.finish_reason is None:
            said[text.seq] = text, piece.token
        yield piece
    while said:
        step = list(said.values())
        for begin in range(0, len(step), ctx.n_batch):
            part = step[begin : begin + ctx.n_batch]
            unsaid = list(zip(part, _decode_each(ctx, part, shifts), strict=True))
            try:
                while unsaid:
                    (text, _), last = unsaid.pop(0)
                    piece = text.say(last)
                    if piece.finish_reason is None:
                        said[text.seq] = text, piece.token
                    else:
                        del said[text.seq]
                    yield piece
            finally:
                _take_back(ctx, [before for before, _ in unsaid])


def _decode_each(ctx: Context, said: list[tuple[_Text, int]], shifts: bool) -> list[LastOutput]:
    """Decodes a token of each text in one batch."""
    kv, batch = ctx.kv, Batch()
    while True:
        for text, _ in said:
            text.prefill.keep_to_budget()
        max((text.prefill for text, _ in said), key=lambda each: each.n_own).make_room(len(said))
        batch.clear()
        for text, token in said:
            batch.add(token, kv.seq_pos_max(text.seq) + 1, (text.seq,), logits=True)
        try:
            outputs = ctx._handle.call(ctx._decode_each, batch)
        except CacheFullError:  # another thread was quicker
            if not shifts:
                raise
        else:
            for text, token in said:
                text.prefill.told([token])
            return outputs


def _take_back(ctx: Context, said: list[tuple[_Text, int]]) -> None:
    """Tokens after which nothing was said, as the caller went away, are pending again where they can be."""
    for text, token in said:
        with contextlib.suppress(InvalidArgumentError):  # a window or a state can't go back
            ctx.kv.seq_rm(text.seq, ctx.kv.seq_pos_max(text.seq), -1)
            ctx._pending.put(text.seq, token)
