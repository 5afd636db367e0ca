"""States that several threads load at once: what native code reads must live until it has read it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from support.architectures import ArchSpec
from support.engines import open_context
from support.recurrent import DELTA_NET
from support.streams import fill_with_holes

import pykvgraph as kvg

N_THREADS, N_LOADS = 4, 60


def test_states_of_recurrent_layers(architecture: Callable[[ArchSpec], Path]) -> None:
    """Arrays that one thread has given up were other threads' before it had loaded them."""
    options = {"n_ctx": 128, "n_seq_max": 4, "defrag_threshold": -1}
    wrong: list[str] = []
    with kvg.Model(architecture(DELTA_NET)) as model, open_context(model, **options) as source:
        fill_with_holes(source, 40, 3)
        saved = source.kv.save(0)

        def load(seq: int) -> None:
            with open_context(model, **options) as target:
                for _ in range(N_LOADS):
                    try:
                        target.kv.load(saved, seq)
                        if target.kv.save(seq) != saved:
                            wrong.append("other bytes")
                    except kvg.KVGraphError as error:
                        wrong.append(str(error))
                    target.kv.seq_rm(seq, -1, -1)

        threads = [threading.Thread(target=load, args=(seq,)) for seq in range(N_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong
