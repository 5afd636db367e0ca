"""Blocks of 32 tokens, and their keys: the same in every process for the same tokens behind the same."""

from __future__ import annotations

import hashlib
import json

from pykvgraph.context.context import Context
from pykvgraph.model.file_digest import file_digest

N_TOKENS = 32
TOKEN_BYTES = 4
_FORMAT = b"kvgraph-block-1\0"
TOKENS = b"\0"  # the kind of a block; others are to come, pictures perhaps
END = b"\1"  # of the tokens behind the last block of a text, with what it takes to go on behind them
KINDS = frozenset((TOKENS, END))
_UNDER = b"kvgraph-under-1\0"
_EDITED = b"kvgraph-edited-2\0"


def key(parent: bytes, tokens: bytes, kind: bytes = TOKENS) -> bytes:
    """The key of a block behind the block `parent`; tokens: its ids, 32 bits each, little-endian."""
    return hashlib.sha256(_FORMAT + parent + kind + tokens).digest()


def root_key(ctx: Context, salt: bytes = b"", digest: bytes | None = None) -> bytes:
    """What stands for the parent of first blocks: whatever else the K and V of a token depend on.

    That is the model's file, to the byte, what overrides it, and how K and V are stored. salt: keeps the
    texts of different people apart. digest: the file_digest(), where it is known. Raises OSError when the
    file can't be read any more.
    """
    # also whether windows keep every position, and which rope: types of groups say so (LongRoPE)
    types = [(group.type_k, group.type_v) for group in ctx.kv._geometry.groups]
    stored = {
        "type_k": ctx.type_k,
        "type_v": ctx.type_v,
        "hadamard": ctx.hadamard,
        "swa_full": ctx.swa_full,
        "types": types,
    }
    if ctx.model.n_draft_heads:  # its K and V lie beside those of the layers
        stored["draft_heads"] = ctx.model.n_draft_heads
    if ctx.model.kv_overrides:
        stored["kv_overrides"] = ctx.model.kv_overrides
    described = json.dumps(stored, sort_keys=True).encode()
    return hashlib.sha256(b"\0".join([_FORMAT, digest or file_digest(ctx.model), described, salt])).digest()


def under(salt: bytes, adapters: bytes) -> bytes:
    """The salt of texts that are decoded under adapters with this key (adapter.key_of); b"": none."""
    return hashlib.sha256(_UNDER + adapters + salt).digest() if adapters else salt


def edited(salt: bytes, session: bytes, ids: bytes, spans: bytes, repair: int) -> bytes:
    """The salt of a text that is made of spans of one under `salt`, with so many tokens decoded again each.

    Its cells are not those of anybody who has just its tokens. session: who may find them. ids: of the text
    that it is made of, as far as its cells have read it, 32 bits each.
    """
    parts = (salt, session, ids, spans)
    lengths = b"".join(len(each).to_bytes(8, "little") for each in parts)
    return hashlib.sha256(_EDITED + lengths + repair.to_bytes(4, "little") + b"".join(parts)).digest()
