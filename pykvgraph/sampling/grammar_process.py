"""The processes in which grammars run; a script, which imports nothing of pykvgraph.

libllama goes through all ways to read a text side by side. A grammar with many of them takes minutes for a
token, or memory without an end, and no call of it can be stopped: only its process can. The first process
reads the vocabulary. It forks one for each grammar, which answers on a socket of its own, and which the
kernel ends when a call takes more processor time, or more memory, than it may. llguidance counts its steps,
but schemas are known that end its process.

Arguments: the number of a socket, each of whose messages brings the socket of a new grammar; libllama's file,
the vocabulary's file and libllama's overrides for it in hexadecimal, the two limits in seconds and in bytes,
the folder that llguidance is in, all as JSON.
"""

import ctypes
import importlib.util
import json
import os
import resource
import signal
import socket
import struct
import sys
from array import array
from pathlib import Path
from typing import Any, NoReturn

_BYTES_OF_CANDIDATE = 12  # id, logit, p
_HIGH_BYTE = 7  # of the logit: 0 as long as that is 0.0, and not when it is -inf
_PATIENCE = 0.05  # seconds of processor time: a grammar that takes longer stands back behind everybody else
_LENGTH = struct.Struct("=I")
_STDERR = 2
_UNUSED, _NO_TEXT = 2, 1 | 8  # libllama's attributes of a token: that, and unknown or control
_MOST_STATES = 50_000  # of llguidance's lexer, 1 to 2 KiB each; 250,000 by default
_MOST_SAID = 400  # bytes of what libllama says of a grammar that it can't read


