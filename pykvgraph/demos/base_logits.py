"""Logits of a run in a file, for others to be compared with: `perplexity --kl-divergence-base`.

The file: a header of 40 bytes, `KVGBASE` and 1, then little-endian int32: n_ctx, n_vocab, the number of
chunks, what is read in the place of each chunk's first token (-1: that one), then the chunks' tokens' and the
header's own XXH3-64. After it the tokens, int32, chunk by chunk. Then for each chunk the logits of its rows,
float32 (n_rows, n_vocab), and their XXH3-64.
"""

from __future__ import annotations

import os
import secrets
import stat
import struct
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
import xxhash

from pykvgraph.checks import native_path
from pykvgraph.demos.perplexity import LEAST_N_CTX, ChunkRows, Chunks, Logits
from pykvgraph.errors import InvalidArgumentError, KVGraphError, StateError

_MAGIC = b"KVGBASE\1"
_SIZES = struct.Struct("<8siiiiQ")  # magic, n_ctx, n_vocab, n_chunk, bos, checksum of the tokens
_SUM = struct.Struct("<Q")
_FRONT = _SIZES.size + _SUM.size
_MOST_TOKENS = 1 << 26  # 256 MiB of ids


class BaseWriter:
    """Writes the rows of read_chunks() on one sequence, in their order: `with BaseWriter(...) as file`.

    They are written aside, and the file gets its name when all are there; after an error there is none, or
    the one that was there before. Raises InvalidArgumentError for a device, a pipe or a socket, OSError when
    the file can't be written, KVGraphError for logits that are not finite.
    """

    def __init__(self, path: str | os.PathLike[str], chunks: Chunks, n_vocab: int) -> None:
        target = os.fsdecode(native_path(path))
        if os.path.exists(target) and not os.path.isfile(target):
            raise InvalidArgumentError(f"{target!r} is no file: logits are written into one")
        self._target = Path(os.path.realpath(target))
        self._aside = self._target.with_name(f".kvgbase-{secrets.token_hex(8)}.tmp")
        self._chunks, self._n_vocab = chunks, n_vocab
        self._sum = xxhash.xxh3_64()
        self._n_rows = 0  # of the chunk that is being written
        try:
            self._file: BinaryIO = open(self._aside, "xb")  # noqa: SIM115 - until __exit__
        except OSError as error:
            error.filename = target  # the one that the user knows
            raise
        try:
            self._file.write(_header(chunks, n_vocab))
            self._file.write(_token_bytes(chunks))
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def __enter__(self) -> BaseWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
            if kind is None:
                os.replace(self._aside, self._target)
        finally:
            self._aside.unlink(missing_ok=True)

    def write(self, rows: ChunkRows) -> None:
        """The next rows."""
        if not np.isfinite(rows.logits).all():
            raise KVGraphError("the model's logits are not finite: nothing can be compared with them")
        data = rows.logits.astype("<f4").tobytes()
        self._sum.update(data)
        self._file.write(data)
        self._n_rows += len(rows.logits)
        if self._n_rows == self._chunks.n_rows:
            self._file.write(_SUM.pack(self._sum.intdigest()))
            self._sum.reset()
            self._n_rows = 0


class BaseFile:
    """A file that BaseWriter wrote: `with BaseFile(path) as file`.

    chunks: of the text that was read. n_vocab: logits of a row.

    Raises StateError for what is no such file, or is damaged, and OSError when it can't be read. Anybody may
    have written it: its size is known to be what its header says before memory is taken for anything.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._name = os.fsdecode(native_path(path))
        self._file: BinaryIO = open(self._name, "rb")  # noqa: SIM115 - until __exit__
        self._sum = xxhash.xxh3_64()
        self._n_rows = 0  # of the chunk that is being read
        try:
            self.chunks, self.n_vocab = self._read_front()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> BaseFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, n: int) -> Logits:
        """The next n rows, all of one chunk: float32 (n, n_vocab).

        Raises StateError when they are not finite, or, with the last row of a chunk, when the chunk's logits
        are not what was written.
        """
        data = self._read(4 * n * self.n_vocab)
        self._sum.update(data)
        self._n_rows += n
        if self._n_rows == self.chunks.n_rows:
            if self._read(_SUM.size) != _SUM.pack(self._sum.intdigest()):
                raise self._damaged("the checksum of a chunk's logits differs")
            self._sum.reset()
            self._n_rows = 0
        logits = np.frombuffer(data, "<f4").reshape(n, self.n_vocab)
        if not np.isfinite(logits).all():
            raise self._damaged("it has logits that are not finite")
        return logits.astype(np.float32, copy=False)

    def _read_front(self) -> tuple[Chunks, int]:
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise StateError(f"{self._name!r} is a device, a pipe or a socket: base logits are in a file")
        head = self._file.read(_FRONT)
        if len(head) != _FRONT or not head.startswith(_MAGIC):
            raise StateError(
                f"{self._name!r} has no base logits: write them with `perplexity --kl-divergence-base FILE`"
            )
        _, n_ctx, n_vocab, n_chunk, bos, checksum = _SIZES.unpack_from(head)
        if head[_SIZES.size :] != _SUM.pack(xxhash.xxh3_64_intdigest(head[: _SIZES.size])):
            raise self._damaged("the checksum of its header differs")
        if n_ctx < LEAST_N_CTX or n_vocab < 1 or n_chunk < 1 or n_ctx * n_chunk > _MOST_TOKENS:
            raise self._damaged(f"it tells of {n_chunk} chunks of {n_ctx} tokens, and {n_vocab} logits")
        n_rows = n_ctx - 1 - n_ctx // 2
        size = _FRONT + 4 * n_ctx * n_chunk + n_chunk * (4 * n_vocab * n_rows + _SUM.size)
        if status.st_size != size:
            raise self._damaged(f"it has {status.st_size} bytes, and its header tells of {size}")
        data = self._read(4 * n_ctx * n_chunk)
        tokens = np.frombuffer(data, "<i4").astype(np.int32).reshape(n_chunk, n_ctx)
        if xxhash.xxh3_64_intdigest(data) != checksum or not -1 <= bos < n_vocab:
            raise self._damaged("the checksum of its tokens differs")
        if tokens.min() < 0 or tokens.max() >= n_vocab:
            raise self._damaged("it has tokens that are not in its vocabulary")
        return Chunks(tokens, None if bos < 0 else bos), n_vocab

    def _read(self, n_bytes: int) -> bytes:
        data = self._file.read(n_bytes)
        if len(data) != n_bytes:
            raise self._damaged("it is cut off")
        return data

    def _damaged(self, what: str) -> StateError:
        return StateError(f"{self._name!r} is damaged: {what}. Write the base logits again")


def _header(chunks: Chunks, n_vocab: int) -> bytes:
    n_chunk, n_ctx = chunks.tokens.shape
    bos = -1 if chunks.bos is None else chunks.bos
    checksum = xxhash.xxh3_64_intdigest(_token_bytes(chunks))
    head = _SIZES.pack(_MAGIC, n_ctx, n_vocab, n_chunk, bos, checksum)
    return head + _SUM.pack(xxhash.xxh3_64_intdigest(head))


def _token_bytes(chunks: Chunks) -> bytes:
    return chunks.tokens.astype("<i4").tobytes()
