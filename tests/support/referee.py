"""libllama on the same file, as the judge of our logits."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from pykvgraph.bench.libllama import LibllamaContext, opened
from pykvgraph.params.params import ContextParams
from support.engines import Logits, Token

# a test says what failed by itself
logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL + 1)


class Referee:
    """One libllama model and context on one thread. Speaks `support.engines.Engine`."""

    def __init__(
        self,
        path: Path,
        *,
        flash: bool,
        n_ctx: int = 512,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        kv_type: str = "f16",
        swa_full: bool = False,
        device: str = "CPU",
    ) -> None:
        params = ContextParams(
            n_ctx=n_ctx,
            n_batch=n_ctx,
            n_ubatch=n_ubatch,
            n_seq_max=n_seq_max,
            n_threads=1,
            type_k=kv_type,
            type_v=kv_type,
            flash_attn=flash,
            swa_full=swa_full,
        )
        self._opening = opened(path, params, device)

    @classmethod
    def of(cls, context: LibllamaContext) -> Referee:
        """Of a context that somebody else closes."""
        referee = cls.__new__(cls)
        referee._context = context
        return referee

    def __enter__(self) -> Referee:
        _, self._context = self._opening.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opening.__exit__(kind, error, trace)

    def decode(self, tokens: Iterable[Token]) -> Logits:
        self._context.decode(tokens)
        return self._context.logits()

    def seq_rm(self, seq: int, p0: int, p1: int) -> None:
        self._context.seq_rm(seq, p0, p1)

    def seq_cp(self, src: int, dst: int, p0: int, p1: int) -> None:
        self._context.seq_cp(src, dst, p0, p1)

    def seq_add(self, seq: int, p0: int, p1: int, delta: int) -> None:
        self._context.seq_add(seq, p0, p1, delta)
