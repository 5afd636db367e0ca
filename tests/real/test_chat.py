"""Conversations with SmolLM2: what libllama would say to the same text, and on past a full cache.

The weights are in F32. Beside Q4_1 activations are rounded, and two orders of the same sums differ by tenths
of a logit.
"""

from __future__ import annotations

from typing import Any

import pytest
from support.engines import open_context
from support.real import Libllama, prompt_of
from support.talk import require_rows_of

import pykvgraph as kvg
from pykvgraph.chat import Conversation, Discard
from pykvgraph.sequence.sequence import checkpoint_cells

pytestmark = pytest.mark.slow
SYSTEM = "You are a helpful assistant. Answer in one sentence."
MESSAGES = [
    "What is the capital of France?",
    "And which river runs through it?",
    "Name three animals that live in a river.",
    "Which of them is the largest?",
]
EXACT: dict[str, Any] = {"type_k": "f32", "type_v": "f32", "flash_attn": "off"}
GREEDY = kvg.SamplingParams(max_tokens=24)
TIE = 0.01  # of logits that span 40


def said(conversation: Conversation, message: str) -> list[int]:
    """The tokens of the answer."""
    return [piece.token for piece in conversation.ask(message, GREEDY)]


def test_answers_are_those_to_the_same_text_read_anew(smollm2_f32: kvg.Model, libllama_f32: Libllama) -> None:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}]
    with open_context(
        smollm2_f32, n_ctx=1024, checkpoint_cells=checkpoint_cells(smollm2_f32), **EXACT
    ) as ctx:
        conversation = Conversation(ctx, system=SYSTEM)
        for message in MESSAGES:
            messages.append({"role": "user", "content": message})
            prompt = libllama_f32.model.encode(prompt_of(smollm2_f32, messages), parse_special=True)
            answer = said(conversation, message)
            assert libllama_f32.behind(prompt, answer).max() <= TIE
            messages.append({"role": "assistant", "content": conversation.turns[-1][1]})
            assert conversation.change is not None
            assert conversation.change.n_decoded < 40  # of the prompt: what was said is in the cache


def test_a_full_cache_goes_on(smollm2_f32: kvg.Model) -> None:
    """Turns are given up; K of what is left is at its new positions, and a question is answered as before."""
    discards: list[Discard] = []
    with open_context(smollm2_f32, n_ctx=192, **EXACT) as ctx:
        conversation = Conversation(ctx, system=SYSTEM, on_discard=discards.append)
        for message in [*MESSAGES, *MESSAGES, *MESSAGES, MESSAGES[0]]:
            said(conversation, message)
            if discards:
                require_rows_of(conversation, ctx, smollm2_f32)
    assert len(discards) >= 2
    assert all(each.stats is not None and each.stats.shifted_cells for each in discards)
    answers = dict(conversation.turns)  # the last to each message
    assert "Paris" in answers[MESSAGES[0]]
