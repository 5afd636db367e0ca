"""A context: a model's KV cache, and the decodes that run tokens through the model and fill the cache."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.ctypeslib import as_array  # numpy imports it when first used: a child forked meanwhile would wait

from pykvgraph._native.ffi import KvgOutput, KvgScore
from pykvgraph._native.fork import importing
from pykvgraph._native.handles import Closable, Handle, repr_of
from pykvgraph._native.kv import read_info
from pykvgraph._native.library import lib, sized
from pykvgraph.checks import INT32_MAX, Integers, flag, integer, integer_rows, integers, native_path, shown
from pykvgraph.context.auto_n_ctx import fitting_n_ctx, fitting_tier, refusal_with_advice
from pykvgraph.context.batch import Batch
from pykvgraph.context.document import Document, read_document, require_holdable
from pykvgraph.context.draft_tokens import DraftedText, draft_tokens
from pykvgraph.context.hidden import checked_hidden
from pykvgraph.context.native_batch import NativeBatch
from pykvgraph.errors import DeviceError, InvalidArgumentError, KVGraphError
from pykvgraph.kv_cache.cache import KVCache
from pykvgraph.kv_cache.pending_token import PendingTokens
from pykvgraph.kv_cache.view import DecodedUnder
from pykvgraph.model.adapter import Active, Adapter, checked_adapters, key_of, pairs_of, set_adapters
from pykvgraph.model.model import Model
from pykvgraph.params.params import ContextParams, params_of
from pykvgraph.types import Scores

if TYPE_CHECKING:
    from pykvgraph.model.device_types import DevicePart

_NO_LOGITS = np.empty(0, np.float32)


class Context(Closable):
    """Decodes batches of tokens with a model; the attribute `kv` is the context's cache (KVCache).

    n_ctx: number of cells in the cache; a cell holds one token. "auto": as many as the model was trained on,
    or as the free memory has room for (plan.fit_n_ctx). n_batch: the most tokens in one decode call.
    n_ubatch: the most tokens in one compute graph; a longer batch is split into micro-batches of this size.
    n_seq_max: how many sequences there can be; their ids are 0 to n_seq_max - 1.
    n_outputs_max: the most tokens of a micro-batch that ask for their logits; at least n_seq_max, 32, and as
    many as have 16 MiB of logits. Memory for so many is planned and reserved, and a micro-batch ends where
    more are asked for. With n_ubatch the logits of a long text come in steps as large as without.
    type_k, type_v: the types that K and V are stored in: "f32", "f16", "bf16", or, for models whose head size
    is a multiple of 32, the quantized "q8_0", "q5_1", "q5_0", "q4_1" and "q4_0". "f16:q4_0@1024": the last
    1024 tokens in F16, older ones in Q4_0 (docs/cache-types.md).
    flash_attn: "on" or True: ggml's flash attention. "off" or False: any other attention. "auto": the fastest
    attention that the device has; on the CPU that is pykvgraph's own kernel.
    hadamard: whether quantized K and V are stored mixed, that is multiplied by a Walsh-Hadamard matrix.
    Quantizing then loses less where some dimensions of a head are much larger than others (arXiv:2404.00456).
    llama.cpp does the same, but only for head sizes that are a multiple of 64.
    n_threads: CPU threads for a batch of one token. n_threads_batch: CPU threads for larger batches; None: as
    n_threads. n_threads None: as many as this process may use CPUs, but one thread for a model under 10
    million parameters, which is faster there than several.
    defrag_threshold: decode compacts the cache (defrag) when holes / n_kv is above this number, where n_kv is
    the highest used cell + 1. A negative number: decode never compacts.
    offload_kqv: True: the cells of a layer are stored on the device that has the layer's weights. False: all
    cells are stored in host memory, and the CPU computes the attention.
    swa_full: for models with sliding windows. False: a group of cells with a window of W positions has
    n_seq_max * W + n_batch + checkpoint_cells cells (n_ctx at most) and reuses those that are out of every
    sequence's window. A sequence can then go back only a little way, and some shifts are refused. True: such
    groups keep every position, as llama.cpp's --swa-full does, and take as much memory as the others.
    checkpoint_cells: how many cells more such a group has, for `kv.checkpoint()` and `kv.resume_point()`,
    which take W cells each.
    checkpoint_bytes: for models with recurrent layers: how much memory their states may take for
    checkpoints and resume points, beside two states for each sequence; a state has
    `kv.groups[-1].cell_bytes`. None: room for 8.
    kv_tier: "device": as offload_kqv says. "host": K and V are in host memory, so the cache may be larger
    than the device, and the device still computes the attention: each layer's attended span is copied there
    for its turn, and the rows of new tokens are copied back. Nothing changes for layers on the CPU. It can't
    be combined with offload_kqv=False. "auto": "device" where that has room, else "host" with as many
    resident_layers as there is room for.
    device_layers: for kv_tier="host": room for how many layers' K and V each device has. 2: while a layer is
    computed the next one's span is copied. 1: it is copied when that is over. More than the model has: all.
    resident_layers: for kv_tier="host": how many layers' K and V stay on their device all the same; first
    those with a sliding window, then layers spread evenly over the others.

    adapters: LoRA adapters and their scales, as set_adapters() takes them.

    `model` and all the arguments are attributes too; n_threads and n_threads_batch are then the numbers that
    were chosen.

    Raises InvalidArgumentError for a bad argument, UnsupportedError when the model or device can't do what is
    asked, and DeviceError when the device has too little memory for the cache. Several threads may use one
    context; a call waits until the running one is over.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int | Literal["auto"] = ContextParams.n_ctx,
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
        swa_full: bool = ContextParams.swa_full,
        checkpoint_cells: int = ContextParams.checkpoint_cells,
        checkpoint_bytes: int | None = ContextParams.checkpoint_bytes,
        kv_tier: Literal["device", "host", "auto"] = ContextParams.kv_tier,
        device_layers: int = ContextParams.device_layers,
        resident_layers: int = ContextParams.resident_layers,
        n_outputs_max: int = ContextParams.n_outputs_max,
        adapters: Iterable[tuple[Adapter, float]] = (),
    ) -> None:
        if not isinstance(model, Model):
            raise InvalidArgumentError(f"model must be a pykvgraph.Model, got {shown(model)}")
        adapters = pairs_of(adapters)
        if isinstance(n_ctx, str) and n_ctx == "auto":
            n_ctx = fitting_n_ctx(model, model.n_ctx_train, locals())
        params = params_of(ContextParams, {**locals(), **fitting_tier(model, n_ctx, locals())})
        native = params.native(model._n_params_of_file)
        self.model = model
        self.n_ctx = params.n_ctx
        self.n_batch = params.n_batch
        self.n_ubatch = params.n_batch if model.encodes else params.n_ubatch
        self.n_seq_max = params.n_seq_max
        self.type_k = params.type_k
        self.type_v = params.type_v
        self.flash_attn = params.flash_attn
        self.hadamard = params.hadamard
        self.n_threads = native.n_threads
        self.n_threads_batch = native.n_threads_batch
        self.defrag_threshold = params.defrag_threshold
        self.offload_kqv = params.offload_kqv
        self.swa_full = params.swa_full
        self.checkpoint_cells = params.checkpoint_cells
        self.checkpoint_bytes = params.checkpoint_bytes
        self.kv_tier = params.kv_tier
        self.device_layers = params.device_layers
        self.resident_layers = params.resident_layers
        self.n_outputs_max = params.n_outputs_max
        try:
            self._handle = Handle.open(
                model._handle.call,
                lib().kvg_context_new,
                ctypes.byref(native),
                free=lib().kvg_context_free,
                name="context",
            )
        except DeviceError as error:
            asked = {**asdict(params), "adapters": adapters}
            raise DeviceError(refusal_with_advice(error, model, params.n_ctx, asked)) from None
        if model.device != "CPU":
            self._handle.stay()
        self._adapters: Active | None = ()  # None: nobody knows
        self._pending = PendingTokens(model.n_vocab)
        self.kv = KVCache(self._handle, self._pending)
        # decode writes into these buffers; a view of one keeps its memory alive after the context is closed
        self._outputs = _Outputs(1, model, self._pending)
        self._batch = NativeBatch()
        try:
            self.set_adapters(adapters)
        except BaseException:
            self.close()
            raise

    def set_adapters(self, adapters: Iterable[tuple[Adapter, float]]) -> None:
        """From the next decode on these LoRA adapters take part, each times its scale, and no others.

        adapters: pairs of what model.load_adapter() returned and a scale; one of scale 0 doesn't take part;
        an empty list: none. The graphs are built anew. Cells that are in the cache stay as they are: what
        they were decoded under is known only of a cache that is empty now, and of others no state can be
        saved, loaded or sent until clear().

        All or nothing. Raises InvalidArgumentError for an adapter that is closed, of another model or given
        twice, and DeviceError when there is no memory for the larger graphs.
        """
        self._handle.call(self._adapt, checked_adapters(adapters))

    def _adapt(self, context: int, active: Active) -> None:
        if active == self._adapters:
            return
        before, under = self._adapters, self.kv._under
        # Ctrl-C may come between any two lines, and in the handler: until all is done cells are nobody's
        self._adapters, self.kv._under = None, DecodedUnder(os.urandom(32), True)
        try:
            set_adapters(context, active)
            self.kv._decode_under(context, under, key_of(active))
            self._adapters = active
        except BaseException:
            set_adapters(context, before or ())
            self._adapters, self.kv._under = before, under
            raise

    @property
    def adapters(self) -> tuple[tuple[Adapter, float], ...]:
        """The adapters that take part, with their scales; those of scale 0 are left out."""
        return self._adapters or ()

    def decode(
        self,
        batch: Batch,
        *,
        scores: bool = False,
        hidden: npt.NDArray[np.float32] | None = None,
        repair: bool = False,
        observe: int = 0,
        peaks: bool = False,
    ) -> None:
        """Computes a batch: afterwards its tokens are in the cache, and logits() has its outputs.

        First runs the K-shift and the defrag that are pending, as kv.update() does. scores: also computes
        what scores() returns; this reads every logit once more. hidden: for a stage that isn't the first of a
        pipeline, float32 (n_tokens, n_embd): embeddings() of the stage before, for the same batch, whose
        tokens are not looked at here.

        All or nothing: the tokens of the batch are in the cache if and only if decode() returned. After an
        error none of them is there and logits() raises; a K-shift or defrag that already ran stays done.
        Ctrl-C raises KeyboardInterrupt when the computation is over, and its tokens are removed again.

        repair: tokens may also lie below later positions of their sequences, in rising order. Such a token
        sees what its sequence has before it, and nothing after it; what lies after it keeps its K and V. If
        the sequence has a cell at that position, the token takes its place: other sequences and holds keep
        the old one, and after an error the sequence has it again. Empty cells for all tokens are needed all
        the same. Raises UnsupportedError when a window has lost what such a token sees (open the context with
        swa_full=True), and for recurrent layers, whose states can't be changed afterwards.

        observe: attention() and attention_of_heads() tell what the last so many tokens attend to; that reads
        all K once more. peaks: attention_of_heads() tells the highest share that any of these tokens gives a
        cell, and attention() raises InvalidArgumentError. UnsupportedError where the attention isn't
        pykvgraph's own, on the CPU.

        Raises InvalidArgumentError for a token, position or sequence that the model or the context can't
        take, or for positions that don't follow the sequence's last one; CacheFullError when there are fewer
        empty cells than tokens; DeviceError when the device fails or has too little memory. When the device
        fails in the middle of a K-shift or a sorting defrag, the cache must be cleared: see kv.update().
        """
        observed = integer(observe, "observe", 0, INT32_MAX), flag(peaks, "peaks")
        flags = flag(scores, "scores"), flag(repair, "repair")
        self._handle.call(self._decode, batch, flags, hidden, observed)

    def read(self, ids: Integers, behind: Integers = ()) -> Document:
        """Reads tokens by themselves, from position 0 on; their cells are held for Sequence.link().

        behind: tokens that are read before them, such as the system prompt that texts begin with. Linked to
        a text of just these, the document is exact and shares its cells; elsewhere its first tokens were
        not a beginning of their own, which later tokens would attend to more than to others.

        Needs an empty sequence for a moment, which no other thread may use meanwhile. Raises
        InvalidArgumentError where there is none, UnsupportedError for models with recurrent layers, and with
        windows unless swa_full=True, and what decode() raises: the cache is as it was then.
        """
        require_holdable(self.kv, self.swa_full)
        tokens = integers(ids, "ids", 0, self.model.n_vocab - 1)
        before = integers(behind, "behind", 0, self.model.n_vocab - 1)
        return read_document(self.kv, tokens, before, self.n_batch, self.decode)

    def decode_last(self, batch: Batch) -> npt.NDArray[np.float32]:
        """decode(batch), then a copy of the last output's logits, float32 (n_vocab,), as one step.

        For threads that share a context: another thread's decode could come between decode() and logits().
        Raises InvalidArgumentError, with nothing decoded, when no token of the batch asks for logits, and
        what decode() raises.
        """
        return self._handle.call(self._decode_last, batch).logits

    def decode_rows(self, batch: Batch, *, repair: bool = False) -> list[LastOutput]:
        """decode(batch, repair=repair), then all of its outputs, in batch order, as one step.

        Their logits are views: the next decode may overwrite the values. All or nothing: when there is no
        memory for the list, the tokens are removed again. Raises what decode() raises.
        """
        return self._handle.call(self._decode_rows, batch, flag(repair, "repair"))

    def append(self, token: int, seq: int = 0) -> npt.NDArray[np.float32]:
        """Decodes one token at the end of a sequence, at position seq_pos_max + 1.

        Returns a copy of the token's logits, float32 (n_vocab,). The same as decode_last() with a batch of
        one token, but with less overhead. Raises what decode() raises.
        """
        return self._handle.call(self._append, integer(seq, "seq"), integer(token, "token")).logits

    def draft(self, texts: Iterable[DraftedText | tuple[int, int, int]]) -> list[list[int]]:
        """For each text the tokens that may follow it, as the model's own draft head guesses them.

        texts: of each its sequence, its last token, which is not decoded yet, and how many tokens to draft.
        There are fewer, or none, where the hidden state behind the last decoded token isn't known any more:
        those of some hundred tokens are, which a decode had outputs for or ended with. Takes cells for as
        long as the call takes; the cache is as it was. What it drafts may be wrong: decode it to know.

        Raises UnsupportedError for a model without a draft head (Model(draft_heads=True)),
        InvalidArgumentError for a sequence or token that there isn't, or more tokens than n_batch,
        CacheFullError when there are too few empty cells, and DeviceError as decode() does.
        """
        wanted = integer_rows(texts, "texts", DraftedText._fields)
        return self._handle.call(draft_tokens, [DraftedText(*text) for text in wanted])

    def logits(self) -> npt.NDArray[np.float32]:
        """The last decode's logits, float32 (n_outputs, n_vocab), one row per output in batch order; a copy.

        The outputs are the tokens that were added with logits. Raises InvalidArgumentError before the first
        decode, after a failed decode, and after reset().
        """
        rows: npt.NDArray[np.float32] = self.logits_view().copy()
        return rows

    def logits_view(self) -> npt.NDArray[np.float32]:
        """logits() without the copy: a read-only array. The next decode may overwrite its values.

        Reading the array stays safe, even after the context is closed. Raises as logits() does.
        """
        self.model._require_logits()
        return self._handle.call(lambda _: self._rows(self._outputs.logits))

    def scores(self) -> Scores:
        """The likeliest token, its log probability and the log-sum of each output of the last decode; copies.

        There are scores after decode(batch, scores=True), decode_last() and append(). Raises
        InvalidArgumentError as logits() does, and after a decode() without scores=True.
        """
        self.model._require_logits()
        return self._handle.call(lambda _: self._scores())

    def embeddings(self) -> npt.NDArray[np.float32]:
        """The last decode's hidden states after the final norm, float32 (n_outputs, n_embd); a copy.

        One row per output, as in logits(). Of a stage that isn't the last: of each token, behind the stage's
        last layer. Raises InvalidArgumentError as logits() does.
        """
        return self._handle.call(lambda _: self._rows(self._outputs.embd).copy())

    def classify(self, vectors: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Scores of texts by the model's classifier, float32 (n, n_classes).

        vectors: what the hidden states of each text were pooled into, (n, n_embd); which pooling it is,
        context.ranking.pooling_of_classes() says. Raises InvalidArgumentError for another shape, and
        UnsupportedError for a model without classifier.
        """
        try:
            rows = np.ascontiguousarray(vectors, np.float32)
        except (TypeError, ValueError):
            raise InvalidArgumentError(f"vectors must be an array of numbers, got {shown(vectors)}") from None
        if rows.ndim != 2 or rows.shape[1] != self.model.n_embd:
            raise InvalidArgumentError(
                f"vectors must be an array (n, {self.model.n_embd}), got one of shape {rows.shape}"
            )
        scores = np.empty((len(rows), self.model.n_classes), np.float32)
        self._handle.call(lib().kvg_classify, _floats(rows), len(rows), _floats(scores))
        return scores

    def attention(self, group: int = 0) -> npt.NDArray[np.float32]:
        """What the tokens attend to that the last decode(observe=) observed, float32 (n_cells,).

        Of each cell of a group (an index into `kv.groups`) the share of their attention that it gets: the
        mean over tokens, layers of the group and query heads. The shares are 1 together, less what attention
        sinks take (gpt-oss). Cells that have moved since then (kv.update, another decode) aren't followed.

        Raises InvalidArgumentError when the last decode observed nothing, or failed.
        """
        index = integer(group, "group", 0, self.kv._n_groups - 1)
        shares = np.empty(self.kv._group(index).n_cells, np.float32)
        self._handle.call(lib().kvg_attention, index, _floats(shares))
        return shares

    def attention_of_heads(self, group: int = 0) -> npt.NDArray[np.float32]:
        """As attention(), but the share of each head of K and V: float32 (n_layer, n_head_kv, n_cells).

        The layers are those of the group. A share is the mean over the observed tokens and the query heads
        that read the head; after decode(peaks=True) it is the highest that any of them gives the cell. Raises
        what attention() raises.
        """
        index = integer(group, "group", 0, self.kv._n_groups - 1)
        info = self.kv._group(index)
        shares = np.empty((info.n_layer, info.n_head_kv, info.n_cells), np.float32)
        self._handle.call(lib().kvg_attention_of_heads, index, _floats(shares))
        return shares

    @property
    def devices(self) -> tuple[DevicePart, ...]:
        """The memory that this context and its model use on each device, and what runs there; the CPU last.

        As it is now: a decode with more outputs than any before may enlarge the graphs' memory.
        """
        with importing:
            from pykvgraph.model.device import read_parts
        return self._handle.call(read_parts, lib().kvg_context_n_parts, lib().kvg_context_get_part)

    @property
    def graph_seconds(self) -> float:
        """Seconds spent computing decode graphs since the context was made.

        What a decode takes beyond that is overhead: checks, finding cells, building graphs, copying rows.
        """
        return float(self._handle.call(lib().kvg_context_graph_seconds))

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes what was copied and computed when, layer by layer, since the last call: with kv_tier="host".

        The first call begins it: its file is empty, and from then on each layer is waited for, so that it is
        known when it was computed. The file is in Chrome's trace format, for chrome://tracing and
        ui.perfetto.dev: a track of copies to devices, one of computing, one of copies back. A copy ends when
        it is known to be over. The last 65,536 spans are kept.

        Raises InvalidArgumentError for what is no path, UnsupportedError where nothing is copied, and OSError
        when the file can't be written.
        """
        name = native_path(path)
        with importing:
            from pykvgraph.context.trace import take_spans, write_trace
        write_trace(self._handle.call(take_spans), os.fsdecode(name))

    def reset(self) -> None:
        """Empties the cache, as kv.clear() does; logits() and its like raise until the next decode."""
        self._handle.call(self._reset)

    def __repr__(self) -> str:
        return repr_of(self, lambda: f"n_ctx {self.n_ctx}, {self.kv._use()}")

    def _decode(
        self,
        context: int,
        batch: Batch,
        flags: tuple[bool, bool],
        hidden: npt.NDArray[np.float32] | None,
        observed: tuple[int, bool],
    ) -> None:
        scored, repair = flags
        self._decode_batch(context, batch, scored=scored, hidden=hidden, repair=repair, observed=observed)

    def _decode_last(self, context: int, batch: Batch, copy: bool = True) -> LastOutput:
        """copy: whether the result has a copy of the row of logits."""
        n_outputs = self._decode_batch(context, batch, scored=True, must_output=True)
        return self._outputs.last(n_outputs, copy)

    def _decode_each(self, context: int, batch: Batch) -> list[LastOutput]:
        """Every output of the batch, each with a copy of its logits."""
        n_outputs = self._decode_batch(context, batch, scored=True, must_output=True)
        return [self._outputs.at(index, True) for index in range(n_outputs)]

    def _decode_batch(
        self,
        context: int,
        batch: Batch,
        *,
        scored: bool,
        must_output: bool = False,
        hidden: npt.NDArray[np.float32] | None = None,
        repair: bool = False,
        observed: tuple[int, bool] = (0, False),
    ) -> int:
        """Decodes the batch, and returns its number of outputs; must_output: it must have at least one."""
        self._outputs.n = None
        if not isinstance(batch, Batch):
            raise InvalidArgumentError(f"batch must be a pykvgraph.Batch, got {shown(batch)}")
        rows = batch.rows()
        n_outputs = sum([row[3] for row in rows]) if self.model._has_output else len(rows)
        if scored:
            self.model._require_logits()
        if must_output and n_outputs == 0:
            raise InvalidArgumentError("no token of the batch asked for logits: add one with logits=True")
        states = None if hidden is None else checked_hidden(hidden, len(rows), self.model.n_embd)
        self._make_room(context, len(rows), n_outputs)
        native = self._batch.filled(rows)
        tokens = native.struct
        tokens.hidden = None if states is None else _floats(states)
        tokens.repair, tokens.n_observed, tokens.peaks = repair, *observed
        pos_max = self.kv._ask_bounds(context, self.n_seq_max).pos_max if repair and self._pending else []
        outputs = self._outputs
        written = outputs.scored if scored else outputs.plain
        outputs.start()
        self._handle.undo_unless_done(outputs.take_back)
        lib().kvg_decode(context, ctypes.byref(tokens), ctypes.byref(written))
        self._batch = native  # only now: a batch that is refused may be huge
        if self._pending:  # a repaired token, below its sequence's end, doesn't end the pending one
            appended = {seq for _, pos, seqs, *_ in rows for seq in seqs if not pos_max or pos > pos_max[seq]}
            self._pending.end_decode(appended)
        outputs.n, outputs.scored_last = n_outputs, scored
        return n_outputs

    def _decode_rows(self, context: int, batch: Batch, repair: bool) -> list[LastOutput]:
        if not self._decode_batch(context, batch, scored=True, repair=repair):
            return []
        scores, rows = self._scores(), self._rows(self._outputs.logits)
        numbers = (scores.best.tolist(), scores.best_logprob.tolist(), scores.log_sum.tolist())
        return [LastOutput(*output) for output in zip(*numbers, rows, strict=True)]

    def _append(self, context: int, seq: int, token: int, copy: bool = True) -> LastOutput:
        self.model._require_logits()
        outputs = self._outputs
        outputs.n = None
        outputs.start()
        self._handle.undo_unless_done(outputs.take_back)
        lib().kvg_append(context, seq, token, outputs.scored_pointer)
        self._pending.end_decode((seq,))
        outputs.n, outputs.scored_last = 1, True
        return outputs.last(1, copy)

    def _reset(self, context: int) -> None:
        lib().kvg_kv_clear(context, 0)
        self._pending.drop_all()
        self.kv._forget_others()
        self._outputs.n = None

    def _make_room(self, context: int, n_tokens: int, n_rows: int) -> None:
        """Makes new buffers when the present ones have too few rows.

        The old ones are not resized, as the caller may have a view of them. A batch with more tokens than fit
        gets no buffers: decode will refuse it, and its buffers could be huge.
        """
        grows = n_rows > len(self._outputs.logits)
        if grows and n_tokens <= self.n_batch and n_tokens <= read_info(context).n_free:
            self._outputs = _Outputs(n_rows, self.model, self._pending)

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
        rows = self._outputs.score_rows[:n]
        return Scores(*(rows[name].copy() for name in Scores._fields))


class LastOutput(NamedTuple):
    """What is known of the last output of a decode."""

    best: int  # the likeliest token, the lowest id among equals
    best_logprob: float
    log_sum: float  # log of the sum of exp(logits); NaN when they are broken
    logits: npt.NDArray[np.float32]  # (n_vocab,), a copy; empty when the caller didn't want it

    def require_finite(self) -> None:
        """Raises KVGraphError when no token can be chosen by these logits."""
        if not math.isfinite(self.log_sum):
            raise KVGraphError("the logits are broken: one is no number, or the largest is infinite")


class _Outputs:
    """The buffers that decode writes, and the two structs that name them: without scores, and with scores."""

    def __init__(self, n_rows: int, model: Model, pending: PendingTokens) -> None:
        self.pending = pending
        n_logits = 0 if model.encodes or not model._has_output else model.n_vocab
        self.logits: npt.NDArray[np.float32] = np.empty((n_rows, n_logits), np.float32)
        self.embd: npt.NDArray[np.float32] = np.empty((n_rows, model.n_embd), np.float32)
        self.n: int | None = None  # rows that the last decode wrote; None when there are none to be read
        self.scored_last = False  # whether the last decode wrote scores, too
        self.scores = (KvgScore * n_rows)()
        self.score_rows = as_array(self.scores)
        places = {
            "logits": _floats(self.logits) if n_logits else None,
            "embd": _floats(self.embd),
            "n_rows": n_rows,
        }
        self.plain = sized(KvgOutput, **places)
        self.scored = sized(KvgOutput, **places, score=self.scores)
        self.scored_pointer = ctypes.byref(self.scored)

    def start(self) -> None:
        """To be called before a decode: marks that it has written nothing yet."""
        self.plain.n_written = self.scored.n_written = -1
        self.pending.begin_decode()

    def take_back(self, context: int) -> None:
        """Undoes a decode that succeeded, but whose caller got an exception after it (Ctrl-C)."""
        self.n = None
        if self.plain.n_written >= 0 or self.scored.n_written >= 0:
            self.pending.take_back()
            lib().kvg_undo_decode(context)
            self.start()

    def last(self, n_outputs: int, copy: bool) -> LastOutput:
        """The last output of a decode with scores; copy: whether it has a copy of the row of logits."""
        return self.at(n_outputs - 1, copy)

    def at(self, index: int, copy: bool) -> LastOutput:
        """As last(), of any output."""
        score = self.scores[index]
        logits = self.logits[index].copy() if copy else _NO_LOGITS
        return LastOutput(score.best, score.best_logprob, score.log_sum, logits)


def _floats(array: npt.NDArray[np.float32]) -> Any:
    """A pointer to an array. A struct that it is written to doesn't keep the array."""
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
