"""Text to tokens and back as llama-cpp-python has it: bytes, control tokens shown or not, -1 for no token."""

from __future__ import annotations

import ctypes
from typing import Any

from pykvgraph._native import libllama
from pykvgraph.checks import integers
from pykvgraph.model.tokenizer import Tokenizer

NO_TOKEN = -1


class LlamaVocabulary:
    """A tokenizer with llama-cpp-python's methods: what Llama.tokenizer() returns."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._llama = libllama.low_level()
        self.bos = NO_TOKEN if tokenizer.bos is None else tokenizer.bos
        self.eos = NO_TOKEN if tokenizer.eos is None else tokenizer.eos

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        """Token ids. add_bos: with what the model wants around a text. special: control tokens may be spelt.

        Bytes that are no UTF-8 are left out. Raises what Tokenizer.encode raises.
        """
        return self._tokenizer.encode(text.decode("utf-8", "ignore"), bool(add_bos), bool(special))

    def detokenize(
        self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False
    ) -> bytes:
        """The bytes of tokens; special: with the names of control tokens. A space after BOS is left out.

        prev_tokens: those before; they make no difference. Raises InvalidArgumentError for an unknown id.
        """
        ids = integers(tokens, "tokens", 0, self._tokenizer.n_vocab - 1).tolist()
        data = b"".join(self._tokenizer._piece(token, bool(special)) for token in ids)
        return data.removeprefix(b" ") if ids[:1] == [self.bos] else data

    def encode(self, text: str, add_bos: bool = True, special: bool = True) -> list[int]:
        """tokenize(), of a str."""
        return self.tokenize(text.encode("utf-8", "ignore"), add_bos, special)

    def decode(self, tokens: list[int]) -> str:
        """detokenize(), as a str."""
        return self.detokenize(tokens).decode("utf-8", "ignore")

    def piece(self, token: int) -> bytes:
        """The bytes of one token as part of a text; none of a control token."""
        return self._tokenizer.token_to_piece(token)

    def is_eog(self, token: int) -> bool:
        """Whether a generation ends at this token."""
        return self._tokenizer.is_eog(token)

    def text_of(self, token: int) -> str:
        """What the file calls a token; "" for no token."""
        if token == NO_TOKEN:
            return ""
        name: bytes = self._tokenizer._ask(self._llama.llama_vocab_get_text, token)
        return name.decode("utf-8", "replace")

    def special(self, name: str) -> int:
        """Another token that the model names: "nl", "fim_pre", "fim_suf", "fim_mid"; -1: none."""
        token = self._tokenizer._special(name)
        return NO_TOKEN if token is None else token

    def metadata(self) -> dict[str, str]:
        """Every key of the file that is no array, and its value as text."""
        return self._tokenizer._handle.call(self._read_metadata)

    def _read_metadata(self, model: int) -> dict[str, str]:
        llama = self._llama
        return {
            _text(llama.llama_model_meta_key_by_index, model, i): _text(
                llama.llama_model_meta_val_str_by_index, model, i
            )
            for i in range(llama.llama_model_meta_count(model))
        }


def _text(function: Any, model: int, index: int) -> str:
    size = 256
    while True:
        buffer = ctypes.create_string_buffer(size)
        count = function(model, index, buffer, size)
        if count < size:
            return buffer.value.decode("utf-8", "replace")
        size = count + 1
