"""The processes in which libllama's grammars run; a script, which imports nothing of pykvgraph.

libllama goes through all ways to read a text side by side. A grammar with many of them takes minutes for a
token, or memory without an end, and no call of it can be stopped: only its process can. The first process
reads the vocabulary. It forks one for each grammar, which answers on a socket of its own, and which the
kernel ends when a call takes more processor time, or more memory, than it may.

Arguments: the number of a socket, each of whose messages brings the socket of a new grammar; libllama's file,
the vocabulary's file and libllama's overrides for it in hexadecimal, the two limits in seconds and in bytes,
all as JSON.
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

    def _start_clock(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, self._seconds)
        signal.setitimer(signal.ITIMER_VIRTUAL, _PATIENCE)

    def _stop_clock(self) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _stand_back_when_asked() -> None:
    """SIGVTALRM gives this process the lowest priority, also within a call.

    A handler of Python's would run behind the call. C's nice() is one itself: it adds the signal's number,
    26, and 19 is the most.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGVTALRM, ctypes.cast(libc.nice, ctypes.c_void_p))


def _serve(connection: socket.socket, words: _Vocabulary, seconds: float, n_bytes: int) -> NoReturn:
    """A grammar's text comes, then tokens, each of them four bytes; each message is answered by allowed()."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    own = size + n_bytes if most == resource.RLIM_INFINITY else min(size + n_bytes, most)
    resource.setrlimit(resource.RLIMIT_AS, (own, own))
    connection.sendall(b"+")
    os.dup2(os.memfd_create("said"), _STDERR)
    _stand_back_when_asked()
    grammar = _Grammar(words, seconds)
    can_read = grammar.begin(_message(connection))
    connection.sendall(b"+" if can_read else b"-" + _said())
    while can_read:
        tokens = _message(connection)
        for (token,) in struct.iter_unpack("=i", tokens):
            grammar.accept(token)
        connection.sendall(grammar.allowed())
    os._exit(0)


def _said() -> bytes:
    """What libllama wrote to stderr, the beginning of it."""
    return os.pread(_STDERR, _MOST_SAID, 0)


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
    number, library, file, overrides, seconds, n_bytes = json.loads(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets those that have ended
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=number)
    words = _Vocabulary(library, file, bytes.fromhex(overrides))
    while True:
        data, sockets, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        with socket.socket(fileno=sockets[0]) as connection:
            try:
                child = os.fork()
            except OSError:
                continue  # whoever asked sees the socket's end
            if child == 0:
                try:
                    control.close()
                    _serve(connection, words, seconds, n_bytes)
                finally:
                    os._exit(1)


if __name__ == "__main__":
    _main()
