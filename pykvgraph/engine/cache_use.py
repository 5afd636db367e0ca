"""Where the tokens of a prompt came from, and why others were decoded that an earlier request had read."""

from __future__ import annotations

from pykvgraph.engine.earlier_texts import EarlierText, EarlierTexts
from pykvgraph.engine.edits import Edit
from pykvgraph.engine.fetch import Plan
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.types import CacheUse, Miss, MissReason

_FIRST: tuple[MissReason, ...] = ("no_resume_point", "evicted", "other_adapter", "other_key")


def use_of(
    sequence: RequestSequence,
    texts: EarlierTexts,
    plan: Plan | None,
    edit: Edit | None,
    *,
    n_exact: int,
    known: int,
) -> CacheUse:
    """Of a text that begins to run.

    texts: what others have read. plan: what was loaded of it. edit: what it was made by. n_exact: so many
    tokens are exact of what the index has. known: how many of its tokens were there, though the model may not
    go on from all.
    """
    n = min(sequence.n_there, sequence.n_prompt)
    n_exact = min(n, edit.n_had if edit is not None else n_exact)
    ram = disk = 0
    for name, is_on_disk in zip(plan.names, plan.on_disk, strict=True) if plan else ():
        n_loaded = max(min(name.span.stop, n_exact) - name.span.start, 0)
        ram, disk = (ram, disk + n_loaded) if is_on_disk else (ram + n_loaded, disk)
    if edit is not None and edit.anew:
        miss: Miss | None = Miss(next(part.new for part in edit.parts if part.old or part.new), "edited")
    else:
        miss = _miss(sequence, texts, known)
    return CacheUse(n_exact - ram - disk, ram, disk, n - n_exact, miss)


def _miss(sequence: RequestSequence, texts: EarlierTexts, known: int) -> Miss | None:
    """The first token that was decoded although somebody had read as much of the same text."""
    at, ids = sequence.n_decoded, sequence.ids[: sequence.n_prompt].tobytes()
    if at >= sequence.n_prompt - 1:  # the last token is decoded for its output
        return None
    own = sequence.known_as()
    parted: Miss | None = None
    reasons: set[MissReason] = set()
    for text in texts:
        n, is_same = text.common(ids), (text.key, text.adapters) == (own.key, own.adapters)
        if min(n, text.n_read) > at:
            reasons.add(_reason(text, own, known > at))
        elif is_same and parted is None and n == at > 0 and n < (text.n_read or len(text.ids)):
            parted = Miss(at, "parted", text.ids[n], text.request)
    for reason in _FIRST:
        if reason in reasons:
            return Miss(at, reason)
    return parted


def _reason(text: EarlierText, own: EarlierText, is_there: bool) -> MissReason:
    """Why tokens were decoded that another text has read. is_there: whether the cache has them."""
    if text.key != own.key:
        return "other_key"
    if text.adapters != own.adapters:
        return "other_adapter"
    return "no_resume_point" if is_there else "evicted"
