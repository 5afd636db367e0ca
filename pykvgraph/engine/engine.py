"""The engine: requests from any thread, decoded together on one cache, with the prefixes that they share."""

from __future__ import annotations

import os
import time
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from pykvgraph.checks import Integers, flag, integer, integers, shown, text_bytes
from pykvgraph.context.context_shift import can_move
from pykvgraph.context.pooling import Pooling
from pykvgraph.engine import embedding, ranking
from pykvgraph.engine.commands import ForgetText, Park, Prepare, Submit
from pykvgraph.engine.context_window import Window
from pykvgraph.engine.loop import Loop, close_loop
from pykvgraph.engine.new_text import (
    NewText,
    checked_pins,
    first_sequence,
    require_room,
    require_shift,
    terms_of,
)
from pykvgraph.engine.options import EngineOptions
from pykvgraph.engine.prefix_edits import EditedPrefix, PrefixEdit, checked_spans
from pykvgraph.engine.prefix_files import PrefixFiles
from pykvgraph.engine.prepared_text import Preparation
from pykvgraph.engine.request import Request
from pykvgraph.engine.types import EngineLook, EngineStats, Pin
from pykvgraph.errors import CacheFullError, InvalidArgumentError, NotCopied, UnsupportedError
from pykvgraph.kv_cache.saved.file import write_file
from pykvgraph.model.adapter import Active, Adapter, checked_adapters, key_of, pairs_of
from pykvgraph.model.model import Model
from pykvgraph.params.params import SamplingParams
from pykvgraph.prefix import block
from pykvgraph.prefix.prefix_file import SavedPrefix, pack, read
from pykvgraph.sequence.edits import REPAIR
from pykvgraph.tiers.options import Tiers
from pykvgraph.tiers.record import Name, Record, read_header
from pykvgraph.tiers.rows import Saver, Sink


