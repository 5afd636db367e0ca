"""The search alone, over made-up probabilities: beside all texts that there are, and step by step."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.naive_beams import search

from pykvgraph.context.context import LastOutput
from pykvgraph.errors import KVGraphError
from pykvgraph.params.params import SamplingParams
from pykvgraph.sequence.beam_search import BeamSearch
from pykvgraph.sequence.output_text import OutputText

END = 0
PIECES = [b"", b"a", b"b", b"c", b"\xe2", b"\x82\xac"]  # the last two are one character


def tokenizer(ends: tuple[int, ...] = (END,)) -> Any:
    return SimpleNamespace(
        n_vocab=len(PIECES),
        space_prefix=False,
        bos=None,
        is_eog=lambda token: token in ends,
        token_to_piece=lambda token, special: PIECES[token],
    )


class Table:
    """Logits that depend on the last two tokens."""

    def __init__(self, seed: int, n_vocab: int = len(PIECES)) -> None:
        self._rows = np.random.default_rng(seed).normal(0, 2, (n_vocab + 1, n_vocab + 1, n_vocab))

    def row(self, tokens: tuple[int, ...]) -> Any:
        before = (-1, -1, *tokens)
        return self._rows[before[-2], before[-1]].astype(np.float32)

    def rows(self, texts: list[list[int]]) -> Any:
        return np.stack([self.row(tuple(ids)) for ids in texts])

    def logprob(self, tokens: tuple[int, ...]) -> float:
        rows = [self.row(tokens[:n]).astype(np.float64) for n in range(len(tokens))]
        return float(sum(row[t] - np.logaddexp.reduce(row) for row, t in zip(rows, tokens, strict=True)))

    def run(self, params: SamplingParams, tokenizer: Any) -> BeamSearch:
        found = BeamSearch(params, OutputText(params, tokenizer, 0))
        while not found.is_over:
            rows = [self.row(tuple(piece.token for piece in beam.pieces)) for beam in found.live]
            found.advance([output(row) for row in rows])
        return found


def output(row: Any) -> LastOutput:
    log_sum = float(np.logaddexp.reduce(row.astype(np.float64)))
    return LastOutput(int(row.argmax()), float(row.max()) - log_sum, log_sum, row)


def told(found: BeamSearch, n: int) -> list[tuple[tuple[int, ...], float]]:
    return [(tuple(p.token for p in beam.pieces), beam.logprob) for beam in found.best(n)]


@pytest.mark.parametrize("seed", range(5))
def test_wide_enough_it_finds_the_best_of_all_texts(seed: int) -> None:
    """All 125 that go on without an end, and those that end before."""
    table, n = Table(seed), 4
    others = [token for token in range(len(PIECES)) if token != END]
    texts = [(*text, END) for length in range(n) for text in itertools.product(others, repeat=length)]
    texts += list(itertools.product(others, repeat=n))
    best = sorted(texts, key=table.logprob, reverse=True)[:20]
    params = SamplingParams(beam_width=1000, n=20, max_tokens=n, length_penalty=0.0)
    found = told(table.run(params, tokenizer()), 20)
    assert [tokens for tokens, _ in found] == best
    assert [logprob for _, logprob in found] == pytest.approx([table.logprob(each) for each in best])


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.6, 1.0, 2.0])
@pytest.mark.parametrize(("width", "ends"), [(2, (0,)), (3, (0, 2)), (5, (0, 1, 3))])
def test_it_is_the_search_by_definition(width: int, ends: tuple[int, ...], length_penalty: float) -> None:
    n_early = 0
    for seed in range(20):
        table = Table(seed)
        params = SamplingParams(beam_width=width, n=width, max_tokens=9, length_penalty=length_penalty)
        found = table.run(params, tokenizer(ends))
        expected = search(
            table.rows,
            [],
            ends,
            width=width,
            max_tokens=9,
            length_penalty=length_penalty,
        )
        ours = told(found, width)
        assert [tokens for tokens, _ in ours] == [text.tokens for text in expected.best]
        assert [logprob for _, logprob in ours] == pytest.approx([text.logprob for text in expected.best])
        n_early += len(expected.steps) < 9
    assert n_early


def test_a_stop_string_that_spans_tokens_ends_a_beam() -> None:
    params = SamplingParams(beam_width=30, n=30, max_tokens=3, stop=("ab", "\u20ac"), length_penalty=0.0)
    for beam in Table(1).run(params, tokenizer()).best(30):
        tokens = [piece.token for piece in beam.pieces]
        whole = b"".join(PIECES[token] for token in tokens).decode("utf-8", "replace")
        text = "".join(piece.text for piece in beam.pieces)
        word = next((stop for stop in ("ab", "\u20ac") if stop in whole), "")
        assert beam.text.stopping_word == word
        assert text == (whole.partition(word)[0] if word else whole)
        ends = bool(word) or tokens[-1] == END
        assert beam.pieces[-1].finish_reason == ("stop" if ends else "length")


def test_beams_that_come_of_one_say_their_own_text() -> None:
    """Half a character is held back in each of them by itself."""
    row = np.full(len(PIECES), -50.0, np.float32)
    row[4] = 0.0
    search = BeamSearch(
        SamplingParams(beam_width=2, max_tokens=9), OutputText(SamplingParams(), tokenizer(), 0)
    )
    search.advance([output(row)])
    row[[1, 5]] = 10.0
    search.advance([output(row), output(np.roll(row, 1))])
    assert {"".join(piece.text for piece in beam.pieces) for beam in search.live} == {"\u20ac", "\ufffda"}


def test_broken_logits_are_an_error() -> None:
    params = SamplingParams(beam_width=2)
    search = BeamSearch(params, OutputText(params, tokenizer(), 0))
    with pytest.raises(KVGraphError, match="broken"):
        search.advance([LastOutput(0, math.nan, math.nan, np.full(6, np.nan, np.float32))])
