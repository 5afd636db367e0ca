"""Small vocabularies of the kinds that few models have, for a model of N_VOCAB tokens."""

from __future__ import annotations

import random
import struct
from pathlib import Path

from support import chance
from support.gguf_bytes import STRING
from support.gguf_parts import BOOL, Parts
from support.models import N_VOCAB, WORDS

UINT8 = 0
CHARSMAP = "tokenizer.ggml.precompiled_charsmap"
N_NODES = 512


def charsmap() -> bytes:
    """SentencePiece's table, with "A" to be replaced by "a": from node 0, a byte leads to its own node."""
    nodes = [0] * N_NODES
    leaf, text = ord("A"), 256
    nodes[leaf] = (leaf ^ text) << 10 | 1 << 8 | leaf
    nodes[text] = 0  # where the replacement begins
    table = struct.pack(f"<{N_NODES}I", *nodes)
    return struct.pack("<I", len(table)) + table + b"a\0"


def escaped(byte: int) -> bytes:
    """A byte as RWKV's vocabularies write it."""
    return bytes([byte]) if 32 < byte < 127 and byte != ord("\\") else b"\\x%02x" % byte


def of_kind(parts: Parts, kind: bytes) -> Parts:
    """The same model with a vocabulary of this kind: "bert", "t5", "rwkv" or "plamo2"."""
    word = "\u2581" if kind in (b"bert", b"t5") else ""
    letters = [letter.encode() for letter in WORDS[1:]]
    words = [(word + text).encode() for text in ("the", "cat", "a", "t", "c", *"\u4e2d\u6587\u00e9!")]
    special = [b"<s>", b"</s>", b"<unk>"]
    if kind == b"rwkv":
        tokens = [b"<s>", *map(escaped, range(256)), b"the", b"cat", b" the"]
    elif kind == b"bert":
        tokens = [*special, *letters, *words]
    else:
        byte_tokens = [b"<0x%02X>" % byte for byte in range(256)]
        tokens = [*special, *byte_tokens, *dict.fromkeys([*words, *letters])][:N_VOCAB]
    types = [3 if token in special else 6 if token[:3] == b"<0x" else 1 for token in tokens]
    tokens += [b"word%d" % index for index in range(N_VOCAB - len(tokens))]
    types += [1] * (N_VOCAB - len(types))
    parts.set("tokenizer.ggml.model", STRING, kind)
    parts.set("tokenizer.ggml.tokens", STRING, [*tokens])
    parts.set("tokenizer.ggml.token_type", 5, [*types])
    parts.set("tokenizer.ggml.scores", 6, [-10.0] * N_VOCAB)
    for name, token in (("bos", 0), ("eos", 1), ("unknown", 2), ("seperator", 1)):
        parts.set(f"tokenizer.ggml.{name}_token_id", 4, token)
    if kind == b"t5":
        parts.set("tokenizer.ggml.add_space_prefix", BOOL, 1)
        parts.set(CHARSMAP, UINT8, [*charsmap()])
    return parts


def write_remapped(parts: Parts, _base: str, index: int, path: Path) -> str:
    """A charsmap with some of its words changed, of which one is the root, the leaf or its text's."""
    rng = random.Random(chance.seed(f"charsmap-{index}"))
    data = bytearray(charsmap())
    for _ in range(rng.choice([1, 2, 30])):
        node = rng.choice([-1, 0, ord("A"), 256, rng.randrange(N_NODES)])
        byte = rng.choice([node % 256, *b"the catA\xe2"])
        value = rng.choice([rng.getrandbits(32), rng.getrandbits(11) << 10 | rng.choice([0, 1 << 8]) | byte])
        struct.pack_into("<I", data, 4 + 4 * node, value)
    if rng.random() < 0.2:
        del data[rng.choice([-1, -2, rng.randrange(len(data))]) :]
    parts.set(CHARSMAP, UINT8, [*data])
    parts.raw().write(path)
    return f"a charsmap of {len(data)} bytes, mutant {index}"
