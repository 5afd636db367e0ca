"""A conversation in one sequence: no turn decodes what the cache has, and old turns go when it is full."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from pykvgraph.chat.saved import Saved, pack, unpack
from pykvgraph.chat.turn_format import turn_format
from pykvgraph.chat.turn_tokens import Discard, Turn, TurnTokens
from pykvgraph.checks import integer, shown
from pykvgraph.context.cell_scores import checked_policy
from pykvgraph.context.common_length import common_length
from pykvgraph.context.context import Context, LastOutput
from pykvgraph.context.forgetting import n_at_once
from pykvgraph.context.second_reading import require_policy
from pykvgraph.errors import CacheFullError, InvalidArgumentError, KVGraphError, NotCopied, UnsupportedError
from pykvgraph.kv_cache.saved.file import read_regular, write_file
from pykvgraph.params.params import SamplingParams
from pykvgraph.sequence.decode_text import decode_text
from pykvgraph.sequence.lookahead import Lookahead
from pykvgraph.sequence.output_text import OutputText
from pykvgraph.sequence.sequence import Change, TokenSequence, earlier_texts
from pykvgraph.sequence.tokens import Positions
from pykvgraph.types import ForgetReport, Piece


class Conversation(NotCopied):
    """A system prompt and turns, each a message and its answer, in sequence `seq` of a context.

    ask() answers a message; an answer comes piece by piece. Turns are written as the model's chat template
    says (TurnFormat). Only what is new is decoded: for a new message the end of the last answer and the
    message, for another answer (regenerate) one token, for another message (edit) that message. Models with
    windows or recurrent layers keep checkpoints for that: give the context checkpoint_cells(model).

    When the cache is full, whole turns are given up, the oldest first, until at least n_discard tokens are
    free (None: half of what isn't kept). The first n_keep tokens are kept, and the turn in which they end;
    None: the system prompt. The turns that stay move down (a context shift) and are not decoded again, unless
    the model refuses it. When the turn that is being answered is the only one left, its oldest tokens go.
    on_discard is called with a Discard each time; it must leave the conversation as it is.

    forget: a policy (context.cell_scores.POLICIES), but for "kvzip". When the cache is full, the cells that
    matter least are forgotten then, 128 at a time or half of those that may be, and on_forget is called with
    a ForgetReport.
    Turns are given up where no cell may be forgotten any more, and before a position would go beyond those
    that the model was trained on. Not with self_extend.

    self_extend: with N above 1 the context may have N times as many cells as the model was trained on. Before
    a position would go beyond that number, every N neighbouring tokens of the oldest turns are put on one
    position (arXiv:2401.01325), whole turns at a time, and the system prompt never; on_extend is called with
    the number of tokens. Only when no cell is free, turns are given up.

    In a context with one sequence, what the conversation takes leave of stays in the cache for as long as
    nobody needs the cells: to take an edit back, or an earlier system prompt, decodes one token.

    draft: a context of a smaller model with the same vocabulary, whose sequence 0 is used: what it proposes,
    up to draft_max tokens, is decoded beside the next token, and what is said stays the same (Lookahead). Not
    with self_extend.

    An answer may be left at any piece, and any call be interrupted by Ctrl-C: what was said stays, and the
    conversation can go on.

    change: what the last prompt took; None before the first. n_forgotten: number of turns that were given up.

    The sequence belongs to this object. Raises UnsupportedError for an encoder, for a model without a
    tokenizer, and for a policy that can't be used with this context, and InvalidArgumentError for a chat
    template that can't be used and for any bad argument.
    """

    def __init__(
        self,
        ctx: Context,
        *,
        system: str = "",
        seq: int = 0,
        n_keep: int | None = None,
        n_discard: int | None = None,
        self_extend: int = 1,
        on_discard: Callable[[Discard], None] | None = None,
        on_extend: Callable[[int], None] | None = None,
        draft: Context | Literal["mtp"] | None = None,
        draft_max: int = 16,
        forget: str | None = None,
        on_forget: Callable[[ForgetReport], None] | None = None,
    ) -> None:
        if not isinstance(ctx, Context):
            raise InvalidArgumentError(f"ctx must be a pykvgraph.Context, got {shown(ctx)}")
        ctx.model._require_whole()
        self._ctx = ctx
        self._seq = integer(seq, "seq", 0, ctx.n_seq_max - 1)
        self._n_keep = None if n_keep is None else integer(n_keep, "n_keep", 0)
        self._n_discard = None if n_discard is None else integer(n_discard, "n_discard", 1)
        self._n_grp = integer(self_extend, "self_extend", 1)
        self._on_discard = on_discard
        self._on_extend = on_extend
        self._forget = None if forget is None else checked_policy(forget, repeats=False)
        self._on_forget = on_forget
        if self._forget and self._n_grp > 1:
            raise InvalidArgumentError("forget: nothing is forgotten with self_extend: leave one of them out")
        if self._forget:
            require_policy(ctx, self._forget)
        self._earlier = earlier_texts(ctx) if ctx.n_seq_max == 1 else None
        self._text = TokenSequence(ctx, self._seq, earlier=self._earlier)
        if draft is not None and self._n_grp > 1:
            raise InvalidArgumentError("draft: there are no drafts with self_extend: leave one of them out")
        self._lookahead = None if draft is None else Lookahead(ctx, self._seq, draft, draft_max)
        self._turns: list[Turn] = []
        self._output: OutputText | None = None  # the answer that is being said
        self.n_forgotten = 0
        self.change: Change | None = None
        self.system = system

    @property
    def system(self) -> str:
        """The system prompt, "" for none. A new one keeps the turns; all is decoded again at the next."""
        return self._system

    @system.setter
    def system(self, text: str) -> None:
        if not isinstance(text, str):
            raise InvalidArgumentError(f"system must be a text, got {shown(text)}")
        tokens = TurnTokens(turn_format(self._ctx.model, text), self._ctx.model.tokenizer)
        turns = [
            replace(tokens.turn(turn.user, is_first=i == 0), said=turn.said)
            for i, turn in enumerate(self._turns)
        ]
        self._output = None
        self._system, self._tokens, self._front, self._turns = text, tokens, tokens.front, turns

    @property
    def is_plain(self) -> bool:
        """Whether the model has no chat template, and turns are lines of User: and Assistant:."""
        return self._tokens.format.is_plain

    @property
    def turns(self) -> list[tuple[str, str]]:
        """The messages and answers that were not given up."""
        return [(turn.user, self._tokens.text_of(turn.said)) for turn in self._turns]

    @property
    def ids(self) -> list[int]:
        """The tokens of the whole conversation; those of the last answer's end may not be decoded yet."""
        return list(itertools.chain(self._front, *self._turn_ids()))

    @property
    def borders(self) -> list[int]:
        """Where each turn begins in `ids`, and where the last one ends."""
        return list(itertools.accumulate(map(len, self._turn_ids()), initial=len(self._front)))

    @property
    def turn_positions(self) -> list[int]:
        """The position where each turn begins."""
        return [self._text.positions.of(n) for n in self.borders[:-1]]

    def ask(self, message: str, params: SamplingParams) -> Iterator[Piece]:
        """Answers a message; the conversation has it when the first piece is asked for.

        params.stop: texts that end the answer, beside those of the format. Raises at once
        InvalidArgumentError for a bad argument; in the iteration what Context.decode raises, KVGraphError
        when the logits are broken, and CacheFullError when nothing can be given up: the conversation is
        without the new turn then, if nothing of the answer was said.
        """
        return self._answered([*self._turns, self._new_turn(message, len(self._turns))], params)

    def regenerate(self, params: SamplingParams) -> Iterator[Piece]:
        """Another answer to the last message, as ask(). Raises InvalidArgumentError when there is none."""
        *before, last = self._require_turns()
        whole = self._new_turn(last.user, len(before))
        is_cut = len(last.prompt) < len(whole.prompt)  # the front of it was given up
        turn = whole if is_cut else replace(last, prompt=[*last.prompt], said=[])
        return self._answered([*before, turn], params)

    def edit(self, message: str, params: SamplingParams) -> Iterator[Piece]:
        """Answers another message in place of the last; as regenerate()."""
        *before, _ = self._require_turns()
        return self._answered([*before, self._new_turn(message, len(before))], params)

    def reset(self) -> None:
        """Forgets all turns; the system prompt stays in the cache."""
        self._take_back_drafts()
        self._output = None
        self._front, self._turns, self.n_forgotten = self._tokens.front, [], 0
        self._text.go_back(common_length(self._text.ids, self._front))
        if self._earlier is not None:
            self._earlier.clear()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the conversation and its cells into a file: the old file or the whole new one.

        Raises what kv.save_file raises.
        """
        self._take_back_drafts()
        cells = self._ctx.kv.save(self._seq)
        held = self._text.ids.tolist()
        head = self._text.positions.head
        saved = Saved(self._system, self._front, self._turns, self.n_forgotten, held, head, cells)
        write_file(path, pack(saved))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Goes on with the conversation that save() wrote, of the same model; nothing is decoded again.

        Raises, with nothing changed, StateError for a file that is no saved conversation, is damaged or of
        another model, and what kv.load raises; OSError when the file can't be read.
        """
        self._take_back_drafts()
        saved = unpack(read_regular(path), self._ctx.model.n_vocab)
        tokens = TurnTokens(turn_format(self._ctx.model, saved.system), self._ctx.model.tokenizer)
        if self._earlier is not None:
            self._earlier.clear()  # the file may need the cells
        before = self._text
        # knows nothing while cells are replaced
        self._text = TokenSequence(self._ctx, self._seq, earlier=self._earlier)
        try:
            self._ctx.kv.load(saved.cells, seq=self._seq)
        except Exception:
            self._text = before
            raise
        self._output, self._system, self._tokens, self._front = None, saved.system, tokens, saved.front
        self._turns, self.n_forgotten = saved.turns, saved.n_forgotten
        positions = Positions(saved.head)
        if self._ctx.kv.seq_pos_max(self._seq) + 1 == positions.of(len(saved.held)):
            self._text.record(saved.held, positions)
            self._text.find_forgotten()

    def _new_turn(self, message: str, n_before: int) -> Turn:
        return self._tokens.turn(message, is_first=n_before + self.n_forgotten == 0)

    def _require_turns(self) -> list[Turn]:
        if not self._turns:
            raise InvalidArgumentError("there is no message yet: ask() something first")
        return self._turns

    def _answered(self, turns: list[Turn], params: SamplingParams) -> Iterator[Piece]:
        if not isinstance(params, SamplingParams):
            raise InvalidArgumentError(f"params must be a SamplingParams, got {shown(params)}")
        stop = (*params.stop, *self._tokens.format.stop)
        output = OutputText(replace(params, stop=stop), self._ctx.model.tokenizer, self._seq)
        return self._said(self._turns, turns, output)

    def _said(self, old: list[Turn], turns: list[Turn], output: OutputText) -> Iterator[Piece]:
        if self._turns is not old:
            raise InvalidArgumentError("the conversation went on before this answer was begun: ask again")
        before = self._front, self._turns, self.n_forgotten
        self._turns, self._output = turns, output
        try:
            self.change = self._read()
        except KVGraphError:
            self._front, self._turns, self.n_forgotten = before
            raise
        turn, text = turns[-1], ""

        def append(piece: Piece, _: None) -> LastOutput | None:
            if piece.finish_reason is not None or self._output is not output:
                return None
            return self._append(piece.token, copy_logits=output.needs_logits)

        try:
            for piece in decode_text(self.change.last, output.say, append):
                text += piece.text
                if piece.finish_reason != "stop":
                    turn.said.append(piece.token)
                elif not self._ctx.model.tokenizer.is_eog(piece.token):
                    turn.said = self._tokens.cut([*turn.said, piece.token], text)
                yield piece
        finally:
            if self._output is output:
                self._take_back_drafts()

    def _append(self, token: int, copy_logits: bool) -> LastOutput:
        """Decodes a token that the last turn has already."""
        is_far = self._text.positions.of(len(self._text)) >= self._ctx.model.n_ctx_train
        if self._lookahead and not (is_far and self._forget):
            last = self._lookahead.append(lambda: self._text.ids, token, lambda: self._ctx.kv.n_free)
            if last is not None:
                self._text.record([token])
                return last
        if not is_far or (self._n_grp == 1 and self._forget is None):
            try:
                return self._text.append(token, copy_logits=copy_logits)
            except CacheFullError:
                self._make_room()
        return self._read().last

    def _read(self) -> Change:
        """Decodes what is not in the cache yet; extends, and gives up turns, until all fits."""
        self._take_back_drafts()
        while True:
            ids, at = self.ids, self.borders[-2] + self._turns[-1].n_header
            if self._forget and len(ids) > self._ctx.model.n_ctx_train:
                self._give_up()
                continue
            try:
                if self._n_grp > 1:
                    self._extend(ids)
                return self._text.set(ids, (at,) if 0 < at <= len(ids) else ())
            except CacheFullError:
                self._make_room()

    def _make_room(self) -> None:
        """Forgets cells, or gives up turns."""
        report = self._text.forget_some(n_at_once, self._forget) if self._forget else None
        if report is None:
            self._give_up()
        elif self._on_forget is not None:
            self._on_forget(report)

    def _take_back_drafts(self) -> None:
        """The cache has what the conversation has, and nothing that was not said."""
        if self._lookahead:
            self._lookahead.drop()

    def _extend(self, ids: list[int]) -> None:
        """Groups the oldest tokens until these ids find positions that the model was trained on."""
        limit = self._ctx.model.n_ctx_train
        n_held = common_length(self._text.ids, ids)
        while self._text.positions.of(n_held) + len(ids) - n_held > limit:
            self._text.go_back(n_held)
            begin = max(len(self._front), len(self._text.positions.head))
            borders = [border for border in self.borders[:-1] if begin < border <= n_held]
            # of the last turn, the newest tokens keep positions of their own
            far = [border for border in borders if border - begin >= limit // 8]  # not each turn by itself
            end = min(far, default=max(borders, default=n_held - limit // 4))
            if end - begin < self._n_grp:
                raise CacheFullError(f"{len(ids)} tokens need more positions than the model was trained on")
            self._text.group(begin, end, self._n_grp)
            if self._on_extend is not None:
                self._on_extend(end - begin)

    def _give_up(self) -> None:
        """Removes the oldest turns, or the oldest part of the only one, from the list and from the cache.

        From the list first: should Ctrl-C come between, what is left is decoded again.
        """
        ids, borders = self.ids, self.borders
        begin, n_kept, n_until = self._to_be_given_up(borders)
        end = borders[n_until]
        if end <= begin:
            begin = max(begin, self._kept())
            end = begin + min(self._n_discard or max((len(ids) - begin) // 2, 1), len(ids) - begin - 1)
            positions = self._text.positions  # tokens that share one go together
            begin, end = (positions.first_at(positions.of(n)) for n in (begin, end))
            if end <= begin:
                raise CacheFullError(
                    f"{len(ids)} tokens don't fit into the cache, and the first {begin} are to be kept: "
                    "nothing can be given up. Lower n_keep, shorten the system prompt, or use a larger n_ctx"
                )
            self._cut_last(begin - borders[-2], end - borders[-2])
        else:
            self._front = self._front[:begin]
            del self._turns[n_kept:n_until]
        self.n_forgotten += n_until - n_kept
        report = self._discarded(ids, begin, end, n_until - n_kept)
        if self._on_discard is not None:
            self._on_discard(report)

    def _kept(self) -> int:
        return len(self._front) if self._n_keep is None else self._n_keep

    def _to_be_given_up(self, borders: list[int]) -> tuple[int, int, int]:
        """From which token on; how many turns stay before it; and how many are before the next that stays."""
        n_before_last = len(self._turns) - 1
        n_kept = sum(begin < self._kept() for begin in borders[:n_before_last])
        begin = min(borders[n_kept], max(self._kept(), 0)) if n_kept == 0 else borders[n_kept]
        n_discard = self._n_discard or max((borders[-1] - begin) // 2, 1)
        n_until = n_kept
        while n_until < n_before_last and borders[n_until] - begin < n_discard:
            n_until += 1
        return begin, n_kept, n_until

    def _cut_last(self, begin: int, end: int) -> None:
        """Removes tokens of the last turn: of its prompt, then of its answer."""
        turn = self._turns[-1]
        n_prompt = len(turn.prompt)
        turn.n_header -= min(turn.n_header, end) - min(turn.n_header, begin)
        del turn.prompt[begin:end]
        del turn.said[max(begin - n_prompt, 0) : max(end - n_prompt, 0)]

    def _discarded(self, ids: list[int], begin: int, end: int, n_turns: int) -> Discard:
        """Removes the tokens [begin, end) of these ids from the cache, if they are there."""
        if end > common_length(self._text.ids, ids) or end >= len(self._text):
            return Discard(n_turns, end - begin, None)
        try:
            return Discard(n_turns, end - begin, self._text.discard(begin, end).stats)
        except UnsupportedError as error:
            return Discard(n_turns, end - begin, None, str(error))
        except CacheFullError:  # cells that checkpoints keep, too, would have to be copied
            return Discard(n_turns, end - begin, None)

    def _turn_ids(self) -> list[list[int]]:
        """The tokens of each turn; all but the last with what closes them."""
        *before, last = self._turns or [Turn("", [], 0)]
        closing = self._tokens.closing
        closed = [[*turn.prompt, *turn.said, *closing] for turn in before]
        return [*closed, [*last.prompt, *last.said]] if self._turns else []
