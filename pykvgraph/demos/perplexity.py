"""Perplexity by llama-perplexity's protocol: chunks of a text, the second half of each predicted.

The protocol is that of llama.cpp's tools/perplexity: a text is cut into chunks of n_ctx tokens; where the
model wants BOS, it takes the place of each chunk's first token; of each chunk the tokens from n_ctx / 2 + 1
on are predicted, so that each has something before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pykvgraph.checks import integer
from pykvgraph.context.batch import Batch
from pykvgraph.context.context import Context
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.model.model import Model

Floats = npt.NDArray[np.float64]
Logits = npt.NDArray[np.float32]  # (n, n_vocab)
Tokens = npt.NDArray[np.int32]

N_CTX = 512  # as llama-perplexity's default
LEAST_N_CTX = 3  # of which one token is predicted
_MOST_LOGITS = 64 << 20  # of one decode: 256 MiB


class Chunks(NamedTuple):
    """tokens: (n_chunk, n_ctx). bos: what is read in the place of each chunk's first one; None: that one."""

    tokens: Tokens
    bos: int | None

    @property
    def first(self) -> int:
        """The position of the first token whose logits count."""
        return int(self.tokens.shape[1]) // 2

    def up_to(self, n_chunks: int) -> Chunks:
        """The first n_chunks; below 0: all. Raises InvalidArgumentError for 0."""
        if n_chunks == 0:
            raise InvalidArgumentError(
                "n_chunks is 0: read one chunk or more; a number below 0 is all of them"
            )
        return self if n_chunks < 0 else Chunks(self.tokens[:n_chunks], self.bos)

    @property
    def n_rows(self) -> int:
        """How many tokens of a chunk are predicted."""
        return int(self.tokens.shape[1]) - 1 - self.first


class ChunkRows(NamedTuple):
    """Logits of one chunk; a view, which is valid until the next ones are asked for.

    begin: how many rows of the chunk came before. log_sum: of each row, log(sum(exp(logits))).
    nexts: the token that comes next in the text, of each row.
    """

    chunk: int
    begin: int
    logits: Logits
    log_sum: npt.NDArray[np.float32]
    nexts: Tokens

    def losses(self) -> Floats:
        """Negative log probabilities of the tokens that come next, in nats."""
        found: Floats = self.log_sum.astype(np.float64) - self.logits[np.arange(len(self.nexts)), self.nexts]
        return found


class Estimate(NamedTuple):
    """A perplexity, its standard error, and of how many tokens."""

    value: float
    error: float
    n_tokens: int


def chunks_of(model: Model, text: str, n_ctx: int = N_CTX, n_chunks: int = -1) -> Chunks:
    """A text in chunks of n_ctx tokens; what is left at its end is not read. n_chunks below 0: all of them.

    Raises InvalidArgumentError for a text of less than two chunks, and what Model.tokenizer raises.
    """
    n_ctx = integer(n_ctx, "n_ctx", LEAST_N_CTX)
    ids = model.tokenizer.encode(text)
    if len(ids) < 2 * n_ctx:
        raise InvalidArgumentError(
            f"the text has {len(ids)} tokens: perplexity in chunks of {n_ctx} needs {2 * n_ctx} or more. "
            "Give a longer text, or a smaller n_ctx"
        )
    n = len(ids) // n_ctx
    whole = Chunks(np.array(ids[: n * n_ctx], np.int32).reshape(n, n_ctx), bos_of(model))
    return whole.up_to(n_chunks)


def bos_of(model: Model) -> int | None:
    """The token that the model wants before a text; None: it wants none."""
    bos = model.tokenizer.bos
    return bos if bos is not None and model.tokenizer.encode("")[:1] == [bos] else None


def n_together(n_ctx: int, n_batch: int) -> int:
    """How many chunks a batch has room for: as many sequences a context for them needs."""
    return max(1, n_batch // n_ctx)


def read_chunks(ctx: Context, chunks: Chunks) -> Iterator[ChunkRows]:
    """Empties the cache and reads chunk after chunk, as many at a time as the context has sequences.

    With one sequence the rows come in the order of the text. Raises what Context.decode raises.
    """
    for begin in range(0, len(chunks.tokens), ctx.n_seq_max):
        yield from _read_together(ctx, chunks, range(begin, min(begin + ctx.n_seq_max, len(chunks.tokens))))


def estimate(losses: Floats) -> Estimate:
    """The perplexity of tokens with these losses."""
    mean, error = mean_of(losses)
    return Estimate(float(np.exp(mean)), float(np.exp(mean)) * error, len(losses))


def mean_of(values: Floats) -> tuple[float, float]:
    """The mean, and its standard error."""
    return float(values.mean()), float(values.std() / np.sqrt(max(len(values) - 1, 1)))


def _read_together(ctx: Context, chunks: Chunks, which: range) -> Iterator[ChunkRows]:
    ctx.reset()
    tokens = chunks.tokens[which.start : which.stop]
    read = tokens.copy()
    if chunks.bos is not None:
        read[:, 0] = chunks.bos
    batch = Batch()
    for p0, p1 in _steps(ctx, chunks, len(which)):
        counts = p0 >= chunks.first
        batch.clear()
        for seq, ids in enumerate(read):
            batch.extend(ids[p0:p1], p0, (seq,), "all" if counts else False)
        ctx.decode(batch, scores=counts)
        if not counts:
            continue
        logits, log_sum, n = ctx.logits_view(), ctx.scores().log_sum, p1 - p0
        for i, ids in enumerate(tokens):
            rows = slice(i * n, (i + 1) * n)
            nexts = ids[p0 + 1 : p1 + 1]
            yield ChunkRows(which[i], p0 - chunks.first, logits[rows], log_sum[rows], nexts)


def _steps(ctx: Context, chunks: Chunks, n_seqs: int) -> Iterator[tuple[int, int]]:
    """The positions of each decode: those before the first that counts, then those that do.

    The last token of a chunk predicts nothing, and isn't read.
    """
    most = max(1, ctx.n_batch // n_seqs)
    most_rows = max(1, min(most, _MOST_LOGITS // ctx.model.n_vocab // n_seqs))
    end = chunks.first + chunks.n_rows
    for width, span in ((most, range(chunks.first)), (most_rows, range(chunks.first, end))):
        for p0 in range(span.start, span.stop, width):
            yield p0, min(p0 + width, span.stop)
