"""A context: a cache, and the decoding that fills it."""

from __future__ import annotations

import ctypes
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pykvgraph._native.ffi import KvgBatch, KvgOutput, KvgScore
from pykvgraph._native.handles import Closable, Handle
from pykvgraph._native.library import lib, sized
from pykvgraph.batch import Batch
from pykvgraph.checks import flag, integer, shown
from pykvgraph.device import read_parts
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.kv_cache import KVCache
from pykvgraph.model import Model
from pykvgraph.params import ContextParams
from pykvgraph.state.transfer import read_info
from pykvgraph.types import DevicePart, Scores

_NO_LOGITS = np.empty(0, np.float32)


class Context(Closable):
    """Decodes batches of tokens on a model; `kv` is its cache.

    n_ctx: cells. n_batch: most tokens in one decode. n_ubatch: most tokens in one graph. n_seq_max: sequence
    ids are below it. type_k, type_v: "f32", "f16", "bf16", or quantized, "q8_0", "q5_1", "q5_0",
    "q4_1" or "q4_0", for heads whose size is a multiple of 32. flash_attn: "auto", the best there is (on the
    CPU a kernel of our own); "on", ggml's flash attention; "off", anything but that; or a bool. hadamard:
    whether quantized K and V are kept rotated by a Walsh-Hadamard matrix, which loses less where some of a
    head's dimensions are larger than others (arXiv:2404.00456; llama.cpp does it for heads of a multiple of
    64, and only for those). n_threads for one token, n_threads_batch for more: by default as many as this
    process may use CPUs, and one for a model under 10 million parameters, whose threads would only wait for
    each other. defrag_threshold: decode compacts the cache when the share of holes below the highest used
    cell passes it; negative: never. offload_kqv: each layer's cells lie on the device of its weights; False:
    in host memory, where the CPU attends over them. `model` and all of these are attributes too, for reading:
    as they were given, or chosen.

    Raises InvalidArgumentError, UnsupportedError, or DeviceError when the device has no room for the cache.
    Threads may share a context: their calls wait for one another.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int = ContextParams.n_ctx,
        n_batch: int = ContextParams.n_batch,
        n_ubatch: int = ContextParams.n_ubatch,
        n_seq_max: int = ContextParams.n_seq_max,
        type_k: str = ContextParams.type_k,
        type_v: str = ContextParams.type_v,
        flash_attn: Literal["auto", "on", "off"] | bool = ContextParams.flash_attn,
        hadamard: bool = ContextParams.hadamard,
        n_threads: int | None = ContextParams.n_threads,
        n_threads_batch: int | None = ContextParams.n_threads_batch,
        defrag_threshold: float = ContextParams.defrag_threshold,
        offload_kqv: bool = ContextParams.offload_kqv,
    ) -> None:
        if not isinstance(model, Model):
            raise InvalidArgumentError(f"model must be a pykvgraph.Model, got {shown(model)}")
        params = ContextParams(
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=n_ubatch,
            n_seq_max=n_seq_max,
            type_k=type_k,
            type_v=type_v,
            flash_attn=flash_attn,
            hadamard=hadamard,
            n_threads=n_threads,
            n_threads_batch=n_threads_batch,
            defrag_threshold=defrag_threshold,
            offload_kqv=offload_kqv,
        )
        native = params.native(model.n_params)
        self.model = model
        self.n_ctx = params.n_ctx
        self.n_batch = params.n_batch
        self.n_ubatch = params.n_ubatch
        self.n_seq_max = params.n_seq_max
        self.type_k = params.type_k
        self.type_v = params.type_v
        self.flash_attn = params.flash_attn
        self.hadamard = params.hadamard
        self.n_threads = native.n_threads
        self.n_threads_batch = native.n_threads_batch
        self.defrag_threshold = params.defrag_threshold
        self.offload_kqv = params.offload_kqv
        self._handle = Handle.open(
            model._handle.call,
            lib().kvg_context_new,
            ctypes.byref(native),
            free=lib().kvg_context_free,
            name="context",
        )
        self.kv = KVCache(self._handle)
        # decode writes into these; a view of them keeps them alive, whatever becomes of the context
        self._outputs = _Outputs(1, model)

    def decode(self, batch: Batch, *, scores: bool = False) -> None:
        """Runs a batch, all or nothing; pending cache updates run first.

        scores: also compute what scores() returns, which takes a look at every logit.
        Raises InvalidArgumentError for tokens, positions or sequences that can't be, CacheFullError when
        there are too few empty cells, DeviceError when the device fails. After a failure the cells are as
        before, but for shifts and moves that were pending, and there are no logits. What is pending can fail
        half way, as in kv.update(). Ctrl-C waits for the call to end, whose tokens are not in the cache then:
        they are there if and only if decode() returned.
        """
        self._handle.call(self._decode, batch, flag(scores, "scores"))

    def decode_last(self, batch: Batch) -> npt.NDArray[np.float32]:
        """decode(), and a copy of the last output's logits (n_vocab,), as one step.

        For threads that share a context: between decode() and logits() another one's decode may come. Raises
        InvalidArgumentError, with nothing decoded, when no token of the batch asked for logits.
        """
        return self._handle.call(self._decode_last, batch).logits

    def append(self, token: int, seq: int = 0) -> npt.NDArray[np.float32]:
        """Decodes one token at the end of a sequence, at seq_pos_max + 1; a copy of its logits (n_vocab,).

        decode_last() of a batch of one, in one call and a fraction of its time; raises what decode() raises.
        """
        return self._handle.call(self._append, integer(seq, "seq"), integer(token, "token")).logits

    def logits(self) -> npt.NDArray[np.float32]:
        """The last decode's logits, float32 (n_outputs, n_vocab), in batch order; a copy.

        Raises InvalidArgumentError before the first decode and after a failed one.
        """
        return self._handle.call(lambda _: self._rows(self._outputs.logits).copy())

    def logits_view(self) -> npt.NDArray[np.float32]:
        """logits() without the copy, read-only. The next decode may write over it; reading is always safe."""
        return self._handle.call(lambda _: self._rows(self._outputs.logits))

    def scores(self) -> Scores:
        """The likeliest token and the log-sum of each row of the last decode's logits; copies.

        Of decode(scores=True), decode_last() and append(). Raises InvalidArgumentError as logits() does, and
        after a decode that was not asked for scores.
        """
        return self._handle.call(lambda _: self._scores())

    def embeddings(self) -> npt.NDArray[np.float32]:
        """The last decode's hidden states after the final norm, float32 (n_outputs, n_embd); a copy.

        Raises InvalidArgumentError as logits() does.
        """
        return self._handle.call(lambda _: self._rows(self._outputs.embd).copy())

    @property
    def devices(self) -> tuple[DevicePart, ...]:
        """What this context and its model have on each device, the CPU last.

        A decode that asks for many logits may take more memory than was set aside.
        """
        return self._handle.call(read_parts, lib().kvg_context_n_parts, lib().kvg_context_get_part)

    @property
    def graph_seconds(self) -> float:
        """Spent in decode graphs so far; the rest of a decode's time is spent around them."""
        return float(self._handle.call(lib().kvg_context_graph_seconds))

    def reset(self) -> None:
        """Empties the cache; the outputs are gone."""
        self._handle.call(self._reset)

    def _decode(self, context: int, batch: Batch, scored: bool) -> None:
        self._decode_batch(context, batch, scored=scored)

    def _decode_last(self, context: int, batch: Batch, copy: bool = True) -> LastOutput:
        """copy: the row of logits, too."""
        n_outputs = self._decode_batch(context, batch, scored=True, must_output=True)
        return self._outputs.last(n_outputs, copy)

    def _decode_batch(self, context: int, batch: Batch, *, scored: bool, must_output: bool = False) -> int:
        """The number of outputs."""
        self._outputs.n = None
        if not isinstance(batch, Batch):
            raise InvalidArgumentError(f"batch must be a pykvgraph.Batch, got {shown(batch)}")
        arrays = batch.snapshot()
        n_tokens, n_outputs = len(arrays.token), int(arrays.logits.sum())
        if must_output and n_outputs == 0:
            raise InvalidArgumentError("no token of the batch asked for logits: add one with logits=True")
        self._make_room(context, n_tokens, n_outputs)
        tokens = sized(
            KvgBatch,
            n_tokens=n_tokens,
            token=_address(arrays.token, ctypes.c_int32),
            pos=_address(arrays.pos, ctypes.c_int32),
            seq_begin=_address(arrays.seq_begin, ctypes.c_int32),
            seq_id=_address(arrays.seq_id, ctypes.c_int32),
            logits=_address(arrays.logits, ctypes.c_uint8),
        )
        outputs = self._outputs
        written = outputs.scored if scored else outputs.plain
        outputs.start()
        self._handle.undo_unless_done(outputs.take_back)
        lib().kvg_decode(context, ctypes.byref(tokens), ctypes.byref(written))
        outputs.n, outputs.scored_last = n_outputs, scored
        return n_outputs

    def _append(self, context: int, seq: int, token: int, copy: bool = True) -> LastOutput:
        outputs = self._outputs
        outputs.n = None
        outputs.start()
        self._handle.undo_unless_done(outputs.take_back)
        lib().kvg_append(context, seq, token, outputs.scored_pointer)
        outputs.n, outputs.scored_last = 1, True
        return outputs.last(1, copy)

    def _reset(self, context: int) -> None:
        lib().kvg_kv_clear(context, 0)
        self._outputs.n = None

    def _make_room(self, context: int, n_tokens: int, n_rows: int) -> None:
        """New buffers when these are too small: nobody's view of the old ones may change its size.

        None for a batch that has too many tokens: it is refused whatever the buffers hold.
        """
        grows = n_rows > len(self._outputs.logits)
        if grows and n_tokens <= self.n_batch and n_tokens <= read_info(context).n_free:
            self._outputs = _Outputs(n_rows, self.model)

    def _rows(self, buffer: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        rows = buffer[: self._n_rows()]
        rows.flags.writeable = False
        return rows

    def _n_rows(self) -> int:
        n = self._outputs.n
        if n is None:
            raise InvalidArgumentError(
                "there are no outputs: no decode came before this, or the last one failed"
            )
        return n

    def _scores(self) -> Scores:
        n = self._n_rows()
        if not self._outputs.scored_last:
            raise InvalidArgumentError(
                "the last decode was not asked for scores: use decode(batch, scores=True)"
            )
        rows = np.ctypeslib.as_array(self._outputs.scores)[:n]
        return Scores(*(rows[name].copy() for name in Scores._fields))


class LastOutput(NamedTuple):
    """Of the last token that asked for logits."""

    best: int  # the likeliest token, the lowest id among equals
    best_logprob: float
    log_sum: float  # log of the sum of exp(logits); NaN when they are broken
    logits: npt.NDArray[np.float32]  # (n_vocab,), a copy; empty when none was wanted


class _Outputs:
    """Where decode writes, and the structs that tell it so: without scores of the rows, and with them."""

    def __init__(self, n_rows: int, model: Model) -> None:
        self.logits: npt.NDArray[np.float32] = np.empty((n_rows, model.n_vocab), np.float32)
        self.embd: npt.NDArray[np.float32] = np.empty((n_rows, model.n_embd), np.float32)
        self.n: int | None = None  # rows that the last decode wrote; None when there are none to be read
        self.scored_last = False  # whether the last decode wrote scores, too
        self.scores = (KvgScore * n_rows)()
        places = {
            "logits": _address(self.logits, ctypes.c_float),
            "embd": _address(self.embd, ctypes.c_float),
            "n_rows": n_rows,
        }
        self.plain = sized(KvgOutput, **places)
        self.scored = sized(KvgOutput, **places, score=self.scores)
        self.scored_pointer = ctypes.byref(self.scored)

    def start(self) -> None:
        """Before a decode: it has written nothing yet."""
        self.plain.n_written = self.scored.n_written = -1

    def take_back(self, context: int) -> None:
        """Of a decode that succeeded, and whose caller met an exception all the same."""
        self.n = None
        if self.plain.n_written >= 0 or self.scored.n_written >= 0:
            lib().kvg_undo_decode(context)
            self.start()

    def last(self, n_outputs: int, copy: bool) -> LastOutput:
        """Of a scored decode; copy: the row of logits, too."""
        score = self.scores[n_outputs - 1]
        logits = self.logits[n_outputs - 1].copy() if copy else _NO_LOGITS
        return LastOutput(score.best, score.best_logprob, score.log_sum, logits)


def _address(array: npt.NDArray[Any], ctype: Any) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctype))
