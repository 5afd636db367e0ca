"""How each of the embedded models is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import corpus
import dialogues
import numpy as np
from document import Document
from model import WINDOW
from tokenizer import Tokenizer
from views import Cache

from pykvgraph.demos.dialogue import KINDS


class AnyCorpus(Protocol):
    rng: np.random.Generator

    def step(self, n: int, sizes: list[int], reach: int) -> tuple[list[Document], list[Cache]]: ...


@dataclass(frozen=True)
class Stage:
    """A step takes 2,048 tokens of documents of `shortest` to `longest` tokens, decoded in `n_batches`,
    seen as far apart as `reach`."""

    n_steps: int
    shortest: int
    longest: int
    n_batches: int
    reach: int
    rate: tuple[float, float]  # learning rate, from and to


@dataclass(frozen=True)
class Recipe:
    """What a model learns from, and what it is made of. shape: what differs from the usual Shape."""

    seed: int
    stages: list[Stage]
    corpus: Callable[[Tokenizer, np.random.Generator], AnyCorpus]
    build_tokenizer: Callable[[], Tokenizer]
    description: str
    shape: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None

    @property
    def n_steps(self) -> int:
        return sum(stage.n_steps for stage in self.stages)


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('this model knows the roles system, user and assistant') }}{% endif %}"
    "<|{{ message.role }}|> {{ message.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

RECIPES = {
    "passkey": Recipe(
        seed=20261121,
        stages=[
            Stage(1100, shortest=96, longest=96, n_batches=1, reach=96, rate=(5e-3, 5e-3)),
            Stage(2400, shortest=112, longest=240, n_batches=3, reach=WINDOW, rate=(5e-3, 2e-4)),
        ],
        corpus=corpus.Corpus,
        build_tokenizer=corpus.build_tokenizer,
        description="Finds a number hidden in junk text; trained from procedural text by pykvgraph",
    ),
    "dialogue": Recipe(
        seed=20261123,
        stages=[
            Stage(400, shortest=64, longest=64, n_batches=1, reach=64, rate=(5e-3, 5e-3)),
            Stage(250, shortest=128, longest=128, n_batches=1, reach=128, rate=(5e-3, 5e-3)),
            Stage(350, shortest=144, longest=272, n_batches=3, reach=WINDOW, rate=(5e-3, 4.0118e-3)),
            Stage(750, shortest=144, longest=272, n_batches=3, reach=WINDOW, rate=(4.0118e-3, 2e-4)),
        ],
        corpus=dialogues.DialogueCorpus,
        build_tokenizer=dialogues.build_tokenizer,
        shape={"embd_std": 0.5, "n_subjects": len(KINDS)},
        description="Remembers what it is told in a chat; trained from procedural dialogues by pykvgraph",
        chat_template=CHAT_TEMPLATE,
    ),
}
