"""A model's tokens as the wire shows them: control tokens have names there."""

from __future__ import annotations

from collections.abc import Iterable

from pykvgraph.model.model import Model


class Vocabulary:
    """Over the tokenizer of a model. Raises UnsupportedError for a model that has none."""

    def __init__(self, model: Model) -> None:
        self.tokenizer = model.tokenizer
        self.n_vocab = model.n_vocab  # a model may have more rows than its tokenizer has tokens
        self.adds_bos = self.tokenizer.encode("a", True)[:1] == [self.tokenizer.bos]
        self._eog: tuple[int, ...] = ()

    @property
    def eog(self) -> tuple[int, ...]:
        """The tokens that end a text; found on first use."""
        if not self._eog:
            self._eog = tuple(
                token for token in range(self.tokenizer.n_vocab) if self.tokenizer.is_eog(token)
            )
        return self._eog

    def fim(self, name: str) -> int | None:
        """The token for filling in: "pre", "suf", "mid", "rep" or "sep"; None: the model has none."""
        return self.tokenizer._special(f"fim_{name}")

    def piece(self, token: int) -> bytes:
        """The bytes of a token; of a control token its name; none of a row without a token."""
        return self.tokenizer._piece(token, special=True) if token < self.tokenizer.n_vocab else b""

    def text(self, tokens: list[int]) -> str:
        """The text of tokens."""
        return b"".join(map(self.piece, tokens)).decode("utf-8", "replace")

    def has_control(self, texts: Iterable[str]) -> bool:
        """Whether any of them is written with a control token."""
        tokens = (token for text in texts for token in self.tokenizer.encode(text, False, True))
        return any(not self.tokenizer.token_to_piece(token) for token in tokens)
