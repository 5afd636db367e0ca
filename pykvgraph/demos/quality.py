"""What an operation on the cache costs: next tokens beside those of a text decoded as it is, and tasks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pykvgraph.checks import integer
from pykvgraph.context.batch import Batch
from pykvgraph.context.context import Context
from pykvgraph.demos.divergence import Divergence, diverged
from pykvgraph.demos.perplexity import Logits, Tokens, bos_of, estimate
from pykvgraph.demos.quality_cases import FULL, TEXT, Case, Passage
from pykvgraph.demos.quality_tasks import Probe, TaskText, WordSource, fitted
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.model.model import Model
from pykvgraph.params.params import ContextParams
from pykvgraph.sequence.decode_loop import generate

Shares: TypeAlias = npt.NDArray[np.float64]

N_NEXT = 200  # tokens that are predicted behind a text
LEAST_LENGTH = 16
N_PARTS = 64  # of which it is told how much of each is left
_FORK = 2  # the sequence of a question and its answer
_ROOM = 256  # cells beyond the text's and the next tokens': a sentence that is cut, and rounding up
_N_AT_ONCE = 64  # rows of logits: 67 MB of a vocabulary of 262,144


@dataclass(frozen=True)
class CaseResult:
    """What was measured of a case: means over trials, divergences in nats beside the case `full`.

    n_cells: cells that the text has, once it is read. kept: of each of 64 parts of the text, from its
    beginning to its end, the share of the positions that have a cell then. tasks: by name, the
    share of answers that were right; `erase` counts where the kept fact is known and the erased one isn't;
    erase_kept, erase_gone: each alone.
    """

    case: str
    policy: str
    n_cells: float
    kl_mean: float
    kl_median: float
    kl_99: float
    same_top: float
    perplexity: float
    kept: tuple[float, ...]
    tasks: dict[str, float]


@dataclass
class _Measured:
    """What is known of a case so far."""

    n_cells: list[int] = field(default_factory=list)
    kept: list[Shares] = field(default_factory=list)
    diverged: list[Divergence] = field(default_factory=list)
    scores: dict[str, list[float]] = field(default_factory=dict)

    def add(self, trial: _Measured) -> None:
        self.n_cells += trial.n_cells
        self.kept += trial.kept
        self.diverged += trial.diverged
        for name, scores in trial.scores.items():
            self.scores.setdefault(name, []).extend(scores)

    def result(self, case: Case) -> CaseResult:
        of = Divergence.joined(self.diverged)
        return CaseResult(
            case=case.text,
            policy=case.policy,
            n_cells=statistics.fmean(self.n_cells),
            kl_mean=float(of.kl.mean()),
            kl_median=float(np.median(of.kl)),
            kl_99=float(np.quantile(of.kl, 0.99)),
            same_top=float(of.same_top.mean()),
            perplexity=estimate(of.losses).value,
            kept=tuple(np.mean(self.kept, axis=0).tolist()),
            tasks={name: statistics.fmean(scores) for name, scores in self.scores.items()},
        )


class Quality:
    """A measurement of cases; `full`, which the others are compared with, is the first of them.

    text: where texts are taken from. tasks: names of TASKS. length: tokens of a text; of a task's, with its
    question and its answer. sizes: arguments of Context beside its sizes and types.

    Raises InvalidArgumentError for a text that is too short, for a case that is `asked` without tasks, and
    what Context raises.
    """

    def __init__(
        self,
        model: Model,
        text: str,
        cases: Sequence[Case],
        tasks: Sequence[str] = (),
        *,
        length: int = 1024,
        seed: int = 1,
        **sizes: Any,
    ) -> None:
        self.cases = [FULL, *(case for case in dict.fromkeys(cases) if case != FULL)]
        unasked = [case.text for case in self.cases if case.asked and not tasks]
        if unasked:
            raise InvalidArgumentError(
                f"{unasked[0]}: no task asks anything: give tasks, or leave out 'asked'"
            )
        self._model, self._tasks, self._seed = model, tasks, seed
        self._length = integer(length, "length", LEAST_LENGTH)
        self._sizes = sizes
        self._bos = bos_of(model)
        self._source = WordSource.of(text)
        self._ids = model.tokenizer.encode(text)[int(self._bos is not None) :]
        self._n_other = max(case.way.n_extra() for case in self.cases)
        least = self._length + N_NEXT + 1 + self._n_other
        if len(self._ids) < least:
            raise InvalidArgumentError(
                f"the text has {len(self._ids)} tokens, and texts of {length} with {N_NEXT} behind them need "
                f"{least}: give a longer one, or a smaller length"
            )
        self._measured = [_Measured() for _ in self.cases]

    def steps_of_trial(self) -> int:
        """How often run() says that something is done, in one trial."""
        return len(self.cases) * (1 + len(self._tasks))

    @property
    def n_trials(self) -> int:
        """Trials that were done."""
        return len(self._measured[0].n_cells)

    def run(self, n_trials: int, tick: Callable[[], None] = lambda: None) -> None:
        """So many trials more, each of other texts. tick: called when a case is done with one.

        A trial that is interrupted doesn't count.
        """
        first = self.n_trials
        with ExitStack() as stack:
            contexts: dict[tuple[str, str], Context] = {}
            for case in self.cases:
                types = case.type_k, case.type_v
                if types not in contexts:
                    contexts[types] = stack.enter_context(self._context(*types))
            for i in range(first, first + n_trials):
                trial = self._trial(i, [contexts[case.type_k, case.type_v] for case in self.cases], tick)
                for measured, new in zip(self._measured, trial, strict=True):
                    measured.add(new)

    def results(self) -> list[CaseResult]:
        """Of all trials so far, case by case. Raises InvalidArgumentError when there was none."""
        if not self.n_trials:
            raise InvalidArgumentError("there is no result: no trial was done")
        return [each.result(case) for each, case in zip(self._measured, self.cases, strict=True)]

    def _context(self, type_k: str, type_v: str) -> Context:
        return Context(
            self._model,
            n_ctx=self._length + self._n_other + N_NEXT + 1 + _ROOM,
            n_batch=max(1, min(ContextParams.n_batch, self._length // 4)),
            n_seq_max=_FORK + 1,
            type_k=type_k,
            type_v=type_v,
            swa_full=True,  # so that what windows have lost stops no case
            **self._sizes,
        )

    def _trial(self, i: int, contexts: Sequence[Context], tick: Callable[[], None]) -> list[_Measured]:
        found = [_Measured() for _ in self.cases]
        passage, nexts = self._passage(Random(f"{self._seed} {i}"))
        reference: Logits | None = None
        for case, ctx, measured in zip(self.cases, contexts, found, strict=True):
            ctx.reset()
            case.way.read(ctx, passage)
            measured.n_cells.append(ctx.kv.n_used)
            measured.kept.append(_kept(ctx, self._length))
            if reference is None:
                reference = np.concatenate([rows.copy() for rows in _rows_behind(ctx, nexts)])
                measured.diverged.append(diverged(reference, reference, nexts[1:]))
            else:
                measured.diverged.append(_compared(reference, ctx, nexts))
            tick()
        for name in self._tasks:
            text = fitted(name, self._source, f"{self._seed} {i} {name}", self._length, self._n_tokens)
            passage = self._passage_of(text)
            plain = [passage] * len(text.probes)
            with_questions = [self._with_question(passage, probe) for probe in text.probes]
            for case, ctx, measured in zip(self.cases, contexts, found, strict=True):
                passages = with_questions if case.asked else plain
                for score, value in self._asked(name, text, passages, case, ctx).items():
                    measured.scores.setdefault(score, []).append(value)
                tick()
        return found

    def _passage(self, rng: Random) -> tuple[Passage, Tokens]:
        """A text, and the tokens behind it: one more than are predicted."""
        front = [] if self._bos is None else [self._bos]
        n = self._length - len(front)
        begin = rng.randrange(len(self._ids) - n - N_NEXT)
        other = rng.randrange(len(self._ids) - self._n_other + 1)
        ids = [*front, *self._ids[begin : begin + n]]
        nexts = np.array(self._ids[begin + n : begin + n + N_NEXT + 1], np.int32)
        return Passage(ids, self._bos, self._ids[other : other + self._n_other]), nexts

    def _asked(
        self, name: str, text: TaskText, passages: Sequence[Passage], case: Case, ctx: Context
    ) -> dict[str, float]:
        """What is right of a task's answers. passages: what is read before each question, or with it."""
        scores = []
        there: Passage | None = None  # what the cache has
        for probe, passage in zip(text.probes, passages, strict=True):
            if passage is not there:
                ctx.reset()
                case.way.read(ctx, passage)
                there = passage
            ctx.kv.seq_cp(TEXT, _FORK, -1, -1)
            question = self._behind(probe.question)
            if case.asked:
                question = question[-1:]  # the rest of it was read with the text
            said = ""
            for piece in generate(ctx, question, seq=_FORK, max_tokens=text.n_answer):
                said += piece.text
                if all(answer.lower() in said.lower() for answer in probe.answers):
                    break  # whatever else is said
            ctx.kv.seq_rm(_FORK, -1, -1)
            scores.append(probe.score(said))
        if name == "erase":
            return {"erase": float(min(scores) == 1), "erase_kept": scores[0], "erase_gone": scores[1]}
        return {name: statistics.fmean(scores)}

    def _passage_of(self, text: TaskText) -> Passage:
        encode = self._model.tokenizer.encode
        if text.cut is None:
            return Passage(encode(text.text), self._bos, self._ids[: self._n_other])
        at, sentence = text.cut
        before = encode(text.text[:at])
        ids = [*before, *self._behind(text.text[at:])]
        return Passage(ids, self._bos, (), (len(before), self._behind(sentence)))

    def _with_question(self, passage: Passage, probe: Probe) -> Passage:
        """The text, and of the question all but the last token, with which an answer begins."""
        return replace(passage, ids=[*passage.ids, *self._behind(probe.question)[:-1]])

    def _behind(self, text: str) -> list[int]:
        """The tokens of a text that goes on another one."""
        return self._model.tokenizer.encode(text, False, add_space_prefix=False)

    def _n_tokens(self, text: TaskText) -> int:
        """With the longest question, and its answer."""
        questions = (len(self._behind(probe.question)) for probe in text.probes)
        return len(self._passage_of(text).ids) + max(questions) + text.n_answer


