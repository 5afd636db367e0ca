"""A soak whose engine makes second forms of prefixes, in fewer cells, and gives them to who asks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pykvgraph as kvg
from pykvgraph.engine import compressed
from support.soak import Soak

_N_TOKENS = 120  # of each shared prefix: shorter than what is compressed by default
_N_QUIET = 12  # requests that don't come at times: prefixes are read again while nobody waits


class PrefixSoak(Soak):
    """Requests that begin alike, of which half take a compressed prefix; at times none comes for long."""

    def __init__(self, model: kvg.Model, seed: int, overcommit: bool) -> None:
        self._least = mock.patch.multiple(compressed, LEAST=_N_TOKENS // 2, _LEAST_PART=16, _N_AT_ONCE=16)
        self._least.start()
        tiers = kvg.Tiers(ram="1M", disk=0) if seed % 2 else None  # where compressed ones go, too
        super().__init__(model, seed, overcommit, prefix_compress=0.5, tiers=tiers)
        self._n_quiet = 0

    def submit(self) -> None:
        rng = self.rng
        self._n_quiet -= 1
        if self._n_quiet > 0:
            return
        if rng.random() < 0.15:
            self._n_quiet = _N_QUIET
        prompt = rng.choice(self.shared[:2]) + self._ids(rng.randrange(1, 40))
        params = kvg.SamplingParams(
            max_tokens=rng.randrange(1, 30), temperature=0, n=rng.choice([1, 1, 2]), priority=rng.randrange(3)
        )
        options: dict[str, Any] = {"compressed": rng.random() < 0.5}
        if params.n == 1 and self.engine.can_shift and rng.random() < 0.3:
            options["window"] = kvg.Window(len(prompt) + rng.randrange(2, 8), forget="keydiff")
        self.ask(self.engine.submit(prompt, params, **options), prompt, params, options.get("window"))

    def others(self) -> set[int]:
        prefixes = self._prefixes
        found = {each.seq for each in prefixes._kept.values()}
        return found if prefixes._job is None else {*found, prefixes._job.seq}

    def close(self) -> None:
        while self._prefixes.give_up():
            pass
        super().close()
        self._least.stop()

    @property
    def _prefixes(self) -> compressed.CompressedPrefixes:
        found = self.engine._loop.stepper._compressed
        assert found is not None
        return found
