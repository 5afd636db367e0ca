"""The text of a new request, with those of its other samples; and whether it can run at all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pykvgraph.checks import instance, integer, real, several, shown, text_bytes
from pykvgraph.context.context import Context
from pykvgraph.engine.beam_sequence import BeamSequence
from pykvgraph.engine.context_window import Window
from pykvgraph.engine.request_sequence import CacheTerms, RequestSequence, SampleOwner
from pykvgraph.engine.types import Pin
from pykvgraph.errors import CacheFullError, InvalidArgumentError, UnsupportedError
from pykvgraph.kv_cache.cache import KVCache
from pykvgraph.model.adapter import Active
from pykvgraph.model.tokenizer import Tokenizer
from pykvgraph.params.params import SamplingParams
from pykvgraph.tiers.rows import Saver

_EDITS = ("exact", "approximate")


class NewText(NamedTuple):
    """What was asked, as RequestSequence takes it."""

    request: SampleOwner
    ids: npt.NDArray[np.int32]
    params: SamplingParams
    tokenizer: Tokenizer | None
    salt: bytes
    window: Window | None
    adapters: Active
    copies: Saver | None
    terms: CacheTerms


def first_sequence(text: NewText, kv: KVCache) -> RequestSequence:
    """The first sample, with the others as its forks; or the beams of a search."""
    request, ids, params, tokenizer, salt, window, active, copies, terms = text
    if params.beam_width > 1:
        return BeamSequence(request, ids, params, tokenizer, salt, kv, active, copies, terms)
    sequences = [
        RequestSequence(request, i, ids, params.of_sample(i), tokenizer, salt, window, active, copies, terms)
        for i in range(params.n)
    ]
    sequences[0].forks = sequences[1:]
    return sequences[0]


def terms_of(salt: str | bytes, session: str, edit: Literal["exact", "approximate"]) -> CacheTerms:
    """Of which other texts it may have parts. Raises InvalidArgumentError."""
    if not isinstance(edit, str) or edit not in _EDITS:
        raise InvalidArgumentError(f'edit must be "exact" or "approximate", got {shown(edit)}')
    if not isinstance(session, str):
        raise InvalidArgumentError(f"session must be a str, got {shown(session)}")
    name = text_bytes(session, "session")
    # each remembered text has it, and a client may send a long one
    digest = hashlib.sha256(name).digest() if name else b""
    return CacheTerms(text_bytes(salt, "salt"), digest, edit == "approximate")


def checked_pins(pins: Iterable[Pin], n_prompt: int) -> tuple[Pin, ...]:
    """Raises InvalidArgumentError for one that is longer than the prompt, or lasts no time."""
    given = several(pins)
    if given is None:
        raise InvalidArgumentError(f"pins must be several of pykvgraph.Pin, got {shown(pins)}")
    return tuple(_checked(pin, n_prompt) for pin in given)


def _checked(pin: Pin, n_prompt: int) -> Pin:
    instance(pin, Pin, "a pin")
    return Pin(integer(pin.n_tokens, "n_tokens", 1, n_prompt), real(pin.seconds, "seconds", 1e-6, 1e9))


def require_shift(can_shift: bool, window: Window, params: SamplingParams, n_prompt: int) -> None:
    """Raises InvalidArgumentError, UnsupportedError and CacheFullError for a window that can't be had."""
    if not isinstance(window, Window):
        raise InvalidArgumentError(f"window must be a Window, got {shown(window)}")
    if not can_shift:
        raise UnsupportedError(
            "this model's cache can't be shifted: ask without a window, or open the engine with "
            "swa_full=True where its layers have windows of their own"
        )
    if params.n_seqs > 1:
        raise InvalidArgumentError(f"window: it is for one sample or beam, and there are {params.n_seqs}")
    if n_prompt >= window.n_ctx and window.forget is None:
        raise CacheFullError(
            f"the prompt has {n_prompt} tokens, and the window {window.n_ctx}: only one that forgets "
            "(forget=) reads longer ones"
        )


def require_room(ctx: Context, sequence: RequestSequence, params: SamplingParams, n_seq_max: int) -> None:
    """Raises CacheFullError and InvalidArgumentError for what would not fit, even alone."""
    if sequence.n_seqs > n_seq_max:
        raise CacheFullError(
            f"{sequence.n_seqs} samples or beams need as many sequences; n_seq_max is {n_seq_max}"
        )
    if params.beam_width > ctx.n_batch:
        raise InvalidArgumentError(
            f"beam_width: {params.beam_width} beams are decoded in one batch; n_batch is {ctx.n_batch}"
        )
    if sequence.most_cells > ctx.n_ctx:
        raise CacheFullError(
            f"the request may take {sequence.most_cells} cells, and there are {ctx.n_ctx}: "
            "use a shorter prompt, a smaller max_tokens, or a larger n_ctx"
        )
