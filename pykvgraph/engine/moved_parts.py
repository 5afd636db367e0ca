"""Parts of an older text that come again in a new one, at other positions: their cells are moved there."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from pykvgraph.context.common_length import common_length
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.running_set import RunningSet
from pykvgraph.errors import KVGraphError
from pykvgraph.prefix import block
from pykvgraph.prefix.index import Found, Match
from pykvgraph.prefix.node import Node


class Part(NamedTuple):
    """n tokens that the old text has from position `old` on, and the new one from `new` on."""

    old: int
    new: int
    n: int


def parts_of(old: array[int], new: array[int], n: int, least: int) -> list[Part]:
    """What the new text says of the old one behind the first n tokens, which both have, without a gap.

    Each part has at least `least` tokens, and is the next one in the old text, as in llama-server.
    """
    old_bytes, new_bytes, size = old.tobytes(), new.tobytes(), old.itemsize
    parts, at_old, at_new = [], n, n
    while at_new + least <= len(new):
        begin = _find(old_bytes, new_bytes[at_new * size : (at_new + least) * size], at_old * size, size)
        if begin < 0:
            break
        n_same = common_length(old_bytes[begin:], new_bytes[at_new * size :])
        parts.append(Part(begin // size, at_new, n_same))
        at_old, at_new = begin // size + n_same, at_new + n_same
    return parts


def attach_moved(running_set: RunningSet, sequence: RequestSequence, found: Found, least: int) -> int:
    """Shows its sequence what was found, and moved parts behind that; 0: there are none, and it is empty.

    Returns how many of its tokens the sequence has. The newest text that begins with what was found is the
    one whose parts are moved. The cells are copied where others see them, so that these keep theirs.
    """
    path = _newest(found.match)
    old = array("i", b"".join(node.tokens for node in path))
    parts = parts_of(old, sequence.ids[:-1], found.n, least)
    if not parts:
        return 0
    index, kv, seq = running_set.index, running_set.kv, sequence.seq
    stop = parts[-1].old + parts[-1].n
    try:
        sequence.last = index.attach(Found(Match(path, None, 0, stop), stop, None), seq)
    except (KVGraphError, MemoryError):
        return 0
    running_set.retreat(sequence, found.n)
    try:
        if not index.make_room(sum(part.n for part in parts)):
            raise KVGraphError("others have the cells")
        for part in parts:
            kv.seq_rm(seq, part.new, part.old)
            kv.seq_add(seq, part.old, part.old + part.n, part.new - part.old)
    except (KVGraphError, MemoryError):
        kv.seq_rm(seq, -1, -1)
        index.unpin(sequence.last)
        sequence.last = None
        running_set.start_over_if_broken()
        return 0
    return parts[-1].new + parts[-1].n


def _find(text: bytes, part: bytes, begin: int, size: int) -> int:
    """Where whole tokens are these; -1: nowhere."""
    at = text.find(part, begin)
    while at >= 0 and at % size:
        at = text.find(part, at + 1)
    return at


def _newest(match: Match) -> list[Node]:
    """Nodes from the root to the end of the text that was used last, of those that begin with the match."""
    path = list(match.path)
    run = match.child.tokens[: match.run * block.TOKEN_BYTES] if match.child else b""
    while nodes := [node for node in path[-1].children.values() if node.tokens.startswith(run)]:
        path.append(max(nodes, key=lambda node: node.used))
        run = b""
    return path
