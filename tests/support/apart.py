"""The judge of everything shared: an engine for each sequence, in which it is alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

import pykvgraph as kvg
from support import where
from support.engines import Engine, Logits, OurEngine, Token, open_context
from support.judge import FLOOR, nmse
from support.referee import Referee


class Apart:
    """As many engines as sequences. Speaks `support.engines.Engine`, and seq_div where the engines do."""

    def __init__(self, engines: Mapping[int, Engine]) -> None:
        self._engines = engines
        self._done: dict[int, list[Callable[[Engine], object]]] = {seq: [] for seq in engines}

    def decode(self, tokens: Iterable[Token]) -> Logits:
        """Each engine decodes its sequence's tokens; one row per token that asks, in the batch's order."""
        rows: dict[int, Logits] = {}
        tokens = list(tokens)
        for seq in self._engines:
            own = [(i, token) for i, token in enumerate(tokens) if seq in token.seq_ids]
            if own:
                logits = self._decode(seq, [token._replace(seq_ids=(0,)) for _, token in own])
                rows |= dict(zip([i for i, token in own if token.logits], logits, strict=True))
        return np.stack([rows[i] for i in sorted(rows)])

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        self._do(seq, lambda engine: engine.seq_rm(0, p0, p1))

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        """Does for `dst`, which must be empty, all that was done for `src`; what is out of range goes."""
        for step in list(self._done[src]):
            self._do(dst, step)
        self.seq_rm(dst, 0, p0)
        if p1 >= 0:
            self.seq_rm(dst, p1, -1)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        self._do(seq, lambda engine: engine.seq_add(0, p0, p1, delta))

    def seq_div(self, seq: int, p0: int, p1: int, d: int) -> None:
        def divide(engine: Engine) -> None:
            assert isinstance(engine, OurEngine), "libllama rotates K in the wrong direction"
            engine.seq_div(0, p0, p1, d)

        self._do(seq, divide)

    def _decode(self, seq: int, tokens: list[Token]) -> Logits:
        logits: Logits = self._do(seq, lambda engine: engine.decode(tokens))
        return logits

    def _do(self, seq: int, step: Callable[[Engine], Any]) -> Any:
        self._done[seq].append(step)
        return step(self._engines[seq])


SharingScenario = Callable[[Apart | OurEngine], Logits]


def judge_sharing(
    path: Path,
    scenario: SharingScenario,
    seqs: Iterable[int],
    *,
    libllama: bool = True,
    n_ctx: int = 512,
    kv_type: str = "f16",
    n_used: int | None = None,
    defrag_threshold: float = -1,
    repeated: bool = False,
) -> None:
    """Runs the scenario on one cache of ours for all sequences, and on engines with one sequence each.

    The rule of `support.judge` holds; `n_used` is how many cells must be in use at the end. Without
    `libllama` the engines are ours too. When shifts are `repeated`, dither makes roundings to F16 fall
    otherwise: ours may be half as far again from an F32 cache as the others are, on a device as far as
    `where.rule` says.
    """
    seqs = list(seqs)
    options = {"n_ctx": n_ctx, "type_k": kv_type, "type_v": kv_type}
    with kvg.Model(path, device=where.device) as model:

        def run_apart(flash: bool, kv_type: str) -> Logits:
            with ExitStack() as stack:
                engines: dict[int, Engine] = {}
                for seq in seqs:
                    if libllama:
                        referee = Referee(path, flash=flash, n_ctx=n_ctx, kv_type=kv_type)
                        engines[seq] = stack.enter_context(referee)
                    else:
                        alike = {**options, "type_k": kv_type, "type_v": kv_type}
                        ctx = open_context(model, flash_attn="on" if flash else "off", **alike)
                        engines[seq] = OurEngine(stack.enter_context(ctx))
                return scenario(Apart(engines))

        alone = {flash: run_apart(flash, kv_type) for flash in (False, True)}
        allowed = dict.fromkeys(alone, where.rule(max(FLOOR, 2 * nmse(alone[True], alone[False]))))
        if repeated and kv_type == "f16":
            exact = run_apart(False, "f32")
            allowed = {flash: where.rule(1.5 * nmse(rows, exact)) for flash, rows in alone.items()}
            alone = dict.fromkeys(alone, exact)
        for flash_attn in ("off", "on", "auto"):
            with open_context(
                model,
                n_seq_max=max(seqs) + 1,
                flash_attn=flash_attn,
                defrag_threshold=defrag_threshold,
                **options,
            ) as ctx:
                flash = flash_attn == "on"
                error, limit = nmse(scenario(OurEngine(ctx)), alone[flash]), allowed[flash]
                if not error <= limit:  # also when it is NaN
                    raise AssertionError(f"flash_attn={flash_attn}: NMSE {error:.2e}, allowed {limit:.2e}")
                if n_used is not None and ctx.kv.n_used != n_used:
                    raise AssertionError(f"{ctx.kv.n_used} cells are in use, expected {n_used}")
