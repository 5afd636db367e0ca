"""llama-perplexity's protocol by hand: chunk by chunk, in 64 bits, of any engine's logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from support.engines import Logits
from support.real import divergences, log_probabilities, same_top

Read = Callable[[Sequence[int]], Logits]  # tokens of an empty cache to the logits behind each


def chunk_rows(
    read: Read, ids: Sequence[int], n_ctx: int, bos: int | None, n_chunks: int
) -> Iterator[tuple[Logits, list[int]]]:
    """Of each chunk the rows that count, and the tokens that come next."""
    for begin in range(0, n_chunks * n_ctx, n_ctx):
        chunk = list(ids[begin : begin + n_ctx])
        first = n_ctx // 2
        rows = read([chunk[0] if bos is None else bos, *chunk[1:]])
        yield rows[first : n_ctx - 1], chunk[first + 1 :]


def losses_of(rows: Logits, nexts: Sequence[int]) -> npt.NDArray[np.float64]:
    found: npt.NDArray[np.float64] = -log_probabilities(rows)[np.arange(len(nexts)), nexts]
    return found


def perplexity(chunks: Iterator[tuple[Logits, list[int]]]) -> tuple[float, float]:
    """It, and its standard error as llama-perplexity tells it."""
    losses = np.concatenate([losses_of(rows, nexts) for rows, nexts in chunks])
    variance = (losses**2).mean() - losses.mean() ** 2
    value = np.exp(losses.mean())
    return float(value), float(value * np.sqrt(variance / (len(losses) - 1)))


def kl_table(
    base: Sequence[Logits], found: Sequence[Logits], nexts: Sequence[Sequence[int]]
) -> dict[str, float]:
    """What llama-perplexity tells of two runs, of their rows chunk by chunk."""
    kl = np.concatenate([divergences(a, b) for a, b in zip(base, found, strict=True)])
    before, after = (
        np.concatenate([losses_of(rows, ids) for rows, ids in zip(all_rows, nexts, strict=True)])
        for all_rows in (base, found)
    )
    delta = np.exp(-after) - np.exp(-before)
    ordered = np.sort(kl)
    return {
        "perplexity": float(np.exp(after.mean())),
        "base_perplexity": float(np.exp(before.mean())),
        "log_ratio": float((after - before).mean()),
        "correlation": float(np.corrcoef(after, before)[0, 1]),
        "kl_mean": float(kl.mean()),
        "kl_error": float(np.sqrt(kl.var() / (len(kl) - 1))),
        "kl_median": float((ordered[(len(kl) - 1) // 2] + ordered[len(kl) // 2]) / 2),
        "kl_99_9": float(np.percentile(kl, 99.9)),
        "kl_max": float(ordered[-1]),
        "kl_min": float(ordered[0]),
        "delta_p_mean": float(delta.mean()),
        "delta_p_rms": float((delta**2).mean() ** 0.5),
        "delta_p_max": float(delta.max()),
        "same_top": same_top(np.concatenate(base), np.concatenate(found)),
    }
