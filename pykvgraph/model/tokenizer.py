"""Text to token ids and back: libllama's vocabulary of the same GGUF file."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import resource
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pykvgraph._native import libllama
from pykvgraph._native.abandoned import Wanted, work
from pykvgraph._native.fork import importing, renew_cached_properties_in_child, renew_lock_in_child
from pykvgraph._native.handles import Handle, repr_of
from pykvgraph._native.library import lib
from pykvgraph.checks import INT32_MAX, Integers, flag, integer, integers, shown
from pykvgraph.errors import (
    DeviceError,
    InvalidArgumentError,
    KVGraphError,
    ModelLoadError,
    NotCopied,
    UnsupportedError,
)
from pykvgraph.model.gguf_file import GgufFile, read_key, read_parts, read_strings
from pykvgraph.model.long_text import LONG, LongText
from pykvgraph.model.token_strings import TokenStrings
from pykvgraph.model.vocabulary_file import VocabularyFile
from pykvgraph.params.overrides import Overrides, set_in_libllama

R = TypeVar("R")

# whose UTF-8 has every byte that any text has
_EVERY_BYTE = "".join(
    map(
        chr, (*range(0x800), *range(0x800, 0xD800, 0x800), 0xE000, 0xF000, *range(0x10000, 0x110000, 0x10000))
    )
)
_WHITE_SPACE = b" \t\n\v\f\r"
_SPACE = "\u2581"  # SentencePiece's word boundary

# some pre-tokenizers are a std::regex, which recurses for every character of a word: 320 bytes each, measured
_STACK_PER_CHARACTER = 1024
_STACK_AT_LEAST = 2**18  # for anything but characters
_LONGEST_TEXT = 2**26
# what libllama takes at most for a byte of text; measured: 1,215 for spaces (byte level), and 86 for one long
# word (SentencePiece); 't5' may replace a byte by 64, and takes 27 bytes for each
_BYTES_PER_BYTE = 2048
_BYTES_PER_PIECE_BYTE = 192
_SMALL_CHANGE = 4 << 20
_stack_size_lock = threading.RLock()
renew_lock_in_child(sys.modules[__name__], "_stack_size_lock")


_KIND = "tokenizer.ggml.model"
# BPE by a list of merges, after the text was split by an expression
_MERGED = ("gpt2", "gemma4", "hybriddna", "whitespace")
# how a file says that it has none; the tokens of "test" stand for no text, libllama's own tests write it
_NO_KINDS = (None, "none", "no_vocab", "test")


def has_tokenizer(gguf: int) -> bool:
    """Whether an open file says how text becomes tokens, be it in a way that can't be used here."""
    return read_key(gguf, _KIND) not in _NO_KINDS


@dataclass(frozen=True)
class LoadedVocabulary:
    """A file's vocabulary: what was checked before libllama saw the file, and what libllama made of it."""

    kind: str  # tokenizer.ggml.model
    pre: str | None  # tokenizer.ggml.pre
    strings: TokenStrings
    space_prefix: bool  # a space is put before the text, and taken away again when decoding
    model: Handle  # libllama's, of the vocabulary alone
    file: VocabularyFile

    @staticmethod
    def read(gguf: int, overrides: Overrides) -> LoadedVocabulary:
        """Reads an open file, which was opened with these overrides.

        Raises UnsupportedError or ModelLoadError when its tokenizer can't be used.

        libllama reads the very file that was checked: another one may have its name by now, or none.
        """
        kind = read_key(gguf, _KIND)
        if not has_tokenizer(gguf):
            said = "is missing" if kind is None else f"is {kind!r}"
            raise UnsupportedError(
                f"{read_parts(gguf)[0][0]} has no tokenizer ({_KIND} {said}), so text can't be turned into "
                "tokens: give token ids, or a file that was made with its tokenizer"
            )
        lib().kvg_gguf_check_vocab(gguf)
        pre = read_key(gguf, "tokenizer.ggml.pre")
        llama = libllama.low_level()
        number = lib().kvg_gguf_fd(gguf, 0)
        given = _for_libllama(llama, overrides)
        return LoadedVocabulary(
            kind=kind,
            pre=pre,
            strings=TokenStrings(read_strings(gguf, "tokenizer.ggml.tokens")),
            space_prefix=_has_space_prefix(gguf, kind),
            model=Handle.own(
                _load,
                llama,
                f"/proc/self/fd/{number}",
                kind,
                pre,
                given,
                free=llama.llama_model_free,
                name="tokenizer",
                shared=True,
            ),
            file=VocabularyFile(number, bytes(given)),
        )


