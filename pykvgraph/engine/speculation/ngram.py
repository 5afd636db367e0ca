"""Drafts without a second model: a text says again what it, or its prompt, has said before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pykvgraph.context.common_length import common_length
from pykvgraph.engine.request_sequence import RequestSequence
from pykvgraph.engine.speculation.gate import Gate


class NgramDrafter:
    """Proposes what followed the text's last tokens where they came before."""

    def drafts(
        self,
        asked: Sequence[tuple[RequestSequence, int]],
        gate: Gate,
        make_room: Callable[[int], bool],
    ) -> list[list[int]]:
        """For each text at most so many tokens that may follow it; that takes no cells."""
        guesses = [sequence.lookup.guess(sequence.ids, max(most, 1)) for sequence, most in asked]
        wanted = []
        for (sequence, most), guess in zip(asked, guesses, strict=True):
            if not guess.tokens:
                sequence.record.found(something=False)
            wanted.append((sequence.record.rate(guess.n_same), min(most, len(guess.tokens))))
        return [guess.tokens[:n].tolist() for guess, n in zip(guesses, gate.lengths(wanted), strict=True)]

    def close(self) -> None:
        """Has nothing to free."""

    def learn(self, sequence: RequestSequence, n_before: int) -> None:
        """The text has said something; what was guessed shows whether it would have held, drafted or not."""
        guess = sequence.lookup.last_guess(n_before)
        said = sequence.ids[n_before : n_before + len(guess.tokens)]
        if said:
            n_held = common_length(said, guess.tokens)
            sequence.record.found(something=n_held > 0)
            sequence.record.learn(guess.n_same, len(said), n_held)
