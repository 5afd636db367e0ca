"""A chat: messages and commands in, answers out."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pykvgraph.cli.chat_input import Input
from pykvgraph.cli.chat_page import Page
from pykvgraph.cli.show import speed_text
from pykvgraph.errors import InvalidArgumentError, KVGraphError
from pykvgraph.params.params import MAX_SEED, SamplingParams

if TYPE_CHECKING:
    from pykvgraph.chat import Conversation, Discard
    from pykvgraph.context.context import Context
    from pykvgraph.types import ForgetReport, Piece

COMMANDS = {
    "/regen": "another answer to the last message",
    "/edit [TEXT]": "another message in place of the last; without TEXT, the last one to edit",
    "/system [TEXT]": 'another system prompt, "" for none; without TEXT, shows it',
    "/cells": "a map of the cells",
    "/save FILE": "writes the conversation and its cells",
    "/load FILE": "goes on with a conversation that was written",
    "/reset": "forgets all turns, not the system prompt",
    "/help": "this list",
    "/quit": "ends; so does Ctrl-D, and Ctrl-C twice",
}
_NAMES = {usage.split()[0] for usage in COMMANDS}


class Talk:
    """Handles one line after the other.

    params: of all answers; the seed is that of the first one, and each next answer's is one more. is_piped:
    an error ends the talk then, and so does a word that looks like a command and is none.
    """

    def __init__(
        self,
        ctx: Context,
        conversation: Conversation,
        page: Page,
        input: Input,
        params: SamplingParams,
        *,
        is_piped: bool,
    ) -> None:
        self._ctx = ctx
        self._conversation = conversation
        self._page = page
        self._input = input
        self._params = params
        self._is_piped = is_piped
        self._n_answers = 0

    def handle(self, line: str) -> bool:
        """Answers a message or does what a command says; whether the talk goes on."""
        name, _, rest = line.partition(" ")
        if name == "/quit":
            return False
        try:
            if name in _NAMES:
                getattr(self, f"_{name[1:]}")(rest.strip())
            elif name.startswith("/"):
                raise InvalidArgumentError(f"there is no {name}; /help lists what there is")
            else:
                self._answer(self._conversation.ask(line, self._next_params()))
        except KeyboardInterrupt:
            self._page.end()
            if self._is_piped:
                raise
            self._page.note("stopped")
        except (KVGraphError, OSError) as error:
            self._page.end()
            if self._is_piped:
                raise
            self._page.note(" ".join(str(error).split()))
        return True

    def discarded(self, report: Discard) -> None:
        """Says what was given up."""
        self._page.note(discard_text(report))
        if report.reason:
            self._page.note(report.reason)

    def forgotten(self, report: ForgetReport) -> None:
        """Says how many cells were forgotten."""
        self._page.note(f"cells full: {report.n_cells} forgotten, {report.n_left} left")

    def extended(self, n_tokens: int) -> None:
        """Says that so many tokens share positions now."""
        self._page.note(f"trained context full: {n_tokens} old tokens share positions")

    def _next_params(self) -> SamplingParams:
        seed = ((self._params.seed or 0) + self._n_answers) % (MAX_SEED + 1)
        self._n_answers += 1
        return dataclasses.replace(self._params, seed=seed)

    def _answer(self, pieces: Iterator[Piece]) -> None:
        started = time.perf_counter()
        n, first, reason = 0, 0.0, None
        stopped = False
        try:
            for piece in pieces:
                n += 1
                first = first or time.perf_counter() - started
                self._page.write(piece.text)
                reason = piece.finish_reason
        except KeyboardInterrupt:
            if self._is_piped:
                raise
            stopped = True
        finally:
            self._page.end()
        seconds = time.perf_counter() - started
        told = f"{speed_text(n, first, seconds)}; {self._n_cells()} of {self._ctx.kv.n_cells} cells"
        how = "stopped; " if stopped else f"cut off at {n} tokens; " if reason == "length" else ""
        self._page.note(how + told)

    def _regen(self, _text: str) -> None:
        self._answer(self._conversation.regenerate(self._next_params()))

    def _edit(self, text: str) -> None:
        if not text and self._conversation.turns:
            edited = self._input.read(self._conversation.turns[-1][0])
            if edited is None:
                self._page.note("the message stays")
                return
            text = edited
        self._answer(self._conversation.edit(text, self._next_params()))

    def _system(self, text: str) -> None:
        if not text:
            self._page.show(self._conversation.system or "There is no system prompt.")
            return
        self._conversation.system = "" if text == '""' else text
        if self._conversation.turns:
            self._page.note("the conversation is decoded again with the next answer")

    def _cells(self, _text: str) -> None:
        self._page.show_map(self._ctx.kv.cell_map())

    def _save(self, path: str) -> None:
        path = _file(path)
        self._conversation.save(path)
        self._page.note(f"{_turns(len(self._conversation.turns))} in {path}")

    def _load(self, path: str) -> None:
        path = _file(path)
        self._conversation.load(path)
        turns = _turns(len(self._conversation.turns))
        self._page.note(f"{turns} from {path}: {self._n_cells()} tokens, none decoded again")

    def _n_cells(self) -> int:
        """How many cells the conversation has; others may be held for what it has taken leave of."""
        return int(self._ctx.kv.seq_bounds().n_cells.sum())

    def _reset(self, _text: str) -> None:
        self._conversation.reset()
        self._page.note("all turns are forgotten")

    def _help(self, _text: str) -> None:
        width = max(map(len, COMMANDS))
        for usage, meaning in COMMANDS.items():
            self._page.show(f"{usage:{width}}  {meaning}")
        if not self._is_piped:
            self._page.show("Alt-Enter, or a backslash at the end: another line. Ctrl-C stops an answer.")


def discard_text(report: Discard) -> str:
    """What was given up, in one line."""
    turns = _turns(report.n_turns) if report.n_turns else "a part of this turn"
    how = f"{report.stats}" if report.stats else "what is left is decoded again"
    return f"context full: {turns} given up, {report.n_tokens} tokens; {how}"


def _file(path: str) -> str:
    if not path:
        raise InvalidArgumentError("which file? Say its name behind the command")
    return os.path.expanduser(path)


def _turns(n: int) -> str:
    return f"{n} turn{'s' * (n != 1)}"
