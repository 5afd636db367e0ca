"""A grammar that says which tokens may come next, in a process that may be ended."""

from __future__ import annotations

import enum
import hashlib
import importlib.util
import json
import math
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pykvgraph import env
from pykvgraph._native import libllama
from pykvgraph._native.abandoned import work
from pykvgraph._native.fork import renew_lock_in_child
from pykvgraph.errors import InvalidArgumentError, KVGraphError, NotCopied
from pykvgraph.model.tokenizer import Tokenizer
from pykvgraph.model.vocabulary_file import VocabularyFile
from pykvgraph.sampling import grammar_process

# for a token; an ordinary grammar takes 3 to 30 ms (49,152 and 262,144 tokens in the vocabulary)
MOST_SECONDS = 1.0  # of processor time
MOST_BYTES = 256 << 20
_MOST_WAITED = 30.0  # seconds, on a machine that gives it no processor time
_LOOKS = 0.1  # seconds from one look whether it is still wanted to the next
_MOST_KNOWN = 1024

Allowed = npt.NDArray[np.bool_]


class GrammarKind(enum.Enum):
    """What a grammar is written in, and who reads it. The value: what its process is asked for."""

    GBNF = b"g"  # libllama
    SCHEMA = b"j"  # llguidance, as the next one
    LARK = b"l"


class GrammarHost(NotCopied):
    """Starts processes for the grammars of one vocabulary; the first one reads that."""

    def __init__(self, file: VocabularyFile, n_vocab: int) -> None:
        self.n_vocab = n_vocab
        self._file = file
        self._lock = threading.RLock()
        renew_lock_in_child(self, "_lock")
        self._pid = 0
        self._finalizer: weakref.finalize[..., GrammarHost] | None = None
        self._known: dict[bytes, None] = {}  # digests of grammars that could be read

    def knows(self, text: str) -> bool:
        """Whether a grammar was read before."""
        return _digest(text) in self._known

    def learn(self, text: str) -> None:
        """A grammar could be read."""
        with self._lock:
            while len(self._known) >= _MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[_digest(text)] = None

    def connect(self, kind: GrammarKind) -> socket.socket:
        """The socket of a new process. Raises KVGraphError when there can be none."""
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            try:
                if self._pid != os.getpid() or self._process.poll() is not None:
                    self._start()
                socket.send_fds(self._control, [kind.value], [theirs.fileno()])
            except (OSError, subprocess.SubprocessError) as error:
                ours.close()
                raise KVGraphError(f"the process for grammars can't be started: {error}") from error
            except BaseException:
                ours.close()
                raise
        return ours

    def _start(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._control, theirs = socket.socketpair()
        arguments = [
            theirs.fileno(),
            str(libllama.path()),
            f"/proc/self/fd/{self._file.number}",
            self._file.overrides.hex(),
            MOST_SECONDS,
            MOST_BYTES,
            _folder_of_llguidance(),
        ]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", grammar_process.__file__, json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno(), self._file.number],
                env=env.without_gpus(),
                start_new_session=True,  # Ctrl-C is not for it
            )
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, _end, self._pid, self._control, self._process)


def _folder_of_llguidance() -> str:
    """Where the process finds it, which sees neither PYTHONPATH nor its folder."""
    spec = importlib.util.find_spec("llguidance")
    return "" if spec is None or spec.origin is None else str(Path(spec.origin).parents[1])


_hosts: weakref.WeakKeyDictionary[Tokenizer, GrammarHost] = weakref.WeakKeyDictionary()
_hosts_lock = threading.RLock()
renew_lock_in_child(sys.modules[__name__], "_hosts_lock")


def host_of(tokenizer: Tokenizer) -> GrammarHost:
    """What starts grammars over the tokens of a tokenizer: one, for as long as that lives."""
    with _hosts_lock:
        host = _hosts.get(tokenizer)
        if host is None:
            host = _hosts[tokenizer] = GrammarHost(tokenizer._file, tokenizer.n_vocab)
        return host


