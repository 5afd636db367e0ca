"""An engine under random requests, cancels and faults, whose accounts are checked after every step."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import numpy as np

import pykvgraph as kvg
from pykvgraph._native.library import lib
from pykvgraph.engine import sizes
from pykvgraph.plan import fitting
from pykvgraph.prefix.node import Node
from support import chance
from support.engines import Logits
from support.faults import fault

F32: dict[str, Any] = {"type_k": "f32", "type_v": "f32"}
N_CTX = 384
N_SEQ_MAX = 4
# every place where a step, a text that enters, or a resume point may fail
SITES = (
    *("cells", "build", "alloc", "alloc-kept", "compute", "state-take", "state-keep", "checkpoint"),
    *("defrag-build", "defrag-alloc", "defrag-compute", "defrag-cells"),
)


@dataclass
class Asked:
    """A request that was accepted, and what it was."""

    request: kvg.Request
    prompt: list[int]
    params: kvg.SamplingParams
    window: kvg.Window | None = None  # that forgets


class Soak:
    """Requests with shared prefixes, under few salts, in a cache that is too small for all of them.

    Some are parked at times.

    draft: as Engine's. Texts repeat themselves then: they have few tokens.
    """

    def __init__(
        self,
        model: kvg.Model,
        seed: int,
        overcommit: bool,
        draft: Literal["ngram"] | kvg.Model | None = None,
        n_ctx: int | Literal["auto"] = N_CTX,
        **options: Any,
    ) -> None:
        self.rng = random.Random(chance.seed(seed))
        self.model = model
        self.n_tokens = 3 if draft else model.n_vocab
        self.engine = kvg.Engine(
            model,
            n_ctx=n_ctx,
            n_seq_max=N_SEQ_MAX,
            n_batch=48,
            overcommit=overcommit,
            background=False,
            defrag_threshold=0.1,
            draft=draft,
            **F32,
            **options,
        )
        self.shared = [self._ids(120) for _ in range(4)]
        self.asked: list[Asked] = []
        self.n_failed = 0
        self.n_forgotten = 0  # tokens
        self.n_gone_on = 0  # requests, from what an earlier one had left
        self.turns: deque[tuple[list[int], kvg.Window]] = deque(maxlen=4)  # that forget, and their windows
        self.n_edited = 0  # tokens of answers that came from cells which are approximate
        self.sites: tuple[str, ...] = SITES

    def vary_drafts(self) -> None:
        """Drafts are of any length, whether they pay or not."""
        if speculation := self.engine._loop.stepper._speculation:
            speculation.gate.lengths = self._lengths  # type: ignore[method-assign]

    def run(self, n_steps: int, faults: bool) -> None:
        """Steps with random requests, cancels and parkings in between, and then until all have ended."""
        for _ in range(n_steps):
            if self.rng.random() < 0.35 and len(self.asked) < 24:
                self.submit()
            if self.rng.random() < 0.05 and self.asked:
                self.rng.choice(self.asked).request.cancel()
            if self.rng.random() < 0.1 and self.asked:
                self.park(self.rng.choice(self.asked).request)
            if faults and self.rng.random() < 0.25:
                with fault(self.rng.choice(self.sites), self.rng.randrange(1, 5)):
                    self.engine.step()
            else:
                self.engine.step()
            self.check()
        for each in self.asked:
            self.engine.resume(each.request)
        for _ in range(10_000):
            more = self.engine.step()
            self.check()
            if not more:
                break
        assert not self.asked, "a request has not ended"

    def submit(self) -> None:
        if self.turns and self.rng.random() < 0.2:
            self._submit_turn()
            return
        rng = self.rng
        prompt = rng.choice(self.shared)[: rng.randrange(120)] + self._ids(rng.randrange(1, 40))
        temperature = rng.choice([0.0, 0.0, 1.0] if self.n_tokens > 3 else [0.0, 1.0, 1.0])
        is_narrow = temperature > 0 and self.n_tokens < self.model.n_vocab
        params = kvg.SamplingParams(
            max_tokens=rng.randrange(1, 40),
            temperature=temperature,
            logit_bias=dict.fromkeys(range(self.n_tokens), 100.0) if is_narrow else {},
            n=rng.choice([1, 1, 1, 2, 3]),
            stop=rng.choice([[], ["a"], ["th", "zz"]]),
            seed=rng.randrange(1000),
            priority=rng.randrange(3),
        )
        if rng.random() < 0.2:
            width = rng.randrange(2, N_SEQ_MAX + 1)
            most = (self.engine.context.n_ctx - len(prompt)) // width
            params = kvg.SamplingParams(
                max_tokens=rng.randrange(1, min(most, 40)),
                beam_width=width,
                n=rng.randrange(1, width + 1),
                priority=params.priority,
            )
        salt = rng.choice([b"", b"", b"a", b"%d" % rng.randrange(99)])
        window = None
        if params.n_seqs == 1 and self.engine.can_shift and rng.random() < 0.4:
            forget = rng.choice([None, "keydiff", "window"]) if len(prompt) > 70 else None
            room = rng.randrange(8, 30) if forget is None else rng.randrange(2, 8)
            window = kvg.Window(len(prompt) + room, rng.randrange(40), forget=forget)
        request = self.engine.submit(prompt, params, salt=salt, window=window)
        self.ask(request, prompt, params, window)

    def _submit_turn(self) -> None:
        """It goes on where an earlier one has ended, or a few tokens before that, with the same window."""
        rng = self.rng
        text, window = rng.choice(self.turns)
        prompt = text[: len(text) - rng.choice([0, 0, 0, 1, 5, 30])] + self._ids(rng.randrange(1, 9))
        params = kvg.SamplingParams(max_tokens=rng.randrange(1, 20), temperature=0.0)
        self.ask(self.engine.submit(prompt, params, window=window), prompt, params, window)

    def ask(
        self,
        request: kvg.Request,
        prompt: list[int],
        params: kvg.SamplingParams,
        window: kvg.Window | None = None,
    ) -> None:
        """It was accepted, and has to end."""
        forgets = window is not None and window.forget is not None
        self.asked.append(Asked(request, prompt, params, window if forgets else None))

    def park(self, request: kvg.Request) -> None:
        """Or lets it go on, if it is parked."""
        if not self.engine.resume(request):
            self.engine.park(request)

    def check(self) -> None:
        """What is to be seen after each step."""
        self.check_accounts()
        done = [each for each in self.asked if each.request.done]
        self.asked = [each for each in self.asked if not each.request.done]
        for each in done:
            self.check_answer(each)

    def check_accounts(self) -> None:
        """Cells, holds, pins and points, counted from the cache and from the index."""
        stepper = self.engine._loop.stepper
        kv, index, running = self.engine.context.kv, stepper._index, stepper._scheduler.running
        nodes = list(nodes_of(index))
        lengths = dict.fromkeys(set(range(self.engine.context.n_seq_max)) - self.others(), 0)
        for sequence in running:
            for tip in sequence.tips:
                lengths[tip.seq] = tip.position
        for seq, n in lengths.items():
            assert kv.seq_pos_max(seq) == n - 1
        for sequence in running:
            if sequence.window is not None:
                assert kv.seq_count(sequence.seq, -1, -1).n_cells <= sequence.window.n_ctx
        assert index.n_nodes == len(nodes)
        assert sum(len(node.points) for node in (*nodes, *index._roots.values())) == index.n_points
        pins = dict.fromkeys(map(id, (*nodes, *index._roots.values())), 0)
        for sequence in running:
            at: Node | None = sequence.last
            while at is not None:
                pins[id(at)] += 1
                at = at.parent
        assert all(node.n_pins == pins[id(node)] for node in (*nodes, *index._roots.values()))
        for number, group in enumerate(kv.groups):
            if group.kind == "full":
                running_set = stepper._running_set
                n_own = sum(each.own.n_cells for each in running_set.kept if each.own)
                n_own += sum(each.rows.n_cells for each in running_set.shortened._left)
                assert kv.cells(number).held.sum() == sum(node.n_tokens for node in nodes) + n_own
            elif group.kind == "state":
                n_drafted = sum(len(kv.checkpoints(seq)) for seq in range(N_SEQ_MAX))
                assert kv.cells(number).held.sum() == index.n_points + n_drafted

    def others(self) -> set[int]:
        """Sequences with cells that are no running text's."""
        return set()

    def check_answer(self, asked: Asked) -> None:
        """An error is that of a fault; who had none says what it says alone."""
        try:
            completions = asked.request.results()
        except kvg.DeviceError:
            self.n_failed += 1
            return
        assert len(completions) == asked.params.n
        for each in completions:
            if asked.window is not None:
                self.n_forgotten += each.n_discarded
                self.n_gone_on += each.n_cached >= asked.window.n_ctx
                self.turns.append(([*asked.prompt, *each.tokens], asked.window))
            self.n_edited += each.cache.edited
            assert each.finish_reason in ("stop", "length", "cancelled")
            assert each.finish_reason != "length" or len(each.tokens) == asked.params.max_tokens
            if asked.params.beam_width > 1:
                if each.finish_reason == "length":
                    own = logprob_of(self.model, asked.prompt, each.tokens)
                    assert abs(own - each.logprob) < 1e-3 * len(each.tokens)
            elif (
                asked.params.temperature == 0
                and each.tokens
                and not each.n_discarded
                and not each.cache.edited
            ):
                assert are_likeliest(self.model, asked.prompt, each.tokens)

    def close(self) -> None:
        """Nothing is left once the index has given up what it has."""
        index, kv = self.engine._loop.stepper._index, self.engine.context.kv
        index.clear()
        self.engine._loop.stepper._running_set.shortened.clear()
        while index.drop_point():
            pass
        assert [group.n_used for group in kv.groups] == [0] * len(kv.groups)
        assert not index._roots
        self.engine.close()

    def _ids(self, n: int) -> list[int]:
        return [self.rng.randrange(self.n_tokens) for _ in range(n)]

    def _lengths(self, asked: Sequence[tuple[float, int]], each: float = 0.0) -> list[int]:
        return [self.rng.randrange(most + 1) for _, most in asked]


