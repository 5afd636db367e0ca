"""Cases of `pykvgraph quality`: ways to get a text into the cache, each written as a line.

A case is one of FORMS. `ctk TYPE` and `ctv TYPE`, the types of K and V, are cases too, and may stand before
each of the others: `ctk q8_0 ctv q8_0 shift keep=32 discard=512`. Behind each `asked` may stand: then
a task's question is read with its text, before anything is forgotten.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from pykvgraph.checks import shown
from pykvgraph.context.batch import Batch
from pykvgraph.context.cell_scores import POLICIES, checked_composite
from pykvgraph.context.context import Context
from pykvgraph.context.context_shift import ContextShift
from pykvgraph.context.forgetting import N_AT_ONCE, N_RECENT, N_SINKS, Forget
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.params.cache_type import parse_cache_type
from pykvgraph.params.params import ContextParams
from pykvgraph.sequence import edits
from pykvgraph.sequence.long_reader import LongReader
from pykvgraph.sequence.prefill import Prefill
from pykvgraph.sequence.sequence import TokenSequence

FORMS = (
    "full",  # everything is decoded as it stands
    "shift keep=K discard=N [cells=N]",  # through fewer cells than the text has tokens
    "self-extend N",
    "edit A:B [repair=K]",
    "link NxM [repair=K]",
    f"forget {'|'.join(POLICIES)} SHARE|cells=N [composite]",
)
TEXT, APART = 0, 1  # the sequence of the text, and that of parts which are read alone
Ids = Sequence[int]


@dataclass(eq=False)
class Passage:
    """A text as it is to stand in the cache: ids. bos: what the model wants before a text; None: nothing.

    other: tokens from elsewhere, of which an edit takes those that it cuts out. cut: where it cuts and which
    tokens, in place of what its case says.
    """

    ids: Ids
    bos: int | None = None
    other: Ids = ()
    cut: tuple[int, Ids] | None = None
    # the cells of it, of each context that has decoded it whole; another passage begins with none
    _states: dict[Context, bytes] = field(default_factory=dict, init=False, repr=False)

    def decode_whole(self, ctx: Context) -> None:
        """Gets the text as it stands into sequence TEXT of an empty cache: decoded once, later loaded.

        A loaded text is the decoded one to the bit. A cache whose types fall with age can't be saved, and
        decodes it each time. Raises what Context.decode() and kv.load() raise.
        """
        if ctx in self._states:
            ctx.kv.load(self._states[ctx], TEXT)
            return
        append(ctx, TEXT, self.ids)
        if not ctx.kv.ages:
            self._states[ctx] = ctx.kv.save(TEXT)


class ReadingWay(Protocol):
    """A way to get a text into the cache."""

    @property
    def name(self) -> str:
        """What cases have in common that differ in their numbers alone."""

    def n_extra(self) -> int:
        """Cells that it takes on its way beyond one for each token."""

    def read(self, ctx: Context, passage: Passage) -> None:
        """Decodes the text in sequence TEXT of an empty cache, and does to it what is to be done.

        Raises InvalidArgumentError for a text that it can't be done to, and what operations of the cache do.
        """


@dataclass(frozen=True)
class FullText:
    """Everything is decoded as it stands."""

    name: ClassVar[str] = "full"

    def n_extra(self) -> int:
        """None."""
        return 0

    def read(self, ctx: Context, passage: Passage) -> None:
        """Batch by batch."""
        passage.decode_whole(ctx)


@dataclass(frozen=True)
class ShiftedText:
    """A context shift whenever n_cells have a token; n_cells None: half of the text's tokens."""

    n_keep: int
    n_discard: int
    n_cells: int | None
    name: ClassVar[str] = "shift"

    def __post_init__(self) -> None:
        if not self.n_discard:
            raise InvalidArgumentError("discard is 0: a shift discards one token or more")
        if self.n_cells is not None:
            self._require(self.n_cells)

    def _require(self, n_cells: int) -> None:
        """Raises InvalidArgumentError where a shift could only discard fewer tokens than the case says."""
        if self.n_keep + self.n_discard > n_cells:
            raise InvalidArgumentError(
                f"shift keep={self.n_keep} discard={self.n_discard}: there are {n_cells} cells, too few for "
                "both: keep or discard fewer, or give more cells"
            )

    def n_extra(self) -> int:
        """None."""
        return 0

    def read(self, ctx: Context, passage: Passage) -> None:
        """Batch by batch, each of no more tokens than the kept ones leave room for."""
        n_cells = self.n_cells or max(len(passage.ids) // 2, 1)
        self._require(n_cells)
        n_at_once = min(ctx.n_batch, n_cells - self.n_keep)
        shift = ContextShift(self.n_keep, self.n_discard)
        for begin in range(0, len(passage.ids), n_at_once):
            part = passage.ids[begin : begin + n_at_once]
            while ctx.kv.n_used + len(part) > n_cells:
                shift.apply(ctx.kv, TEXT)
            append(ctx, TEXT, part)


@dataclass(frozen=True)
class ExtendedText:
    """n_grp neighbouring tokens share a position, but for those of the last batch (LongReader)."""

    n_grp: int
    name: ClassVar[str] = "self-extend"

    def __post_init__(self) -> None:
        if self.n_grp < 1:
            raise InvalidArgumentError("self-extend 0: groups have one token or more")

    def n_extra(self) -> int:
        """None."""
        return 0

    def read(self, ctx: Context, passage: Passage) -> None:
        """As a LongReader does."""
        LongReader(ctx, seq=TEXT, n_keep=0, n_grp=self.n_grp).read(passage.ids)


@dataclass(frozen=True)
class EditedText:
    """p1 - p0 other tokens come at position p0 while the text is read, and are cut out then.

    repair: so many tokens behind the cut are decoded again.
    """

    p0: int
    p1: int
    repair: int
    name: ClassVar[str] = "edit"

    def __post_init__(self) -> None:
        if self.p0 >= self.p1:
            raise InvalidArgumentError(
                f"edit {self.p0}:{self.p1} cuts nothing: give it as A:B with A below B"
            )

    def n_extra(self) -> int:
        """Those that are cut out; then tokens that are decoded again."""
        return max(self.p1 - self.p0, self.repair)

    def read(self, ctx: Context, passage: Passage) -> None:
        """The whole, then as edits.Sequence.remove()."""
        p0, cut = passage.cut or (self.p0, passage.other[: self.p1 - self.p0])
        n, first = len(passage.ids), int(passage.bos is not None)
        if not first <= p0 <= n:
            raise InvalidArgumentError(f"edit {self.p0}:{self.p1}: the text has positions {first} to {n}")
        text = edits.Sequence(ctx, TEXT)
        for part in (passage.ids[:p0], cut, passage.ids[p0:]):
            append(ctx, TEXT, part)
            text.record(part)
        text.remove(p0, p0 + len(cut), self.repair)


@dataclass(frozen=True)
class LinkedText:
    """The last n_parts times n_tokens of the text are read in so many parts, each alone, and linked.

    repair: so many tokens of each part, its first ones, are decoded again.
    """

    n_parts: int
    n_tokens: int
    repair: int
    name: ClassVar[str] = "link"

    def __post_init__(self) -> None:
        if not self.n_parts or not self.n_tokens:
            raise InvalidArgumentError("link: parts, and tokens of a part, are one or more")

    def n_extra(self) -> int:
        """BOS of the part that is read alone; then tokens that are decoded again."""
        return max(1, self.repair)

    def read(self, ctx: Context, passage: Passage) -> None:
        """What comes before them is decoded as it stands."""
        begin = len(passage.ids) - self.n_parts * self.n_tokens
        if begin < int(passage.bos is not None):
            raise InvalidArgumentError(
                f"link {self.n_parts}x{self.n_tokens} needs more tokens than the text's {len(passage.ids)}"
            )
        append(ctx, TEXT, passage.ids[:begin])
        for p in range(begin, len(passage.ids), self.n_tokens):
            part = passage.ids[p : p + self.n_tokens]
            link(ctx, TEXT, part, passage.bos)
            decode_again(ctx, TEXT, part[: self.repair], p)


@dataclass(frozen=True)
class ForgottenText:
    """Of all of the text's cells a share is forgotten; or it goes through n_cells, and forgets when full."""

    policy: str
    share: float | None
    n_cells: int | None = None
    composite: bool = False

    def __post_init__(self) -> None:
        if self.n_cells is None:
            checked_composite(self.composite, self.policy)
        else:
            self._forget()  # raises what is wrong with them

    def _forget(self) -> Forget:
        return Forget(self.n_cells, self.policy, composite=self.composite)

    @property
    def name(self) -> str:
        """Each policy is one."""
        return f"forget {self.policy} composite" if self.composite else f"forget {self.policy}"

    def n_extra(self) -> int:
        """None."""
        return 0

    def read(self, ctx: Context, passage: Passage) -> None:
        """Batch by batch."""
        if self.n_cells is not None:
            prefill = Prefill(ctx, TEXT, self._forget())
            n_at_once = min(ctx.n_batch, N_AT_ONCE, self.n_cells - N_SINKS - N_RECENT)
            for begin in range(0, len(passage.ids), n_at_once):
                prefill.append_batch(passage.ids[begin : begin + n_at_once])
            return
        passage.decode_whole(ctx)
        text = TokenSequence(ctx, TEXT)
        text.record(passage.ids)
        n, share = len(passage.ids), self.share or 0
        n_cells, n_most = round(share * n), max(n - N_SINKS - N_RECENT, 0)
        if n_cells > n_most:
            raise InvalidArgumentError(
                f"{self.name}: {share:g} of a text of {n} tokens is {n_cells}; {n_most} may be forgotten: "
                "take longer texts, or a smaller share"
            )
        if n_cells:
            text.forget(n_cells, self.policy, self.composite)


@dataclass(frozen=True)
class Case:
    """A way to get a text into a cache of some types. text: as it is typed, one blank between words.

    asked: a task's question, but for its last token, is a part of the text.
    """

    text: str
    way: ReadingWay
    type_k: str = ContextParams.type_k
    type_v: str = ContextParams.type_v
    asked: bool = False

    @property
    def policy(self) -> str:
        """What cases have in common that differ in the numbers of their operation alone."""
        types = (("ctk", self.type_k, ContextParams.type_k), ("ctv", self.type_v, ContextParams.type_v))
        words = [f"{name} {value}" for name, value, default in types if value != default]
        if not words or not isinstance(self.way, FullText):
            words.append(self.way.name)
        if self.asked:
            words.append("asked")
        return " ".join(words)


FULL = Case("full", FullText())


def parse_case(text: str) -> Case:
    """A case as it is typed. Raises InvalidArgumentError."""
    words = text.split()
    types = {"ctk": ContextParams.type_k, "ctv": ContextParams.type_v}
    rest = list(words)
    while len(rest) > 1 and rest[0] in types:
        name, value, rest = rest[0], rest[1], rest[2:]
        types[name] = str(parse_cache_type(value, name))
    has_types = len(rest) < len(words)
    asked = rest[-1:] == ["asked"]
    if asked:
        rest = rest[:-1]
    line = " ".join(rest) if rest or not has_types else "full"
    for pattern, make in _WAYS:
        found = re.fullmatch(pattern.replace("N", r"(\d{1,8})"), line)
        if found:
            values = (int(each) if each and each.isdigit() else each for each in found.groups())
            return Case(" ".join(words), make(*values), types["ctk"], types["ctv"], asked)
    forms = ", ".join(repr(form) for form in (*FORMS, "ctk TYPE", "ctv TYPE"))
    raise InvalidArgumentError(
        f"{shown(text)} is no case: expected one of {forms}, and 'asked' behind it or not"
    )


_WAYS: tuple[tuple[str, Callable[..., ReadingWay]], ...] = (
    ("full", FullText),
    ("shift keep=N discard=N(?: cells=N)?", ShiftedText),
    ("self-extend N", ExtendedText),
    ("edit N:N(?: repair=N)?", lambda p0, p1, repair: EditedText(p0, p1, repair or 0)),
    ("link NxN(?: repair=N)?", lambda n, m, repair: LinkedText(n, m, repair or 0)),
    (
        rf"forget ({'|'.join(POLICIES)}) (?:(0?\.\d{{1,4}})|cells=N)( composite)?",
        lambda policy, share, n, composite: ForgottenText(
            policy, share and float(share), n, composite is not None
        ),
    ),
)


def append(ctx: Context, seq: int, ids: Ids) -> None:
    """Decodes ids at the end of a sequence, without outputs."""
    prefill = Prefill(ctx, seq, None)
    for begin in range(0, len(ids), ctx.n_batch):
        prefill.append_batch(ids[begin : begin + ctx.n_batch])


def link(ctx: Context, seq: int, ids: Ids, bos: int | None) -> None:
    """Reads ids alone, behind BOS where the model wants it, and appends their cells to a sequence."""
    kv, n_front = ctx.kv, int(bos is not None)
    append(ctx, APART, ids if bos is None else [bos, *ids])
    end = kv.seq_pos_max(seq) + 1
    kv.seq_add(APART, n_front, -1, end - n_front)
    kv.seq_cp(APART, seq, end, -1)
    kv.seq_rm(APART, -1, -1)


def decode_again(ctx: Context, seq: int, ids: Ids, p0: int) -> None:
    """Decodes a sequence's tokens once more, from position p0 on; later ones keep K and V as they are."""
    batch = Batch()
    for begin in range(0, len(ids), ctx.n_batch):
        batch.clear()
        batch.extend(ids[begin : begin + ctx.n_batch], p0 + begin, (seq,), False)
        ctx.decode(batch, repair=True)