class _Vocabulary:
    """libllama's vocabulary of a file, and one candidate for each of its tokens."""

    def __init__(self, library: str, path: str, overrides: bytes) -> None:
        llama = self.llama = _declared(library)
        params = llama.llama_model_default_params()
        params.vocab_only = True
        no_devices = (ctypes.c_void_p * 1)()
        params.devices = ctypes.cast(no_devices, ctypes.c_void_p)
        override = llama.llama_model_kv_override
        values = (override * (len(overrides) // ctypes.sizeof(override))).from_buffer_copy(overrides)
        params.kv_overrides = values
        self.vocab = llama.llama_model_get_vocab(llama.llama_model_load_from_file(path.encode(), params))
        self.n = llama.llama_vocab_n_tokens(self.vocab)
        self.fresh = (llama.llama_token_data * self.n)()
        ids, candidates = array("i", range(self.n)).tobytes(), bytearray(self.n * _BYTES_OF_CANDIDATE)
        for byte in range(4):
            candidates[byte::_BYTES_OF_CANDIDATE] = ids[byte::4]
        ctypes.memmove(self.fresh, bytes(candidates), len(candidates))


class _Guides:
    """llguidance's own view of the vocabulary; made for the first schema, in a second for 262,144 tokens."""

    def __init__(self, words: _Vocabulary, folder: str) -> None:
        sys.path.append(folder)
        import llguidance

        self.library = llguidance
        llama, vocab = words.llama, words.vocab
        eos = [token for token in range(words.n) if llama.llama_vocab_is_eog(vocab, token)]
        new_tokenizer: Any = llguidance.LLTokenizer  # whose stub lacks it
        self.tokenizer = new_tokenizer.from_llamacpp(
            tokens=[_piece(llama, vocab, token) for token in range(words.n)],
            vocab_ptr=vocab,
            tokenize_fptr=ctypes.cast(llama.llama_tokenize, ctypes.c_void_p).value,
            eos_token=eos or [0],
            slices=None,
        )


def _piece(llama: Any, vocab: int, token: int) -> bytes:
    """The bytes of a token, as llguidance wants them: behind FF where it is no text."""
    attributes = llama.llama_vocab_get_attr(vocab, token)
    if attributes & _UNUSED:
        return b""
    size = 64
    while True:
        buffer = ctypes.create_string_buffer(size)
        n = llama.llama_token_to_piece(vocab, token, buffer, size, 0, True)
        if n >= 0:
            return (b"\xff" if attributes & _NO_TEXT else b"") + buffer.raw[:n]
        size = -n


def _declared(library: str) -> Any:
    """libllama's functions, by a module that is run from its file: importing it would import pykvgraph."""
    file = Path(__file__).parents[1] / "_native" / "llama_ffi.py"
    spec = importlib.util.spec_from_file_location("llama_ffi", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.declared(ctypes.CDLL(library))


class _Grammar:
    """One grammar, in the process that has nothing else to do."""

    def __init__(self, words: _Vocabulary, seconds: float) -> None:
        self._words = words
        self._seconds = seconds
        self._sampler: Any = None
        self._candidates = (words.llama.llama_token_data * words.n)()

    def begin(self, text: bytes) -> bool:
        """Reads a grammar; False: libllama can't."""
        self._start_clock()
        self._sampler = self._words.llama.llama_sampler_init_grammar(self._words.vocab, text, b"root")
        self._stop_clock()
        return bool(self._sampler)

    def accept(self, token: int) -> None:
        """The text goes on with this token, which must be allowed."""
        self._start_clock()
        self._words.llama.llama_sampler_accept(self._sampler, token)
        self._stop_clock()

    def allowed(self) -> bytes:
        """A byte for each token of the vocabulary: 0 for those that may come next."""
        llama, words = self._words.llama, self._words
        size = words.n * _BYTES_OF_CANDIDATE
        ctypes.memmove(self._candidates, words.fresh, size)
        data = ctypes.cast(self._candidates, ctypes.POINTER(llama.llama_token_data))
        array = llama.llama_token_data_array(data=data, size=words.n, selected=-1, sorted=False)
        self._start_clock()
        llama.llama_sampler_apply(self._sampler, ctypes.byref(array))
        self._stop_clock()
        return ctypes.string_at(self._candidates, size)[_HIGH_BYTE::_BYTES_OF_CANDIDATE]

    def said(self) -> bytes:
        """Why it couldn't be read: what libllama wrote to stderr, the beginning of it."""
        return os.pread(_STDERR, _MOST_SAID, 0)

    def _start_clock(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._seconds)
        signal.setitimer(signal.ITIMER_VIRTUAL, _PATIENCE)

    def _stop_clock(self) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


class _Guide(_Grammar):
    """The same of llguidance. kind: b"j", a JSON schema; b"l", a grammar in Lark."""

    def __init__(self, words: _Vocabulary, seconds: float, guides: _Guides, kind: bytes) -> None:
        self._words = words
        self._seconds = seconds
        self._guides = guides
        self._kind = kind

    def begin(self, text: bytes) -> bool:
        library = self._guides.library
        self._start_clock()
        try:
            read = library.LLMatcher.grammar_from_json_schema
            read = read if self._kind == b"j" else library.LLMatcher.grammar_from_lark
            limits = library.LLParserLimits(max_lexer_states=_MOST_STATES, verbose_errors=False)
            grammar = read(text.decode())
            self._matcher = library.LLMatcher(self._guides.tokenizer, grammar, log_level=0, limits=limits)
            self._said = self._matcher.get_error()
            if not self._said and (not any(self._matcher.compute_bitmask()) or self._matcher.is_error()):
                self._said = "no text follows it"
        except ValueError as error:
            self._said = str(error)
        self._stop_clock()
        return not self._said

    def accept(self, token: int) -> None:
        self._start_clock()
        self._matcher.consume_token(token)
        self._stop_clock()

    def allowed(self) -> bytes:
        """A bit for each token of the vocabulary, in words of 32: 1 for those that may come next."""
        size = -(-self._words.n // 32) * 4
        self._start_clock()
        allowed: bytes = self._matcher.compute_bitmask()[:size].ljust(size, b"\0")  # it may have more tokens
        self._stop_clock()
        if self._matcher.is_error():  # too much work
            os._exit(1)
        return allowed

    def said(self) -> bytes:
        data: bytes = self._said.replace("<non-verbose/>", "").encode()
        return data[:_MOST_SAID]


def _stand_back_when_asked() -> None:
    """SIGVTALRM gives this process the lowest priority, also within a call.

    A handler of Python's would run behind the call. C's nice() is one itself: it adds the signal's number,
    26, and 19 is the most.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGVTALRM, ctypes.cast(libc.nice, ctypes.c_void_p))


def _serve(connection: socket.socket, grammar: _Grammar, n_bytes: int) -> NoReturn:
    """A grammar's text comes, then tokens, each of them four bytes; each message is answered by allowed()."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    own = size + n_bytes if most == resource.RLIM_INFINITY else min(size + n_bytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (own, own))
    connection.sendall(b"+")
    os.dup2(os.memfd_create("said"), _STDERR)
    _stand_back_when_asked()
    can_read = grammar.begin(_message(connection))
    connection.sendall(b"+" if can_read else b"-" + grammar.said())
    while can_read:
        tokens = _message(connection)
        for (token,) in struct.iter_unpack("=i", tokens):
            grammar.accept(token)
        connection.sendall(grammar.allowed())
    os._exit(0)


def _message(connection: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, n: int) -> bytes:
    data = b""
    while len(data) < n:
        part = connection.recv(n - len(data))
        if not part:  # nobody needs this grammar any more
            os._exit(0)
        data += part
    return data


def _main() -> None:
    number, library, file, overrides, seconds, n_bytes, folder = json.loads(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets those that have ended
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=number)
    words = _Vocabulary(library, file, bytes.fromhex(overrides))
    guides: _Guides | None = None
    while True:
        kind, sockets, _, _ = socket.recv_fds(control, 1, 1)
        if not kind:
            return
        with socket.socket(fileno=sockets[0]) as connection:
            if kind != b"g" and guides is None:
                guides = _Guides(words, folder)
            try:
                child = os.fork()
            except OSError:
                continue  # whoever asked sees the socket's end
            if child == 0:
                try:
                    control.close()
                    grammar = _Guide(words, seconds, guides, kind) if guides and kind != b"g" else None
                    _serve(connection, grammar or _Grammar(words, seconds), n_bytes)
                finally:
                    os._exit(1)


if __name__ == "__main__":
    _main()
