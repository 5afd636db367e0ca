"""The tokenizer: pieces over a fixed word list, every byte as a fallback, every digit alone.

Text is merged as SentencePiece's BPE (and libllama's SPM vocabulary) does it: of all neighbouring symbols
that together are a piece, the pair with the best score is joined first, the leftmost of equals.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

SPACE = "\u2581"
UNK, BOS, EOS = 0, 1, 2
_CONTROL = ["<unk>", "<s>", "</s>"]
_N_BYTES = 256
# No piece spans two of these chunks, so each can be merged by itself (and remembered).
_CHUNK = re.compile(SPACE + r"?[A-Za-z]+\.?|.", re.DOTALL)


class Tokenizer:
    """Pieces in id order: control tokens, bytes, single characters, merges by rank.

    `words` become one token each, spelled with a leading space. `endings` are words that swallow the full
    stop after them: they bring a line of the passkey example's junk text down to twenty tokens. `roles` are
    control tokens that begin a turn. `space_prefix`: whether a prompt gets a space before its first word.
    """

    def __init__(
        self,
        words: Iterable[str],
        endings: Iterable[str] = (),
        roles: Iterable[str] = (),
        space_prefix: bool = True,
    ) -> None:
        self.control = [*_CONTROL, *roles]
        self.space_prefix = space_prefix
        self._first_byte = len(self.control)
        spelled = sorted({SPACE + word for word in words})
        merged = _merge_ranks(spelled) + [SPACE + word + "." for word in endings]
        characters = [SPACE] + [chr(c) for c in range(0x21, 0x7F)]
        self.n_characters = len(characters)
        self.pieces = self.control + [f"<0x{b:02X}>" for b in range(_N_BYTES)] + characters + merged
        self._rank = {piece: rank for rank, piece in enumerate(merged)}
        first = self._first_byte + _N_BYTES
        self._ids = {piece: i for i, piece in enumerate(self.pieces) if i >= first}
        self._cache: dict[str, list[int]] = {}
        for word in spelled:
            if len(self._merge(word)) != 1:
                raise ValueError(f"the word {word!r} does not merge into one token")

    def __len__(self) -> int:
        return len(self.pieces)

    def scores(self) -> list[float]:
        """One score per piece: 0 for what is never merged, -1, -2, ... for the merges, best first."""
        n_unmerged = len(self.pieces) - len(self._rank)
        return [0.0] * n_unmerged + [-1.0 - rank for rank in range(len(self._rank))]

    def is_byte(self, token: int) -> bool:
        return self._first_byte <= token < self._first_byte + _N_BYTES

    def encode(self, text: str, *, start: bool = False) -> list[int]:
        """The ids of `text`; with `start`, as a whole prompt: BOS and the customary space come first."""
        ids = [BOS] if start else []
        spaced = ((" " if start and self.space_prefix else "") + text).replace(" ", SPACE)
        for chunk in _CHUNK.findall(spaced):
            known = self._cache.get(chunk)
            if known is None:
                known = self._cache[chunk] = self._merge(chunk)
            ids += known
        return ids

    def turn(self, role: str, text: str) -> list[int]:
        """The ids of one turn of a dialogue: its role, a space and the text, EOS."""
        return [self.control.index(role), *self.encode(" " + text), EOS]

    def decode(self, ids: Iterable[int]) -> str:
        first_byte = self._first_byte
        raw = b"".join(
            bytes([i - first_byte]) if self.is_byte(i) else self.pieces[i].replace(SPACE, " ").encode()
            for i in ids
            if i >= first_byte
        )
        return raw.decode(errors="replace")

    def _merge(self, chunk: str) -> list[int]:
        symbols = list(chunk)
        while len(symbols) > 1:
            ranks = [self._rank.get(a + b, len(self._rank)) for a, b in pairwise(symbols)]
            best = min(ranks)
            if best == len(self._rank):
                break
            at = ranks.index(best)
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        ids: list[int] = []
        for symbol in symbols:
            known = self._ids.get(symbol)
            ids += [known] if known is not None else [self._first_byte + b for b in symbol.encode()]
        return ids


def _merge_ranks(words: list[str]) -> list[str]:
    """Byte-pair merges, most frequent first (then alphabetical), until every word is one piece."""
    split = [list(word) for word in words]
    merged: list[str] = []
    while any(len(symbols) > 1 for symbols in split):
        pairs = Counter(a + b for symbols in split for a, b in pairwise(symbols))
        best = min(pairs, key=lambda piece: (-pairs[piece], piece))
        merged.append(best)
        for symbols in split:
            at = 0
            while at < len(symbols) - 1:
                if symbols[at] + symbols[at + 1] == best:
                    symbols[at : at + 2] = [best]
                at += 1
    return merged
