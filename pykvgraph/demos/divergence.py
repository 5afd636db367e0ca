"""How far the logits of one run are from those of another on the same tokens: KL divergence and its like.

What is told of it is what llama.cpp's perplexity tool tells with --kl-divergence.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pykvgraph.demos.perplexity import Floats, Logits, Tokens, estimate, mean_of

_MOST_VALUES = 4 << 20  # of logits in 64 bits at a time: 32 MiB
_SHARES = {
    **{"99_9": 0.999, "99": 0.99, "95": 0.95, "90": 0.9, "median": 0.5},
    **{"10": 0.1, "5": 0.05, "1": 0.01, "0_1": 0.001},
}


class Divergence(NamedTuple):
    """Of n rows of logits beside the base's: all in nats. same_top: whether the likeliest token is the same.

    losses, base_losses: negative log probabilities of the token that comes next in the text.
    """

    kl: Floats  # (n,)
    losses: Floats
    base_losses: Floats
    same_top: npt.NDArray[np.bool_]

    @classmethod
    def joined(cls, parts: Iterable[Divergence]) -> Divergence:
        """All rows of several."""
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    @property
    def delta_p(self) -> Floats:
        """By how much the probability of the token that comes next is above the base's."""
        found: Floats = np.exp(-self.losses) - np.exp(-self.base_losses)
        return found


def diverged(base: Logits, logits: Logits, nexts: Tokens) -> Divergence:
    """Compares rows (n, n_vocab) of the same n tokens. nexts: the n tokens that come next in the text."""
    n_rows = max(1, _MOST_VALUES // base.shape[1])
    parts = [
        _diverged(base[i : i + n_rows], logits[i : i + n_rows], nexts[i : i + n_rows])
        for i in range(0, len(base), n_rows)
    ]
    return Divergence.joined(parts)


def _diverged(base: Logits, logits: Logits, nexts: Tokens) -> Divergence:
    expected, found = _log_softmax(base), _log_softmax(logits)
    kl = (np.exp(expected) * (expected - found)).sum(axis=1)
    rows = np.arange(len(nexts))
    return Divergence(
        np.maximum(kl, 0.0),  # rounding may make it less
        -found[rows, nexts],
        -expected[rows, nexts],
        base.argmax(axis=1) == logits.argmax(axis=1),
    )


def _log_softmax(rows: Logits) -> Floats:
    exact = rows.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    return exact


def statistics(of: Divergence) -> dict[str, float]:
    """What llama-perplexity tells with --kl-divergence. Names that end in _error are standard errors.

    Divergences are in nats; same_top and delta_p are shares, where llama-perplexity has per cent.
    """
    ratio, ratio_error = mean_of(of.losses - of.base_losses)
    told: dict[str, float] = {}
    told["perplexity"], told["perplexity_error"], _ = estimate(of.losses)
    told["base_perplexity"], told["base_perplexity_error"], _ = estimate(of.base_losses)
    told["correlation"] = _correlation(of.losses, of.base_losses)
    told["log_ratio"], told["log_ratio_error"] = ratio, ratio_error
    told["ratio"], told["ratio_error"] = float(np.exp(ratio)), float(np.exp(ratio)) * ratio_error
    told["kl_mean"], told["kl_error"] = mean_of(of.kl)
    told |= _spread("kl", of.kl)
    told["delta_p_mean"], told["delta_p_error"] = mean_of(of.delta_p)
    told |= _spread("delta_p", of.delta_p)
    told["delta_p_rms"] = float(np.sqrt(np.square(of.delta_p).mean()))
    told["same_top"], told["same_top_error"] = mean_of(of.same_top.astype(np.float64))
    return told


def _correlation(a: Floats, b: Floats) -> float:
    spread = float(a.std() * b.std())
    return float(((a - a.mean()) * (b - b.mean())).mean()) / spread if spread else 1.0


def _spread(name: str, values: Floats) -> dict[str, float]:
    """The largest, quantiles from the top down (interpolated), and the smallest."""
    between = {f"{name}_{word}": float(np.quantile(values, share)) for word, share in _SHARES.items()}
    return {f"{name}_max": float(values.max()), **between, f"{name}_min": float(values.min())}
