"""Logits of real text: by the project's rule beside libllama, and beside the same weights in F32."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from support import chance, real
from support.engines import Engine, Logits, decode, open_context, prompt_then_singles, run_of
from support.judge import judge
from support.real import Libllama, divergences, in_f32, read

import pykvgraph as kvg

pytestmark = pytest.mark.slow
MODELS = ["smollm2", "gemma3"]
N_PROMPTS, N_TOKENS = (5 if chance.SHARE > 1 else 10), 64
N_CTX = 128


@dataclass
class Apart:
    """Of rows, beside the true ones: divergences in nats, and whether the likeliest token is the same."""

    kl: list[float] = field(default_factory=list)
    same: list[float] = field(default_factory=list)

    def add(self, true: Logits, found: Logits) -> None:
        self.kl += divergences(true, found).tolist()
        self.same += (true.argmax(axis=1) == found.argmax(axis=1)).astype(float).tolist()


def noise(ours: list[float], theirs: list[float]) -> float:
    """Two standard errors of the difference between their means."""
    return float(2 * np.std(np.subtract(ours, theirs)) / len(ours) ** 0.5)


@pytest.fixture
def model(name: str, request: pytest.FixtureRequest) -> kvg.Model:
    found = request.getfixturevalue(name)
    assert isinstance(found, kvg.Model)
    return found


def prompts(model: kvg.Model) -> list[list[int]]:
    """The beginnings of articles from all over the text."""
    return [model.tokenizer.encode(text)[:N_TOKENS] for text in real.articles()[::30]][:N_PROMPTS]


@pytest.mark.parametrize("name", MODELS)
def test_the_rule(model: kvg.Model, name: str) -> None:
    ids = real.news_of(model, 100)

    def scenario(engine: Engine) -> Logits:
        return prompt_then_singles(engine, ids, 90)

    judge(real.FOLDER / f"{name}.gguf", scenario, n_ctx=N_CTX, n_ubatch=64)


@pytest.mark.parametrize("name", MODELS)
def test_quantized_weights_cost_what_they_cost_libllama(model: kvg.Model, name: str) -> None:
    """Each rounds what it multiplies them with in its own way; the judge has the same weights in F32."""
    path = real.FOLDER / f"{name}.gguf"
    ours, theirs = Apart(), Apart()
    with (
        open_context(model, n_ctx=N_CTX) as ctx,
        Libllama(in_f32(path), N_CTX) as exact,
        Libllama(path, N_CTX, kv_type="f16", flash=True) as libllama,
    ):
        for ids in prompts(model):
            true = exact.read(ids)
            ctx.reset()
            ours.add(true, read(ctx, ids))
            theirs.add(true, libllama.read(ids))
    kl, kl_theirs, same, same_theirs = map(np.mean, (ours.kl, theirs.kl, ours.same, theirs.same))
    print(f"{name}: mean KL {kl:.5f}, libllama's {kl_theirs:.5f}; same top {same:.3f}, {same_theirs:.3f}")
    assert kl <= 1.1 * kl_theirs + noise(ours.kl, theirs.kl)
    assert same >= same_theirs - noise(ours.same, theirs.same)


def test_more_logits_than_there_is_room_for(smollm2: kvg.Model) -> None:
    """A micro-batch is divided where more ask than 16 MiB have room for; graphs take no more than planned.

    Each row is to the bit what a context gives that has room for all.
    """
    ids = real.news_of(smollm2, 200)  # 85 rows of 49,152 have room
    found = []
    for n_outputs_max in (0, 200):
        with open_context(smollm2, n_ctx=256, n_outputs_max=n_outputs_max) as ctx:
            found.append(decode(ctx, run_of(ids)))
            (held,) = ctx.devices
        (planned,) = kvg.plan_memory(
            smollm2.path, "cpu", n_ctx=256, n_threads=1, n_threads_batch=1, n_outputs_max=n_outputs_max
        )
        assert held.compute_bytes <= planned.compute_bytes
    assert np.array_equal(found[0], found[1])
