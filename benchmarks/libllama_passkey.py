"""The passkey task through libllama: its cache, its shift, and its self-extend.

libllama's self-extend rotates K in the wrong direction.
"""

from __future__ import annotations

import re

import numpy as np

import pykvgraph as kvg
from pykvgraph.bench.libllama import LibllamaContext
from pykvgraph.demos.passkey import N_ANSWER, QUESTION, Task, document_of


class LibllamaPasskey:
    """The task in a context of libllama; tokens are those of `model`, so that both read the same."""

    def __init__(self, context: LibllamaContext, model: kvg.Model, n_ctx: int, n_batch: int) -> None:
        self._context, self._our_model, self._tokenizer = context, model, model.tokenizer
        self._n_batch, self._n_ctx = n_batch, n_ctx

    def run(self, task: Task) -> bool:
        """Whether the key was found."""
        document, _ = document_of(self._our_model, task)
        question = self._tokenizer.encode(QUESTION, add_special=False)
        self._context.clear()
        self._n_used = 0
        for begin in range(0, len(document), self._n_batch):
            part = document[begin : begin + self._n_batch]
            self._make_room(task, len(part))
            p0 = self._n_past()
            self._decode(part)
            if task.n_grp > 1 and begin + self._n_batch < len(document):
                # on a multiple of n_grp first, as llama.cpp's example does
                lift = p0 * (task.n_grp - 1)
                self._context.seq_add(0, p0, p0 + len(part), lift)
                self._context.seq_div(0, p0 + lift, p0 + lift + len(part), task.n_grp)
        self._make_room(task, len(question) + N_ANSWER)
        for begin in range(0, len(question), self._n_batch):
            self._decode(question[begin : begin + self._n_batch])
        answer = self._answer()
        digits = re.match(r"\d+", answer.strip())
        return digits is not None and digits[0] == task.drawn()[0]

    def _answer(self) -> str:
        """Greedy, up to a full stop."""
        ids: list[int] = []
        while len(ids) < N_ANSWER and "." not in self._tokenizer.decode(ids):
            token = int(np.argmax(self._context.logits()[-1]))
            if self._tokenizer.is_eog(token):
                break
            ids.append(token)
            self._decode([token])
        return self._tokenizer.decode(ids)

    def _n_past(self) -> int:
        return self._context.seq_pos_max(0) + 1

    def _make_room(self, task: Task, n_tokens: int) -> None:
        n_discard = -(-self._n_batch // task.n_grp)
        while self._n_ctx - self._n_used < n_tokens:
            end = task.n_keep + n_discard
            self._n_used -= n_discard * task.n_grp
            self._context.seq_rm(0, task.n_keep, end)
            self._context.seq_add(0, end, -1, -n_discard)

    def _decode(self, ids: list[int]) -> None:
        last = self._n_past() + len(ids) - 1
        self._context.decode((token, pos, (0,), pos == last) for pos, token in enumerate(ids, self._n_past()))
        self._n_used += len(ids)