class Engine(NotCopied):
    """Many requests at once on one context: continuous batching, and prefixes that are decoded once.

    Each step decodes one token of each answer, and as much of new prompts as n_batch has room for. A
    request enters when the cells that it may take will be there, whatever those inside may still take; what
    its text begins with and the cache has is not decoded again, and takes no cells of its own. Cells that
    only the index of prefixes keeps are given up, the ones used longest ago first, when others need them.

    n_ctx: number of cells; "auto": as many as n_seq_max texts can fill and the free memory has room for.
    n_seq_max: how many texts run at a time. n_batch: the most tokens in one step. prefix_cache: whether
    texts share what they begin with. overcommit: a request enters when its prompt fits; when cells run
    out, the youngest text is preempted, and comes back later. max_itl: the seconds from one token of a
    text to its next that long prompts should not make longer; None: they get a quarter of a step. draft:
    "ngram": where a text says again what it has said before, up to draft_max tokens more are decoded at
    once, and what is said stays the same (docs/many-requests.md). A Model: these are what that smaller
    model proposes; it has the same vocabulary, and is not closed before the engine is. "mtp": what the
    model's own draft head proposes, of a model that was loaded with draft_heads=True. None: that for such a
    model, and no drafts for others.
    draft_share: no draft is decoded where more than this part of the cells would be in use with it:
    others may need the rest. cache_reuse: what a text says as the newest one that begins like it, but
    earlier, comes from the cache where it is at least so many tokens, with its positions moved, as
    llama-server's --cache-reuse: these tokens have seen others before them, so that what is said need not
    be what it would be else; 0: never. tiers: where prefixes go when others need their cells, and come
    back from, also in another process (docs/tiers.md); it needs prefix_cache; None: they are lost.
    memory_share: the part of the free memory that this engine is planned for, one of several on a
    machine. margin: per cent of the free memory that n_ctx="auto" leaves to others; a given n_ctx that
    leaves less is warned of. background: a thread of the engine's own takes the steps; False: the program
    calls step(). adapters: those of requests that name none, with their scales, as Context.set_adapters()
    takes them. pin_cells: cells that the pins of submit() may keep at a time; None: a quarter of the cells.
    A request that can't run otherwise, alone in the cache, takes them nevertheless. prefix_compress: in idle
    time, prefixes of 512 tokens or more that two requests found in the cache, or that are pinned, are read
    once more, and this share of their cells is kept for requests with compressed=True (docs/forgetting.md);
    None: none is. Other arguments are those of Context.

    `context` is the context; its cache can be looked at. While the engine lives, nothing else may decode on
    it, or edit it. Raises what Context raises, InvalidArgumentError, and UnsupportedError for cache_reuse
    when not can_shift, and for prefix_compress where the CPU doesn't compute attention by pykvgraph's own
    kernel, or layers have windows or states.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int | Literal["auto"] = EngineOptions.n_ctx,
        n_seq_max: int = EngineOptions.n_seq_max,
        n_batch: int = EngineOptions.n_batch,
        prefix_cache: bool = EngineOptions.prefix_cache,
        overcommit: bool = EngineOptions.overcommit,
        max_itl: float | None = EngineOptions.max_itl,
        draft: Literal["ngram", "mtp"] | Model | None = EngineOptions.draft,
        draft_max: int = EngineOptions.draft_max,
        draft_share: float = EngineOptions.draft_share,
        cache_reuse: int = EngineOptions.cache_reuse,
        tiers: Tiers | None = EngineOptions.tiers,
        memory_share: float = EngineOptions.memory_share,
        margin: int = EngineOptions.margin,
        background: bool = EngineOptions.background,
        adapters: Iterable[tuple[Adapter, float]] = EngineOptions.adapters,
        pin_cells: int | None = EngineOptions.pin_cells,
        prefix_compress: float | None = EngineOptions.prefix_compress,
        **context: Any,
    ) -> None:
        if not isinstance(model, Model):
            raise InvalidArgumentError(f"model must be a pykvgraph.Model, got {shown(model)}")
        self.adapters = pairs_of(adapters)
        options = EngineOptions(
            n_ctx=n_ctx,
            n_seq_max=n_seq_max,
            n_batch=n_batch,
            prefix_cache=prefix_cache,
            overcommit=overcommit,
            max_itl=max_itl,
            draft=draft,
            draft_max=draft_max,
            draft_share=draft_share,
            cache_reuse=cache_reuse,
            tiers=tiers,
            memory_share=memory_share,
            margin=margin,
            background=background,
            adapters=self.adapters,
            pin_cells=pin_cells,
            prefix_compress=prefix_compress,
            context=context,
        )
        self.model = model
        self.context, stepper = options.open(model)
        self._n_seq_max = options.n_seq_max
        self._adapters = self.context.adapters
        self._tokenizer = model.tokenizer if model.has_tokenizer else None
        self._loop = Loop(self.context, stepper, options.background)
        self._finalizer = weakref.finalize(self, close_loop, self._loop)

    @property
    def can_shift(self) -> bool:
        """Whether texts may have a window, and be edited: not where layers are recurrent, nor where they have
        windows of their own, unless swa_full.
        """
        return can_move(self.context)

    def submit(
        self,
        prompt: str | Integers,
        params: SamplingParams | None = None,
        *,
        salt: str | bytes = b"",
        window: Window | None = None,
        adapters: Iterable[tuple[Adapter, float]] | None = None,
        copies: Sink | None = None,
        said: Integers = (),
        edit: Literal["exact", "approximate"] = "exact",
        session: str = "",
        pins: Iterable[Pin] = (),
        compressed: bool = False,
    ) -> Request:
        """Queues a prompt, and returns at once; from any thread.

        prompt: text, tokenized as the beginning of a text, or token ids, decoded as they are. salt: texts
        under different salts share nothing, so that a request's time tells nobody what others have asked.
        window: the text goes on when it has filled it; None: max_tokens must fit. adapters: LoRA adapters and
        their scales, as Context.set_adapters() takes them; None: the engine's own. Texts under different ones
        share nothing, and are decoded in turns. copies: gets a record of each block of the text as soon as it
        is decoded, for the tiers of another engine, see take_record(); needs tiers. The engine's thread calls
        its save(name, n_bytes, make), which must not wait; make() gives the record, or None. When it raises,
        the text is copied no more. said: what is known of the answer, as another engine has said it: handed
        out again, and not chosen anew. edit: "approximate": where the prompt is an earlier text of the same
        session, under the same salt and adapters, that has lost some tokens or has others in their place,
        what lies behind them comes from the cache, and only the first tokens behind each such place are
        decoded again (docs/editing.md). "exact", or layers with a window or a state: all is decoded from the
        first difference on. session: which earlier texts are meant, and who may have the edited text's cells;
        "": those without a session that begin like the prompt for the longest. pins: beginnings of the prompt
        that stay in the cache for a time: whole blocks of 32 tokens, as far as pin_cells allow.
        Completion.pinned tells how many tokens stay. compressed: whether the text may begin with a prefix of
        which only the best cells are left (prefix_compress), where there is one; not for a beam search, or
        with a window. Such a text's own cells are found by nobody.

        Raises InvalidArgumentError for an empty or bad prompt, a bad salt, session or edit, a window for
        several samples, copies that have no save(), `said` with tokens that the model lacks, for several
        samples or when they fill the window, a pin that is longer than the prompt or lasts no time, and after
        close(); CacheFullError for a request that can't fit, even alone; UnsupportedError for text when the
        model has no tokenizer, for a window when not can_shift, for an encoder, and for copies without tiers.
        """
        self.model._require_logits()
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise InvalidArgumentError(f"params must be a SamplingParams, got {shown(params)}")
        ids = self._ids_of(prompt)
        if window is not None:
            require_shift(self.can_shift, window, params, len(ids))
        terms = terms_of(salt, session, edit)
        terms = terms._replace(compressed=flag(compressed, "compressed") and params.beam_width == 1)
        request = Request(params.n, self._loop.cancel, None if self._loop.background else self.step)
        if copies is not None and not callable(getattr(copies, "save", None)):
            raise InvalidArgumentError(f"copies must have a method save(), got {shown(copies)}")
        saver = None if copies is None else self._saver.to(copies)
        if params.stop and self._tokenizer is None:
            self.model.tokenizer  # noqa: B018 which says what is missing
        active, salt = self._under(adapters, salt)
        text = NewText(request, ids, params, self._tokenizer, salt, window, active, saver, terms)
        sequence = first_sequence(text, self.context.kv)
        request._sequences = [sequence, *sequence.forks]
        sequence.pins = checked_pins(pins, len(ids))
        require_room(self.context, sequence, params, self._n_seq_max)
        known = integers(said, "said", 0, self.model.n_vocab - 1)
        is_full = sequence.window is not None and len(ids) + len(known) >= sequence.window.n_ctx
        if len(known) and (params.n_seqs > 1 or is_full):
            raise InvalidArgumentError("said: it is for one sample, of which its window has still all tokens")
        sequence.repeat(known.tolist(), self.model.n_vocab)
        if sequence.ended:
            sequence.enter(0, 0)
            sequence.end(sequence.ended, time.perf_counter())
        else:
            self._loop.give(Submit(sequence))
        return request

    def prepare(
        self,
        prompt: str | Integers,
        *,
        instead_of: Integers = (),
        salt: str | bytes = b"",
        adapters: Iterable[tuple[Adapter, float]] | None = None,
        edit: Literal["exact", "approximate"] = "exact",
        session: str = "",
    ) -> None:
        """Decodes what a prompt to come will begin with, while nobody waits; returns at once.

        From any thread. It is decoded in parts, alone, and stops within one of them when a request or
        anything else comes; it goes on when the engine is idle again. No cells go for it but those of
        instead_of, the text in whose place it comes: those behind what both begin with. Where
        there is no room, or the cache has lost what both begin with, nothing is done. The last n_seq_max of
        such texts are remembered. Other arguments: as in submit().

        Raises InvalidArgumentError as submit() does, and without prefix_cache; CacheFullError for more tokens
        than there are cells; UnsupportedError for text when the model has no tokenizer, and for an encoder.
        """
        self.model._require_logits()
        if not self._loop.stepper.shares:
            raise InvalidArgumentError("prepare: nothing is cached without prefix_cache")
        ids = array("i", self._ids_of(prompt).tobytes())
        if len(ids) > self.context.n_ctx:
            raise CacheFullError(f"the text has {len(ids)} tokens, and there are {self.context.n_ctx} cells")
        old = array("i", integers(instead_of, "instead_of", 0, self.model.n_vocab - 1).tobytes())
        terms = terms_of(salt, session, edit)
        active, salt = self._under(adapters, salt)
        self._loop.give(Prepare(Preparation(ids, old, salt, active, terms)))

    def take_record(self, record: Record) -> None:
        """Puts a record that another engine's `copies` got into the tiers in memory; from any thread.

        Both engines must be of the same model file, with the same types of the cache: else nobody finds it.
        What others don't find right is decoded instead. Raises InvalidArgumentError for what is no Record of
        bytes, and UnsupportedError without tiers.
        """
        if not isinstance(record, Record) or not isinstance(record.header, bytes):
            raise InvalidArgumentError(f"record must be a Record, got {shown(record)}")
        if not isinstance(record.rows, bytes | memoryview):
            raise InvalidArgumentError(f"a record's rows must be bytes, got {shown(record.rows)}")
        header, tiers = read_header(record.header), self._saver.sink
        if header is not None:
            name = Name(header.kind, header.parent, header.tokens, 0)
            tiers.save(name, record.n_bytes, lambda: record)

    @property
    def most_record_bytes(self) -> int:
        """Of a record that take_record() may get, at most. Raises UnsupportedError without tiers."""
        return self._saver.most_bytes

    def park(self, request: Request) -> bool:
        """Sets a request aside until resume(); False: it has ended, or is parked already.

        Its sequence is free for others. Its cells stay until others need them, and go to tiers then, if the
        engine has any, or of a text that has given up tokens (Window) to host memory: it comes back by
        copying. Whoever waits for its result waits until it is resumed, cancelled, or the engine closed.
        Raises InvalidArgumentError, and DeviceError or MemoryError when there is no memory for such rows.
        """
        return self._parking(request, True)

    def resume(self, request: Request) -> bool:
        """A parked request goes on as soon as there is room; False: it was not parked."""
        return self._parking(request, False)

    def save_prefix(
        self,
        path: str | os.PathLike[str],
        prompt: str | Integers,
        *,
        salt: str | bytes = b"",
        adapters: Iterable[tuple[Adapter, float]] | None = None,
    ) -> int:
        """Writes the cells of what the cache has of a text into a file, with their tokens; returns how many.

        prompt, adapters: as in submit(), and of a request that has ended its answer's tokens too. Of an
        edited text these are its first tokens, as far as they are exact. 0: it has none, and no file is
        written. The file is the old one or the whole new one, whatever happens. Other requests wait for as
        long as it takes to copy the cells. The file is its owner's alone (0600). Raises InvalidArgumentError,
        and OSError.
        """
        ids = array("i", self._ids_of(prompt).tobytes())
        active, salt = self._under(adapters, salt)
        files = PrefixFiles(self.context.kv, salt, active)
        saved: SavedPrefix | None = self._loop.run_between_steps(
            lambda index, seq: files.saved(index, seq, ids)
        )
        if saved is None:
            return 0
        write_file(path, pack(saved))
        return len(saved.ids)

    def load_prefix(
        self,
        path: str | os.PathLike[str],
        *,
        salt: str | bytes = b"",
        adapters: Iterable[tuple[Adapter, float]] | None = None,
    ) -> list[int]:
        """Puts the cells of a file that save_prefix() wrote into the cache; returns their tokens.

        A text that begins with them finds them there, for as long as nobody needs the cells. Nothing is
        changed when it raises: StateError for a file that is damaged, or of another model or other adapters,
        CacheFullError when there is no room beside what runs, InvalidArgumentError for what is no path,
        OSError when it can't be read.
        """
        saved = read(path, self.model.n_vocab)
        active, salt = self._under(adapters, salt)
        files = PrefixFiles(self.context.kv, salt, active)
        self._loop.run_between_steps(lambda index, seq: files.load(index, seq, saved))
        return list(saved.ids)

    def forget_prefix(
        self,
        prompt: str | Integers,
        *,
        salt: str | bytes = b"",
        adapters: Iterable[tuple[Adapter, float]] | None = None,
    ) -> int:
        """Gives up the cells of what the cache has of a text; returns how many tokens that were.

        prompt, adapters: as in save_prefix(). What running or other kept texts begin with, too, stays, and so
        does what is pinned, until its time has passed. Texts that requests with edit="approximate" made of
        its cells go with it, and are not counted, and so do its compressed forms; what edit_prefix() left is
        given up by its own tokens and salt=into. What tiers have stays there. Raises InvalidArgumentError.
        """
        ids = array("i", self._ids_of(prompt).tobytes())
        _, salt = self._under(adapters, salt)
        return int(self._loop.ask(ForgetText(ids, salt)))

    def find_prefix(
        self,
        prompt: str | Integers,
        *,
        salt: str | bytes = b"",
        adapters: Iterable[tuple[Adapter, float]] | None = None,
    ) -> int:
        """How many tokens of a text the cache has, from the first on. Arguments as in save_prefix()."""
        ids = array("i", self._ids_of(prompt).tobytes())
        _, salt = self._under(adapters, salt)
        return int(self._loop.run_between_steps(lambda index, seq: index.find(ids, len(ids), salt).n))

    def edit_prefix(
        self,
        prompt: str | Integers,
        spans: Sequence[tuple[int, int]],
        *,
        repair: int = REPAIR,
        into: str | bytes,
        salt: str | bytes = b"",
        adapters: Iterable[tuple[Adapter, float]] | None = None,
    ) -> EditedPrefix:
        """Removes tokens [begin, end) from what the cache has of a text; those behind them are not decoded.

        The old text stays as it is: its cells are copied where they move. repair: the first tokens behind
        each span are decoded again, which makes those behind the first one exact. A text under the salt
        `into` that begins with what is left goes on from its cells; only where all of it is exact, one under
        `salt` does. Others wait until it is done.

        Raises InvalidArgumentError for spans that overlap or leave nothing, for more tokens to repair than
        n_batch, and where `into` is `salt`, which has the cells of the old text; CacheFullError when there is
        no room for the copies, and UnsupportedError when not can_shift. Nothing is changed then.
        """
        if not self.can_shift:
            raise UnsupportedError("this model's cache can't be shifted: send the text without these tokens")
        ids = array("i", self._ids_of(prompt).tobytes())
        active, own = self._under(adapters, salt)
        _, into = self._under(adapters, into)
        if into == own:
            raise InvalidArgumentError(
                "into: this is the salt of the old text, whose cells were not edited: give another one"
            )
        repair = integer(repair, "repair", 0, self.context.n_batch)
        edit = PrefixEdit(self.context, ids, checked_spans(spans, len(ids)), repair, into, active)
        found: EditedPrefix = self._loop.run_between_steps(lambda index, seq: edit.run(index, seq, own))
        return found

    def embed(
        self,
        prompt: str | Integers,
        pooling: Pooling = "mean",
        adapters: Iterable[tuple[Adapter, float]] | None = None,
    ) -> np.typing.NDArray[np.float32]:
        """The hidden states of a text after the final norm, float32: their mean, the first, or the last one.

        (n_embd,); with pooling "none" all of them, (n_tokens, n_embd). prompt, adapters: as in submit(); it
        is read in parts, between the steps of others, and waits until there is room for it. An encoder's text
        is computed as a whole. Raises InvalidArgumentError, also for an encoder's text that is longer than
        n_batch, CacheFullError for one that is longer than the cache, and what Context.decode raises.
        """
        return self.embed_all([prompt], pooling, adapters)[0]

    def embed_all(
        self,
        prompts: Sequence[str | Integers],
        pooling: Pooling = "mean",
        adapters: Iterable[tuple[Adapter, float]] | None = None,
    ) -> list[np.typing.NDArray[np.float32]]:
        """embed() of several texts; an encoder's go together, as many as n_batch has room for."""
        return self._embed_all(prompts, pooling, adapters, lambda: True)

    def _embed_all(
        self,
        prompts: Sequence[str | Integers],
        pooling: Pooling,
        adapters: Iterable[tuple[Adapter, float]] | None,
        is_wanted: Callable[[], bool],
    ) -> list[np.typing.NDArray[np.float32]]:
        """is_wanted: as in embedding.embed_all()."""
        given = embedding.check(prompts, pooling)
        texts = [array("i", self._ids_of(prompt).tobytes()) for prompt in given]
        active, _ = self._under(adapters, b"")
        return embedding.embed_all(self._loop, texts, pooling, active, is_wanted)

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        adapters: Iterable[tuple[Adapter, float]] | None = None,
    ) -> list[float]:
        """How well each document answers the query, as the model's classifier says: greater is better.

        adapters: as in submit(). Each document is read with the query as embed() reads a text. Raises
        UnsupportedError for a model that is no reranker, and what embed() raises.
        """
        return self._rank_all(ranking.pairs_of(self.model, query, documents), adapters, lambda: True)

    def _rank_all(
        self,
        prompts: Sequence[Integers],
        adapters: Iterable[tuple[Adapter, float]] | None,
        is_wanted: Callable[[], bool],
    ) -> list[float]:
        """Of prompts as pair_tokens() makes them. is_wanted: as in embedding.embed_all()."""
        texts = [array("i", self._ids_of(prompt).tobytes()) for prompt in prompts]
        return ranking.rank_all(self._loop, texts, self._under(adapters, b"")[0], is_wanted)

    def step(self) -> bool:
        """One step, for an engine without background; returns whether there is more to do.

        Ctrl-C raises KeyboardInterrupt when the step is over, and the next step goes on with the same texts.
        A second Ctrl-C doesn't wait, and ends the engine.
        """
        if self._loop.background:
            raise InvalidArgumentError("the engine's own thread takes the steps: use background=False")
        return self._loop.step()

    def stats(self) -> EngineStats:
        """What was done so far, and how many requests run and wait."""
        return self._loop.stepper.stats()

    def look(self) -> EngineLook:
        """The cells and the texts at one moment between two steps, from any thread.

        Waits for the step that is under way; the next one waits until the cells' metadata is copied. Raises
        InvalidArgumentError after close().
        """
        return self._loop.look()

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests: after close(), or an error in the midst of a step."""
        return self._loop.closed

    def close(self) -> None:
        """Cancels what runs and waits, and frees the context. A second call does nothing."""
        self._finalizer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _under(
        self, adapters: Iterable[tuple[Adapter, float]] | None, salt: str | bytes
    ) -> tuple[Active, bytes]:
        """The adapters of a text, and its salt with what they are."""
        active = self._adapters if adapters is None else checked_adapters(adapters)
        if any(adapter._model is not self.model._handle for adapter, _ in active):
            raise InvalidArgumentError("an adapter was loaded for another model than the engine's")
        if any(adapter._handle.closed for adapter, _ in active):
            raise InvalidArgumentError("an adapter is closed: load it again")
        return active, block.under(text_bytes(salt, "salt"), key_of(active))

    def _ids_of(self, prompt: str | Integers) -> np.typing.NDArray[np.int32]:
        if isinstance(prompt, str):
            ids = np.array(self.model.tokenizer.encode(prompt), np.int32)
        else:
            ids = integers(prompt, "prompt", 0, self.model.n_vocab - 1)
        if len(ids) == 0:
            raise InvalidArgumentError("the prompt is empty: it takes a token to say what comes after it")
        return ids

    @property
    def _saver(self) -> Saver:
        saver = self._loop.stepper.saver
        if saver is None:
            raise UnsupportedError("records come and go by tiers: make the engine with tiers=Tiers()")
        return saver

    def _parking(self, request: Request, parks: bool) -> bool:
        if not isinstance(request, Request):
            raise InvalidArgumentError(f"request must be what submit() returned, got {shown(request)}")
        if request._cancel != self._loop.cancel:
            raise InvalidArgumentError("the request is another engine's: ask that one")
        return bool(self._loop.ask(Park(request, parks)))
