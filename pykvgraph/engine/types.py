"""The records that an engine's calls return; their fields can't be changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pykvgraph.types import CellGroup, CellsView

# why a token was decoded that an earlier request had read. parted: that one has another token there. evicted:
# others needed its cells. no_resume_point: the model can't go on there. other_key, other_adapter: it was read
# under another salt, or under other adapters. edited: it is the first behind a seam that is repaired
MissReason = Literal["parted", "evicted", "no_resume_point", "other_key", "other_adapter", "edited"]


class Miss(NamedTuple):
    """The first token that was decoded although an earlier request had read as much of the same text.

    at: its number. token, request: of "parted", what the earlier text has there, and the number of its
    request, in the order in which they came; else None.
    """

    at: int
    reason: MissReason
    token: int | None = None
    request: int | None = None


class CacheUse(NamedTuple):
    """Where the tokens of a prompt came from that were not decoded.

    cells: the cache had them. ram, disk: they were loaded from there (Tiers). edited: the cache had them, and
    they were decoded behind other tokens than the prompt's (docs/editing.md). miss: None where all that an
    earlier request had read was there.
    """

    cells: int = 0
    ram: int = 0
    disk: int = 0
    edited: int = 0
    miss: Miss | None = None


class Pin(NamedTuple):
    """The first n_tokens of a prompt stay in the cache for so many seconds (Engine.submit)."""

    n_tokens: int
    seconds: float


@dataclass(frozen=True)
class Completion:
    """What came of a request, or of one of its samples.

    text, tokens: what was said; a token that ended it is not among them. finish_reason: as in Piece, or
    "cancelled". n_prompt: tokens of the prompt. n_cached: how many of these were in the cache already.
    n_decoded_again: how many of those that the cache had were decoded nevertheless, because the model can go
    on only from certain places. ttft: seconds from submit() to the first token. seconds: from submit() to the
    end. stopping_word: the stop string that ended the text, or "". n_said: tokens that were sampled, one that
    ended the text included. waited: seconds from submit() until it began to run; NaN if it never did.
    n_discarded: tokens of the prompt and the text that were given up to go on (Window). drafted: tokens that
    were decoded because they might follow; accepted: how many of these did. logprob: the sum of its Pieces'
    logprob: of beams the log probability of the whole text, -inf where there is no such text. cache: where
    the n_cached tokens came from. pinned: how many tokens of the prompt each of the request's pins keeps.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: Literal["stop", "length", "cancelled"]
    n_prompt: int
    n_cached: int
    n_decoded_again: int
    ttft: float
    seconds: float
    stopping_word: str
    n_said: int
    waited: float
    n_discarded: int
    drafted: int
    accepted: int
    logprob: float
    cache: CacheUse
    pinned: tuple[int, ...] = ()


@dataclass(frozen=True)
class TierStats:
    """Prefixes outside of the cells: how much there is, and what became of it.

    ram_bytes, disk_bytes: of all that is there now, in files of other processes too. loaded_tokens: that came
    back, and were not decoded again. saved: parts of texts that went to memory. written: of these to the
    disk. dropped: parts that were not kept, as there was no room or too much waited. unwritten: that the disk
    refused. misses: how often loading failed, by reason.
    """

    ram_bytes: int
    disk_bytes: int
    loaded_tokens: int
    saved: int
    written: int
    dropped: int
    unwritten: int
    misses: Mapping[str, int]


@dataclass(frozen=True)
class EngineStats:
    """What an engine has done since it was made, and how it is now.

    steps: steps that decoded. n_running, n_waiting: texts and requests now. n_parked: texts of requests
    that are parked. n_preempted: how often a text was preempted as the cells ran out. prompt_tokens:
    of all requests that began to run. prefix_hit_tokens: how many of these were in the cache.
    decoded_again: how many more were, but had to be decoded nevertheless, as the model can't go on from
    everywhere. decoded_tokens: all that were decoded, of prompts and answers. cells_used: cells in use
    now, of each group of `kv.groups`. n_blocks: entries of the index of prefixes. n_resume_points: those
    it has. drafted: tokens that were decoded because they might follow; accepted: how many of these did.
    drafts_refused: steps in which a text had no draft, or a shorter one, by reason. "busy": over 16 tokens
    were decoded without drafts. "slow": by what was measured, it would take longer than it saves. "cells":
    more than draft_share of the cells would be in use, or others may need them. tiers: of an engine with
    Tiers. drafts: how many drafts were decoded. stepped_texts: the texts of each step, all steps together.
    n_pinned: cells that stay for a time, as requests wanted it (Pin). edited_tokens: of prefix_hit_tokens,
    those that are approximate, as edited texts had them. prepared_tokens: how many of those that were decoded
    nobody waited for (Engine.prepare). n_compressed: prefixes in fewer cells that the cache has now;
    n_to_compress: those that are being read once more, or wait for it (prefix_compress).
    """

    steps: int
    n_running: int
    n_waiting: int
    n_preempted: int
    prompt_tokens: int
    prefix_hit_tokens: int
    decoded_again: int
    decoded_tokens: int
    cells_used: tuple[int, ...]
    n_blocks: int
    n_resume_points: int
    drafted: int
    accepted: int
    n_parked: int = 0
    tiers: TierStats | None = None
    drafts_refused: Mapping[str, int] = field(default_factory=dict)
    drafts: int = 0
    stepped_texts: int = 0
    n_pinned: int = 0
    edited_tokens: int = 0
    prepared_tokens: int = 0
    n_compressed: int = 0
    n_to_compress: int = 0


class PromptProgress(NamedTuple):
    """How far a prompt is. n_cached: tokens that the cache had. n_decoded: tokens that it has read, of
    which a window may have given up some.

    seconds: since the text began to run. pinned: as in Completion; () until all of it is decoded.
    """

    n_prompt: int
    n_cached: int
    n_decoded: int
    seconds: float
    pinned: tuple[int, ...] = ()


@dataclass(frozen=True)
class TextLook:
    """A text that an engine runs, or that waits, without its words.

    request: the number of its request, in the order in which they came. sample: its number among those of the
    request. n_texts: how many samples it stands for; more than one until its prompt is decoded. seq: the
    sequence that has its cells; -1: it waits. n_prompt: tokens of the prompt. n_cached: how many of these the
    cache had; -1: it has not run yet. n_decoded: tokens of the text that its sequence has. n_said: tokens of
    the answer. seconds: since submit(). status: "waiting" to run, again perhaps; "loading": rows come from a
    tier; "prefill": more than its last token is to be decoded; "decode": it says a token a step.
    """

    request: int
    sample: int
    n_texts: int
    seq: int
    n_prompt: int
    n_cached: int
    n_decoded: int
    n_said: int
    seconds: float
    status: str


@dataclass(frozen=True)
class EngineLook:
    """An engine at one moment between two steps.

    seconds: of time.perf_counter(), when that was. waiting: the first 64 that wait; stats.n_waiting is the
    number of all. groups, views: the cells, as `kv.groups` and `kv.cells()` of each of them tell.
    """

    seconds: float
    stats: EngineStats
    running: tuple[TextLook, ...]
    waiting: tuple[TextLook, ...]
    groups: tuple[CellGroup, ...]
    views: tuple[CellsView, ...]