def soak_of_few_cells(model: kvg.Model, seed: int, draft: Literal["ngram"] | kvg.Model | None) -> Soak:
    """n_ctx="auto" on a host that has room for few cells, and no overcommit."""
    for n_free in range(1_000_000, 20_000_000, 250_000):
        with (
            mock.patch.object(fitting, "host_free_bytes", lambda *_, n_free=n_free, **__: n_free),
            mock.patch.object(sizes, "host_free_bytes", lambda *_, n_free=n_free, **__: n_free),
            contextlib.suppress(kvg.DeviceError),
        ):
            soak = Soak(model, seed, False, draft, "auto")
            if soak.engine.context.n_ctx >= N_CTX:
                return soak
            soak.close()
    raise AssertionError("20 MB have no room for a cache")


def nodes_of(index: Any) -> Iterator[Node]:
    """Every node but the roots."""
    left = [child for root in index._roots.values() for child in root.children.values()]
    while left:
        node = left.pop()
        yield node
        left += node.children.values()


def are_likeliest(model: kvg.Model, prompt: list[int], said: Sequence[int]) -> bool:
    """Whether each token is the likeliest after those before it, in a context of their own.

    A ten-thousandth of the logits' range is rounding: random weights make close calls.
    """
    rows = rows_behind(model, prompt, said)
    chosen = rows[np.arange(len(said)), list(said)]
    return bool((rows.max(axis=1) - chosen <= 1e-4 * np.ptp(rows, axis=1)).all())


def logprob_of(model: kvg.Model, prompt: list[int], said: Sequence[int]) -> float:
    """The log probability of a text behind a prompt, in a context of their own."""
    rows = rows_behind(model, prompt, said).astype(np.float64)
    chosen = rows[np.arange(len(said)), list(said)]
    return float((chosen - np.logaddexp.reduce(rows, axis=1)).sum())


def rows_behind(model: kvg.Model, prompt: list[int], said: Sequence[int]) -> Logits:
    """The logits that each token of a text was chosen from, in a context of their own."""
    with kvg.Context(model, n_ctx=1024, **F32) as ctx:
        batch = kvg.Batch()
        batch.extend([*prompt, *said[:-1]], 0, logits="all")
        ctx.decode(batch)
        return ctx.logits()[len(prompt) - 1 :]


def has_faults() -> bool:
    """Whether this libkvgraph was built with KVGRAPH_TEST_HOOKS."""
    try:
        lib().kvg_test_fault(b"cells", 0)
    except kvg.UnsupportedError:
        return False
    return True
