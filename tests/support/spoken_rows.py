"""The rows of logits that an engine's requests choose their tokens from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import pykvgraph as kvg
from pykvgraph.context.context import LastOutput
from pykvgraph.engine.request_sequence import RequestSequence

SpokenRows = dict[kvg.Request, list[npt.NDArray[np.float32]]]


def listen(patch: pytest.MonkeyPatch) -> SpokenRows:
    """From now on each request's rows come to the result, one for each token."""
    seen: SpokenRows = {}
    say = RequestSequence.say

    def listened(sequence: RequestSequence, outputs: Sequence[LastOutput], now: float) -> Any:
        assert isinstance(sequence.request, kvg.Request)
        seen.setdefault(sequence.request, []).append(outputs[0].logits.copy())
        return say(sequence, outputs, now)

    patch.setattr(RequestSequence, "say", listened)
    return seen
