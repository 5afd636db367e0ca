"""What `make real` has fetched, and how texts are read and judged there."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import pykvgraph as kvg
from pykvgraph._native import libllama
from pykvgraph.bench.libllama import opened
from pykvgraph.params.params import ContextParams
from support.engines import Logits, batch_of, run_of

FOLDER = Path(__file__).parents[2] / "build" / "real"
SMOLLM2 = FOLDER / "smollm2.gguf"
GEMMA3 = FOLDER / "gemma3.gguf"
NEWS = FOLDER / "news.txt"
MINILM = FOLDER / "minilm.gguf"
MINILM_WEIGHTS = FOLDER / "minilm.safetensors"
MINILM_WORDS = FOLDER / "minilm-vocab.txt"
N_BATCH = 128
Floats = npt.NDArray[np.float64]


@functools.cache
def articles() -> tuple[str, ...]:
    """300 news articles of about 1,200 characters each."""
    return tuple(NEWS.read_text(encoding="utf-8").splitlines())


def news_of(model: kvg.Model, n: int, first: int = 0) -> list[int]:
    """n tokens of the news from article `first` on, with BOS if the model wants it."""
    text = "\n".join(articles()[first : first + n // 100 + 1])  # none has fewer tokens than 100
    ids = model.tokenizer.encode(text)[:n]
    assert len(ids) == n
    return ids


def in_f32(path: Path) -> Path:
    """The same model with all weights in F32, as libllama writes it; kept beside it."""
    there = path.with_suffix(".f32.gguf")
    if there.exists() and there.stat().st_mtime >= path.stat().st_mtime:
        return there
    llama = libllama.package("llama_cpp")
    params = llama.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = llama.LLAMA_FTYPE_ALL_F32, True, 1
    written = path.with_suffix(f".f32.{os.getpid()}.part")  # another process may be at it, too
    try:
        with libllama.quiet():
            status = llama.llama_model_quantize(
                str(path).encode(), str(written).encode(), ctypes.byref(params)
            )
        assert status == 0
        written.replace(there)
    finally:
        written.unlink(missing_ok=True)
    return there


def template_of(model: kvg.Model) -> str:
    """Its chat template."""
    return str(model.metadata["tokenizer.chat_template"])


def names_of(model: kvg.Model) -> dict[str, str]:
    """Of the tokens that begin and end a text, as a template wants them."""
    tokens, tokenizer = model.metadata["tokenizer.ggml.tokens"], model.tokenizer
    assert tokenizer.bos is not None and tokenizer.eos is not None
    return {"bos_token": tokens[tokenizer.bos], "eos_token": tokens[tokenizer.eos]}


def prompt_of(model: kvg.Model, messages: Sequence[Any], *, add: bool = True) -> str:
    """What llama-cpp-python makes of messages by the model's template. add: the head of an answer, too."""
    formats: Any = importlib.import_module("llama_cpp.llama_chat_format")
    formatter = formats.Jinja2ChatFormatter(template_of(model), add_generation_prompt=add, **names_of(model))
    return str(formatter(messages=messages).prompt)


def log_probabilities(rows: Logits) -> Floats:
    """Of all tokens, by row."""
    exact = rows.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    found: Floats = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    return found


def divergences(true: Logits, found: Logits) -> Floats:
    """KL divergence of each row of `found` from that of `true`, in nats."""
    expected = log_probabilities(true)
    kl: Floats = (np.exp(expected) * (expected - log_probabilities(found))).sum(axis=1)
    return kl


def same_top(true: Logits, found: Logits) -> float:
    """In which share of the rows the likeliest token is the same."""
    return float((true.argmax(axis=1) == found.argmax(axis=1)).mean())


def read(ctx: kvg.Context, ids: Sequence[int], pos0: int = 0) -> Logits:
    """Decodes ids from position pos0 on; the logits behind each."""
    rows = []
    for begin in range(0, len(ids), N_BATCH):
        ctx.decode(batch_of(run_of(ids[begin : begin + N_BATCH], pos0 + begin)))
        rows.append(ctx.logits())
    return np.concatenate(rows)


def losses(
    ctx: kvg.Context, ids: Sequence[int], wanted: Collection[int], shift: kvg.ContextShift | None = None
) -> dict[int, float]:
    """By i, the negative log probability of ids[i], of those that are wanted; the text shifts when it must.

    The model sees what is left in the cache.
    """
    kv, batch, found = ctx.kv, kvg.Batch(), {}
    for begin in range(0, len(ids), N_BATCH):
        part = ids[begin : begin + N_BATCH]
        while shift is not None and kv.n_free < len(part):
            shift.apply(kv)
        pos0 = kv.seq_pos_max(0) + 1
        batch.clear()
        nexts = [i for i in range(begin + 1, min(begin + len(part) + 1, len(ids))) if i in wanted]
        for i, id in enumerate(part):
            batch.add(id, pos0 + i, logits=begin + i + 1 in nexts)
        ctx.decode(batch, scores=bool(nexts))
        if nexts:
            for row, log_sum, i in zip(ctx.logits_view(), ctx.scores().log_sum, nexts, strict=True):
                found[i] = float(log_sum - row[ids[i]])
    return found


class Libllama:
    """libllama on one thread, in an F32 cache without flash attention: what a text says by itself."""

    def __init__(self, path: Path, n_ctx: int = 2048, *, kv_type: str = "f32", flash: bool = False) -> None:
        params = ContextParams(
            n_ctx=n_ctx,
            n_batch=N_BATCH,
            n_ubatch=N_BATCH,
            n_threads=1,
            n_threads_batch=1,
            type_k=kv_type,
            type_v=kv_type,
            flash_attn=flash,
            swa_full=True,
        )
        self._opening = opened(path, params)
        self.model, self._context = self._opening.__enter__()

    def __enter__(self) -> Libllama:
        return self

    def __exit__(self, *_: object) -> None:
        self._opening.__exit__(None, None, None)

    def read(self, ids: Sequence[int]) -> Logits:
        """Decodes ids in an empty cache; the logits behind each."""
        self._context.clear()
        rows = []
        for begin in range(0, len(ids), N_BATCH):
            self._context.decode(run_of(ids[begin : begin + N_BATCH], begin))
            rows.append(self._context.logits())
        return np.concatenate(rows)

    def behind(self, prompt: Sequence[int], said: Sequence[int]) -> Floats:
        """How far below the likeliest token each of `said` is behind those before it, in logits."""
        rows = self.read([*prompt, *said[:-1]])[len(prompt) - 1 :]
        gaps: Floats = (rows.max(axis=1) - rows[np.arange(len(said)), list(said)]).astype(np.float64)
        return gaps