class Grammar(NotCopied):
    """One text's way through a grammar: which tokens may come next, and which one has come.

    Its process begins when it is first asked, and is told again what has come when that was interrupted or
    is not this process's. Raises InvalidArgumentError for what can't be read, and as allowed() does.
    """

    def __init__(self, text: str, host: GrammarHost, kind: GrammarKind = GrammarKind.GBNF) -> None:
        self._text = text
        self._host = host
        self._kind = kind
        self._tokens: list[int] = []
        self._allowed: Allowed | None = None
        self._link: _Link | None = None
        key = kind.name + text
        if not host.knows(key):
            self.allowed()
            host.learn(key)
            self._link = None  # others may be many, and wait for long until they begin

    def ready(self, seconds: float) -> bool:
        """Whether allowed() would return at once; waits so long for that. Raises as allowed() does."""
        if self._allowed is None:
            link = self._taken_link()
            if link is None:
                link = _Link(self._host.connect(self._kind), self._host.n_vocab, self._kind)
                link.ask(self._text.encode(), self._tokens)
            try:
                self._allowed = link.answer(seconds)
            except BaseException:  # its traceback keeps the link for as long as somebody keeps it
                link.close()
                raise
            self._link = link
        return self._allowed is not None

    def allowed(self) -> Allowed:
        """bool (n_vocab,): the tokens that may come next.

        Raises InvalidArgumentError when that takes more time or memory than it may, KVGraphError when there
        is no process for it, and AbandonedError.
        """
        wanted = work()
        while not self.ready(_LOOKS):
            wanted.require()
        assert self._allowed is not None
        return self._allowed

    def accept(self, token: int) -> None:
        """This token has come, which was allowed, and doesn't end the text."""
        link = self._taken_link()
        self._tokens.append(token)
        self._allowed = None
        if link is not None:
            link.ask(None, [token])
            self._link = link

    def copy(self) -> Grammar:
        """Another one, which goes on as this one does."""
        other = Grammar.__new__(Grammar)
        other.__dict__.update(self.__dict__)
        other._tokens, other._link = self._tokens.copy(), None
        return other

    def _taken_link(self) -> _Link | None:
        """What is put back when nothing was raised: Ctrl-C may come in the midst of a message."""
        link, self._link = self._link, None
        return link if link is not None and link.pid == os.getpid() else None


class _Link:
    """A connection with a grammar's process: one question, then its answer."""

    def __init__(self, connection: socket.socket, n_vocab: int, kind: GrammarKind) -> None:
        connection.setblocking(False)
        self.pid = os.getpid()
        self._connection = connection
        self.close = weakref.finalize(self, connection.close)
        self._n_vocab = n_vocab
        self._kind = kind
        # a byte for each token, 0 where it is allowed; of llguidance a bit, 1 where it is, in words of 32
        self._n_bytes = n_vocab if kind is GrammarKind.GBNF else -(-n_vocab // 32) * 4
        self._came = bytearray()
        self._unsent = b""
        self._n_front = 0
        self._since = math.inf  # it was asked, or has said something

    def ask(self, text: bytes | None, tokens: list[int]) -> None:
        """text: at the beginning."""
        front = b"" if text is None else _framed(text)
        self._n_front = 0 if text is None else 2
        self._unsent += front + _framed(struct.pack(f"={len(tokens)}i", *tokens))
        self._since = time.monotonic()
        self._send()

    def answer(self, seconds: float) -> Allowed | None:
        """What is allowed; None: it isn't known after so many seconds."""
        end = time.monotonic() + seconds
        poll = select.poll()
        while True:
            if self._unsent:
                self._send()
            poll.register(self._connection, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            wait = max(end - time.monotonic(), 0)
            if not poll.poll(math.ceil(wait * 1000)):
                if time.monotonic() - self._since > _MOST_WAITED:
                    raise _too_slow(self._kind)
                return None
            self._receive()
            if len(self._came) == self._n_front + self._n_bytes:
                data = np.frombuffer(self._came, np.uint8, offset=self._n_front)
                self._came = bytearray()
                if self._kind is GrammarKind.GBNF:
                    found: Allowed = data == 0
                    return found
                return np.unpackbits(data, count=self._n_vocab, bitorder="little").view(np.bool_)

    def _send(self) -> None:
        try:
            n = self._connection.send(self._unsent)
            self._unsent = self._unsent[n:]
        except BlockingIOError:
            pass
        except ConnectionError:  # what it has said before it ended is still to be read
            self._unsent = b""

    def _receive(self) -> None:
        try:
            data = self._connection.recv(1 << 20)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        self._came += data
        self._since = time.monotonic()
        if self._n_front and self._came[1:2] == b"-":
            if data:  # the reader's own words follow, up to the end
                return
            raise _unread(self._kind, " ".join(self._came[2:].decode("utf-8", "replace").split()))
        if not data:
            if self._n_front and not self._came:
                raise KVGraphError("the process for grammars has ended: is there too little memory?")
            raise _too_slow(self._kind)


def _unread(kind: GrammarKind, said: str) -> InvalidArgumentError:
    if kind is GrammarKind.GBNF:
        return InvalidArgumentError(
            "libllama can't read the grammar: it needs a rule `root`, every rule that is named, and no "
            "rule may begin with itself (GBNF, in llama.cpp's grammars/README.md)"
            + (f". It says: {said}" if said else "")
        )
    what = "json_schema" if kind is GrammarKind.SCHEMA else "the grammar or a schema in it"
    return InvalidArgumentError(f"{what} can't be obeyed: {said}")


def _too_slow(kind: GrammarKind) -> InvalidArgumentError:
    limits = f"more than {MOST_SECONDS:g} s of processor time, or {MOST_BYTES >> 20} MiB, for one token"
    if kind is not GrammarKind.GBNF:
        return InvalidArgumentError(
            f"the schema or grammar can't be obeyed: it takes {limits}: make it smaller"
        )
    return InvalidArgumentError(
        f"the grammar takes {limits}: make it smaller, with fewer ways to read the same text"
    )


def _framed(data: bytes) -> bytes:
    return struct.pack("=I", len(data)) + data


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _end(pid: int, control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    if pid == os.getpid():
        process.kill()
        process.wait()