def _kept(ctx: Context, n: int) -> Shares:
    """Of the parts of the positions 0 to n - 1 the share that the text has cells at."""
    view = ctx.kv.cells()
    parts = np.arange(n) * min(N_PARTS, n) // n
    has = np.isin(np.arange(n), view.pos[view.seq[:, TEXT]])
    shares: Shares = np.bincount(parts, has) / np.bincount(parts)
    return shares


def _rows_behind(ctx: Context, nexts: Tokens) -> Iterator[Logits]:
    """Reads all but the last of `nexts` behind the text; the logits behind each, a view at a time."""
    batch = Batch()
    n_at_once = min(_N_AT_ONCE, ctx.n_batch)
    for begin in range(0, len(nexts) - 1, n_at_once):
        part = nexts[begin : min(begin + n_at_once, len(nexts) - 1)]
        batch.clear()
        batch.extend(part, ctx.kv.seq_pos_max(TEXT) + 1, (TEXT,), "all")
        ctx.decode(batch)
        yield ctx.logits_view()


def _compared(reference: Logits, ctx: Context, nexts: Tokens) -> Divergence:
    parts, at = [], 0
    for rows in _rows_behind(ctx, nexts):
        end = at + len(rows)
        parts.append(diverged(reference[at:end], rows, nexts[at + 1 : end + 1]))
        at = end
    return Divergence.joined(parts)