class Tokenizer(NotCopied):
    """Turns text into token ids and back: `model.tokenizer`. Several threads may use it.

    n_vocab: number of tokens; ids are 0 to n_vocab - 1. bos, eos: ids of the tokens that begin and end a
    text, or None. space_prefix: whether encode() puts a space before the text and decode() removes it.
    """

    def __init__(self, path: Path, vocabulary: LoadedVocabulary) -> None:
        llama = libllama.low_level()
        self._llama = llama
        self._handle = vocabulary.model
        self._vocab = self._handle.call(llama.llama_model_get_vocab)
        self._kind = vocabulary.kind
        self._merged = vocabulary.kind in _MERGED
        self._strings = vocabulary.strings
        self._pieces: tuple[dict[int, bytes], dict[int, bytes]] = {}, {}  # without control tokens, and with
        self._eog: dict[int, bool] = {}
        self._file = vocabulary.file
        self.space_prefix = vocabulary.space_prefix
        self.n_vocab = vocabulary.strings.n
        self._long = LongText(llama, vocabulary.model, self.n_vocab)
        self.bos = self._special("bos")
        self.eos = self._special("eos")
        for name, adds, token in (
            ("bos", llama.llama_vocab_get_add_bos, self.bos),
            ("eos", llama.llama_vocab_get_add_eos, self.eos),
        ):
            # libllama would abort the process at the first text
            if self._ask(adds) and token is None:
                raise ModelLoadError(f"{path} wants an {name} token with every text, but names none")

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, kv_overrides: Overrides | None = None) -> Tokenizer:
        """The tokenizer of a GGUF file by itself, whether or not its model could run here.

        Raises what Model.tokenizer and GgufFile raise.
        """
        with GgufFile(path, kv_overrides=kv_overrides) as file:
            return cls(file.path, file._handle.call(LoadedVocabulary.read, file.kv_overrides))

    def encode(
        self,
        text: str,
        add_special: bool = True,
        parse_special: bool = False,
        *,
        add_space_prefix: bool = True,
    ) -> list[int]:
        """Token ids of `text`.

        add_special: add the tokens that the model wants around a text, such as BOS. parse_special: text that
        spells a control token becomes that token; don't use it for text that others wrote, as they could then
        insert control tokens. add_space_prefix: False for a text that goes on another one: no space is put
        before it, also where space_prefix is True. Raises InvalidArgumentError when `text` is not a str, is
        longer than 64 MiB, or has a character that this vocabulary has no token for; DeviceError when there
        is too little memory.
        """
        if not flag(add_space_prefix, "add_space_prefix") and self.space_prefix and self._mark:
            # the mark is cut off again; tokens of the text begin behind it, as none has the mark in it
            n_mark = len(self.encode(self._mark, False))
            around, n_front = self._around() if flag(add_special, "add_special") else ([], 0)
            body = self.encode(self._mark + text, False, parse_special)[n_mark:] if text else []
            return around[:n_front] + body + around[n_front:]
        flag(add_special, "add_special")
        flag(parse_special, "parse_special")
        data = _utf8(text)
        if len(data) > _LONGEST_TEXT:
            raise InvalidArgumentError(
                f"the text has {len(data)} bytes, over {_LONGEST_TEXT}: encode it in parts"
            )
        self._refuse_unknown(text)
        wanted = work()
        wanted.require()
        needed = _STACK_AT_LEAST + len(text) * _STACK_PER_CHARACTER
        if self._merged and needed > lib().kvg_stack_left():
            # the call is the other thread's: Ctrl-C may end this one's waiting before it is over
            return _on_large_stack(needed, self._encode, data, add_special, parse_special, wanted)
        return self._encode(data, add_special, parse_special, wanted)

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Token ids of two texts that are read as one, such as a question and what may answer it.

        Between them and around them are the tokens that the model wants: BOS first EOS SEP second EOS. Raises
        what encode() raises.
        """
        llama, eos, sep = self._llama, self.eos, self._special("sep")
        ends = self._ask(llama.llama_vocab_get_add_eos)
        parts = self._ask(llama.llama_vocab_get_add_sep)
        begin = [self.bos] if self._ask(llama.llama_vocab_get_add_bos) else []
        end = [sep if eos is None else eos] if ends else []
        between = [*end, *([sep] if parts else [])]
        tokens = [*begin, *self.encode(first, False), *between, *self.encode(second, False), *end]
        return [token for token in tokens if token is not None]

    def least_tokens(self, text: str) -> int:
        """Tokens that a text has at least, by its length; found without encoding it. 0 where nobody knows.

        Raises InvalidArgumentError when `text` is not a str or can't be written as UTF-8.
        """
        data, dropped = _utf8(text), self._dropped
        return 0 if dropped is None else -(-len(data.translate(None, dropped)) // self._long.longest)

    @functools.cached_property
    def _mark(self) -> str:
        """A character that tokens can spell and that is part of no longer token; "" where there is none."""
        if self._kind != "llama":
            return ""
        for mark in map(chr, (*range(1, 9), *range(0xE000, 0xE010))):
            if self._has_tokens(mark) and not self._strings.is_part(mark):
                return mark
        return ""

    def decode(self, ids: Integers) -> str:
        """The text of token ids; control tokens are left out, and bytes that are not UTF-8 become U+FFFD.

        Where encode() puts a space before a text (space_prefix), decode() drops the leading space; also when
        the ids are from the middle of a text, which had that space. token_to_piece() drops none. Raises
        InvalidArgumentError for an id that is not in the vocabulary.
        """
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Integers) -> bytes:
        """The same as decode(), but as the tokens' bytes. Raises what decode() raises."""
        array = integers(ids, "ids", 0, self.n_vocab - 1)
        data = b"".join(map(self._piece, array.tolist()))
        return data.removeprefix(b" ") if self.space_prefix else data

    def token_to_piece(self, id: int, *, special: bool = False) -> bytes:
        """The bytes of one token, which may be only part of a character; empty for a control token.

        special: a control token has its name.
        Raises InvalidArgumentError for an id that is not in the vocabulary.
        """
        return self._piece(integer(id, "id", 0, self.n_vocab - 1), flag(special, "special"))

    def is_eog(self, id: int) -> bool:
        """Whether a generation ends at this token: it marks the end of a text, a turn or a message.

        Raises InvalidArgumentError for an id that is not in the vocabulary.
        """
        id = integer(id, "id", 0, self.n_vocab - 1)
        known = self._eog.get(id)
        if known is None:
            known = self._eog[id] = bool(self._ask(self._llama.llama_vocab_is_eog, id))
        return known

    def __repr__(self) -> str:
        return repr_of(self, lambda: f"{self.n_vocab} tokens, bos {self.bos}, eos {self.eos}")

    def _special(self, name: str) -> int | None:
        """The token that the file names for this: "bos", "nl", "fim_pre", ...; None: it names none."""
        token = int(self._ask(getattr(self._llama, f"llama_vocab_{name}")))
        return token if token >= 0 else None

    def _name(self, token: int | None) -> str:
        """What a chat template writes for BOS or EOS; "" for none."""
        return "" if token is None else self._piece(token, special=True).decode("utf-8", "replace")

    def _ask(self, function: Callable[..., R], *arguments: Any) -> R:
        """function(vocabulary, *arguments), with libllama's vocabulary."""
        return self._handle.call(lambda _: function(self._vocab, *arguments))

    def _encode(self, data: bytes, add_special: bool, parse_special: bool, wanted: Wanted) -> list[int]:
        is_large = self._merged or self._kind == "t5"
        _require_memory(len(data) * (_BYTES_PER_BYTE if is_large else _BYTES_PER_PIECE_BYTE))
        if len(data) < LONG:
            return self._ask(self._encode_whole, data, add_special, parse_special)
        around, n_front = self._around() if add_special else ([], 0)
        return [*around[:n_front], *self._long.encode(data, parse_special, wanted), *around[n_front:]]

    def _encode_whole(self, vocab: Any, data: bytes, add_special: bool, parse_special: bool) -> list[int]:
        size = len(data) + 8
        while True:
            ids = np.empty(size, np.int32)
            address = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
            count = self._llama.llama_tokenize(
                vocab, data, len(data), address, size, add_special, parse_special
            )
            if 0 <= count <= size:
                tokens: list[int] = ids[:count].tolist()
                return tokens
            if not size < -count <= INT32_MAX:
                raise KVGraphError(f"libllama answered {count} to a text of {len(data)} bytes")
            size = -count

    def _around(self) -> tuple[list[int], int]:
        """The tokens that are put around a text, and how many of them before it."""
        around = self._ask(self._encode_whole, b"", True, False)
        has_front = self._kind == "bert" or self._ask(self._llama.llama_vocab_get_add_bos)
        return around, int(bool(around) and has_front)

    @functools.cached_property
    def _dropped(self) -> bytes | None:
        """Bytes that may become no token; None where whole words may become one, or none.

        All other bytes are in a token whose text has at least as many.
        """
        if self._kind not in ("llama", "rwkv", "gpt2", "gemma4"):
            return None
        dropped = self._strings.without_token if self._merged else b""
        every = _EVERY_BYTE.encode()
        if self._merged and self.decode_bytes(self.encode(_EVERY_BYTE, False)) != every.translate(
            None, dropped
        ):
            return None
        return dropped + _WHITE_SPACE if self._long.drops_spaces else dropped

    def _piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of a token that is in the vocabulary. special: of a control token, its name."""
        pieces = self._pieces[special]
        piece = pieces.get(token)
        if piece is None:
            piece = pieces[token] = self._ask(self._read_piece, token, special)
        return piece

    def _read_piece(self, vocab: Any, token: int, special: bool) -> bytes:
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = self._llama.llama_token_to_piece(vocab, token, buffer, size, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            size = -count

    def _refuse_unknown(self, text: str) -> None:
        """libllama ends the process at a character that is no token when its bytes are none either."""
        if self._kind != "llama" or len(self._strings.single_bytes) == 256 or not text:
            return
        for character in sorted(set(text.replace(" ", _SPACE)) | {_SPACE}):
            if not self._has_tokens(character):
                raise InvalidArgumentError(
                    f"this vocabulary has no token for {character!r}, nor tokens for its bytes"
                )

    def _has_tokens(self, character: str) -> bool:
        """Whether SentencePiece can spell it."""
        data = character.encode()
        return self._strings.single_bytes.issuperset(data) or data in self._strings


renew_cached_properties_in_child(Tokenizer)


def _utf8(text: str) -> bytes:
    if not isinstance(text, str):
        raise InvalidArgumentError(f"text must be a str, got {shown(text)}")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"the text can't be written as UTF-8: {error}") from error


def _require_memory(n_bytes: int) -> None:
    """Raises DeviceError when n_bytes can't be allocated: in libllama that would end the process."""
    if n_bytes < _SMALL_CHANGE and resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return  # without a limit, the kernel gives that little and finds the pages later
    try:
        mmap.mmap(-1, n_bytes + _SMALL_CHANGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        raise DeviceError(
            f"out of host memory: to encode this text may take {n_bytes + _SMALL_CHANGE} bytes; encode it in "
            "parts, or raise the limit (ulimit -v)"
        ) from None


def _has_space_prefix(gguf: int, kind: str) -> bool:
    """Whether libllama puts a space before a text's first word; with 'bert', before every word."""
    prefix = read_key(gguf, "tokenizer.ggml.add_space_prefix")
    if kind == "t5":
        return prefix is True or read_key(gguf, "tokenizer.ggml.remove_extra_whitespaces") is True
    return kind == "bert" or (kind == "llama" and prefix is not False)


def _on_large_stack(size: int, function: Callable[..., R], *arguments: Any) -> R:
    """function(*arguments) in a thread with `size` bytes of stack more than any thread needs."""
    with importing:
        from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(1) as pool:
        with _stack_size_lock:
            before = threading.stack_size(((size >> 20) + 2) << 20)
            try:
                result = pool.submit(function, *arguments)
            except RuntimeError as error:
                raise InvalidArgumentError(
                    f"the text is too long for this machine ({error}): encode it in parts"
                ) from error
            finally:
                threading.stack_size(before)
        return result.result()


def _for_libllama(llama: Any, given: Overrides) -> Any:
    """An array of its structs."""
    # of a split model the first part has the vocabulary: the others are none of libllama's business
    overrides = (llama.llama_model_kv_override * (len(given) + 2))()  # the last one ends it
    set_in_libllama(overrides, {**given, "split.count": 0})
    return overrides


def _load(llama: Any, path: str, kind: str, pre: str | None, given: Any) -> int:
    params = llama.llama_model_default_params()
    params.vocab_only = True
    # no device at all: asking a GPU for its properties takes time and memory
    no_devices = (ctypes.c_void_p * 1)()
    params.devices = ctypes.cast(no_devices, ctypes.c_void_p)
    params.kv_overrides = given
    with libllama.quiet():
        model: int | None = llama.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise ModelLoadError(
            f"libllama can't read the tokenizer of {os.readlink(path)} (tokenizer.ggml.model {kind!r}, "
            f"tokenizer.ggml.pre {pre!r}): convert the model again with a newer llama.cpp"
        )
    return model
