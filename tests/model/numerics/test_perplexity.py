"""Perplexity beside libllama's logits, and the table of divergences beside NumPy, on small models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.engines import Logits, open_context, random_ids
from support.kv_types import EVEN_BLOCKS
from support.models import N_VOCAB, ModelSpec
from support.naive_perplexity import Read, chunk_rows, kl_table, perplexity
from support.real import Libllama, read

import pykvgraph as kvg
from pykvgraph.demos.divergence import Divergence, diverged, statistics
from pykvgraph.demos.perplexity import Chunks, chunks_of, estimate, n_together, read_chunks
from pykvgraph.errors import InvalidArgumentError

F32 = {"type_k": "f32", "type_v": "f32"}
ModelFile = Callable[[ModelSpec], Path]
GOLDEN = Path(__file__).parents[2] / "data" / "stories260K.golden.txt"
TEXT = GOLDEN.read_text(encoding="utf-8")


def losses(ctx: kvg.Context, chunks: Chunks) -> np.ndarray:
    """Of all tokens that are predicted, by chunk."""
    found = np.full((len(chunks.tokens), chunks.n_rows), np.nan)
    for rows in read_chunks(ctx, chunks):
        found[rows.chunk, rows.begin : rows.begin + len(rows.nexts)] = rows.losses()
    return found


def reader(ctx: kvg.Context) -> Read:
    """Reads each text in an empty cache."""

    def alone(tokens: Sequence[int]) -> Logits:
        ctx.reset()
        return read(ctx, tokens)

    return alone


# tokens of a chunk and of a batch: a chunk in parts, in one, several of them, and the last ones fewer
@pytest.mark.parametrize(("n_ctx", "n_batch"), [(64, 16), (64, 64), (33, 99), (17, 512), (3, 7)])
def test_as_of_libllamas_logits(stories: Path, n_ctx: int, n_batch: int) -> None:
    """The same text to the same chunks, with BOS in the place of each one's first token."""
    with kvg.Model(stories, device="cpu") as model:
        chunks = chunks_of(model, TEXT, n_ctx, 7)
        n = min(n_together(n_ctx, n_batch), 7)
        with open_context(model, n_ctx=n * n_ctx, n_batch=min(n_batch, n * n_ctx), n_seq_max=n, **F32) as ctx:
            found = losses(ctx, chunks)
    with Libllama(stories, n_ctx) as libllama:
        ids = libllama.model.encode(TEXT)
        assert ids[: chunks.tokens.size] == chunks.tokens.ravel().tolist()
        expected, error = perplexity(chunk_rows(libllama.read, ids, n_ctx, ids[0], len(chunks.tokens)))
    ours = estimate(found.ravel())
    assert ours.value == pytest.approx(expected, rel=1e-5)
    assert ours.error == pytest.approx(error, rel=1e-4)
    assert ours.n_tokens == len(chunks.tokens) * (n_ctx - n_ctx // 2 - 1)


def test_the_table_of_divergences(model_file: ModelFile) -> None:
    """To 1e-6 what NumPy makes of the logits of two runs."""
    ids = random_ids(5 * 40, N_VOCAB, 3)
    chunks = Chunks(np.array(ids, np.int32).reshape(5, 40), None)
    rows: dict[str, list[Logits]] = {}
    nexts: list[list[int]] = []
    with kvg.Model(model_file(EVEN_BLOCKS), device="cpu") as model:
        for kv_type in ("f16", "q4_0"):
            with open_context(model, n_ctx=64, type_k=kv_type, type_v=kv_type) as ctx:
                each = list(chunk_rows(reader(ctx), ids, 40, None, 5))
            rows[kv_type], nexts = [a for a, _ in each], [b for _, b in each]
        expected = kl_table(rows["f16"], rows["q4_0"], nexts)
        parts: list[Divergence] = []
        with open_context(model, n_ctx=40, n_batch=40, type_k="q4_0", type_v="q4_0") as ctx:
            for found in read_chunks(ctx, chunks):
                base = rows["f16"][found.chunk][found.begin : found.begin + len(found.nexts)]
                parts.append(diverged(base, found.logits, found.nexts))
    told = statistics(Divergence.joined(parts))
    assert {name: told[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert expected["kl_mean"] > 1e-4 and expected["same_top"] < 1  # there is something to tell


def test_a_short_text(stories: Path) -> None:
    with kvg.Model(stories, device="cpu") as model:
        with pytest.raises(
            InvalidArgumentError, match=r"has \d+ tokens: .* chunks of 512 needs 1024 or more"
        ):
            chunks_of(model, "Once upon a time")
        with pytest.raises(InvalidArgumentError, match="n_ctx must be 3 or more"):
            chunks_of(model, TEXT, 2)
        with pytest.raises(InvalidArgumentError, match="n_chunks is 0"):
            chunks_of(model, TEXT, 16, 0)
        assert len(chunks_of(model, TEXT, 16, 10**6).tokens) == len(model.tokenizer.encode(TEXT)) // 16
