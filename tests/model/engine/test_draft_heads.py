"""Drafts by the model's own draft head (MTP): what is said stays the same, in fewer steps where they hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import where
from support.architectures import ArchSpec
from support.crafted_heads import crafted
from support.drafting import always_pays, said
from support.engines import random_ids
from support.models import N_VOCAB
from support.soak import F32

import pykvgraph as kvg
from pykvgraph.engine.admission import Admission
from pykvgraph.engine.speculation.draft_head import HeadDrafter

SPECS = [
    ArchSpec("qwen35", 4, period=4, state_heads=4, n_rot=8, n_head=8, draft_head=True),
    ArchSpec("glm4moe", n_rot=16, n_expert=8, n_ff_shared=96, biases=True, draft_head=True),
    ArchSpec("deepseek2", n_head_kv=1, rank=32, q_rank=48, n_expert=8, n_ff_shared=96, draft_head=True),
    ArchSpec("nemotron_h_moe", 6, state_heads=8, n_expert=8, n_ff_shared=48, n_latent=32, draft_head=True),
]


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts pay always, up to four tokens."""
    always_pays(monkeypatch)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_tokens_are_those_without_drafts(
    architecture: Callable[[ArchSpec], Path], spec: ArchSpec, eager: None
) -> None:
    path = architecture(spec)
    with kvg.Model(path, device=where.device) as plain:
        without, before = said(plain)
    assert before.drafts == 0
    with kvg.Model(path, device=where.device, draft_heads=True) as model:
        found, stats = said(model)  # by itself, as the head was loaded
        assert found == without
        assert stats.drafted > 0
        found, stats = said(
            model, n_ctx=160, overcommit=True, draft="mtp"
        )  # texts are preempted, and come back
        assert found == without
        assert stats.drafted > 0


@pytest.mark.parametrize("spec", SPECS[1:3], ids=str)  # with states, a text goes on from another place
def test_cells_of_the_head_come_back_from_tiers(
    architecture: Callable[[ArchSpec], Path], spec: ArchSpec, eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is drafted behind a text whose cells were needed is what is drafted where they never were."""
    made: list[list[list[int]]] = []
    drafts = HeadDrafter.drafts

    def heard(*arguments: Any) -> list[list[int]]:
        found = drafts(*arguments)
        made[-1] += found
        return found

    monkeypatch.setattr(HeadDrafter, "drafts", heard)
    text, params = random_ids(150, N_VOCAB, 1), kvg.SamplingParams(max_tokens=12, temperature=0.0)
    tiers = kvg.Tiers(ram="256M", disk=0)
    with kvg.Model(architecture(spec), device=where.device, draft_heads=True) as model:
        for n_other in (10, 480):
            made.append([])
            options: dict[str, Any] = {"n_ctx": 512, "n_seq_max": 1, "tiers": tiers, **F32}
            with kvg.Engine(model, background=False, **options) as engine:
                answer = engine.submit(text, params).result()
                engine.submit(random_ids(n_other, N_VOCAB, 2), params).result()
                made[-1].clear()
                later = [*text, *answer.tokens, 5]
                made[-1].append(list(engine.submit(later, params).result().tokens))
                stats = engine.stats().tiers
                assert stats is not None
                assert (stats.loaded_tokens > 100) == (n_other == 480)
    assert len(made[0]) > 3
    assert made[0] == made[1]


@pytest.mark.parametrize("n_ctx", [160, 640])
def test_room_for_drafts_is_told_without_a_look_at_all_cells(
    architecture: Callable[[ArchSpec], Path], eager: None, monkeypatch: pytest.MonkeyPatch, n_ctx: int
) -> None:
    """In a cache with ample room, and as a look would tell; a small one is looked at."""
    real, look = Admission.room_for_drafts, Admission._seen
    n_looks: list[int] = []

    def seen(*arguments: Any) -> Any:
        n_looks[-1] += 1
        return look(*arguments)

    def room(admission: Admission, *arguments: Any) -> int:
        n_looks.append(0)
        found, most = real(admission, *arguments), admission._n_ubatch
        monkeypatch.setattr(admission, "_n_ubatch", 1 << 30)
        n_looks.append(0)
        looked = real(admission, *arguments)
        assert n_looks.pop() == 1
        monkeypatch.setattr(admission, "_n_ubatch", most)
        assert min(found, most) == min(looked, most)
        return found

    monkeypatch.setattr(Admission, "_seen", seen)
    n_looks.append(0)  # of what admits texts
    monkeypatch.setattr(Admission, "room_for_drafts", room)
    with kvg.Model(architecture(SPECS[1]), device=where.device, draft_heads=True) as model:
        said(model, n_ctx=n_ctx, overcommit=n_ctx == 160)
    n_steps = len(n_looks) - 1
    assert n_steps > 20
    assert n_looks[1:].count(0) == (n_steps if n_ctx == 640 else 0)


def test_a_head_that_fails_costs_nobody_anything(
    architecture: Callable[[ArchSpec], Path], eager: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def draft(ctx: kvg.Context, texts: Any) -> list[list[int]]:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise kvg.DeviceError("broken")
        return real(ctx, texts)

    real = kvg.Context.draft
    path = architecture(SPECS[1])
    with kvg.Model(path, device=where.device) as plain:
        without, _ = said(plain)
    monkeypatch.setattr(kvg.Context, "draft", draft)
    with kvg.Model(path, device=where.device, draft_heads=True) as model:
        found, stats = said(model)
    assert found == without
    assert calls > 4 and stats.drafted > 0


def test_what_has_no_head_is_refused(architecture: Callable[[ArchSpec], Path]) -> None:
    with kvg.Model(architecture(SPECS[1]), device=where.device) as model:
        with pytest.raises(kvg.UnsupportedError, match="draft_heads=True"):
            kvg.Engine(model, n_ctx=256, draft="mtp")
        with pytest.raises(kvg.InvalidArgumentError, match='"ngram", "mtp", a'):
            kvg.Engine(model, n_ctx=256, draft="mpt")  # type: ignore[arg-type]


@pytest.mark.parametrize(("noise", "least", "most"), [(0.0, 1.0, 1.0), (0.02, 0.5, 0.95)])
def test_a_head_that_knows_the_model_saves_steps(
    architecture: Callable[[ArchSpec], Path],
    tmp_path: Path,
    eager: None,
    noise: float,
    least: float,
    most: float,
) -> None:
    """Of drafts of four tokens a share holds; without noise all, and a step says five tokens."""
    path = crafted(architecture(SPECS[1]), tmp_path / "crafted.gguf", noise)
    greedy, found, stats = kvg.SamplingParams(max_tokens=61, temperature=0.0), {}, {}
    for heads in (False, True):
        with (
            kvg.Model(path, device=where.device, draft_heads=heads) as model,
            kvg.Engine(model, n_ctx=512, n_seq_max=1, background=False, **F32) as engine,
        ):
            prompts = [random_ids(5, N_VOCAB, seed) for seed in range(4)]
            found[heads] = [engine.submit(prompt, greedy).result().tokens for prompt in prompts]
            stats[heads] = engine.stats()
    assert found[True] == found[False]
    rate = stats[True].accepted / stats[True].drafted
    assert least <= rate <= most
    n_without = stats[False].steps
    assert n_without == 4 * 61
    assert stats[True].steps == 4 * 13 if noise == 0.0 else stats[True].steps < 0.6 * n_without


DATA = Path(__file__).parents[2] / "data"
TRAINED = DATA / "stories260K-mtp.gguf"


def test_a_trained_head_guesses_most_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of one token. The first text is what llama2.c has said with these weights."""
    always_pays(monkeypatch, 1)
    prompts = ["", "The dog was", "Lily and Ben went to the", "One day, a big bear"]
    greedy = kvg.SamplingParams(max_tokens=100, temperature=0.0)
    with (
        kvg.Model(TRAINED, device=where.device, draft_heads=True) as model,
        kvg.Engine(model, n_ctx=512, n_seq_max=1, background=False, **F32) as engine,
    ):
        answers = [engine.submit(prompt, greedy).result() for prompt in prompts]
        stats = engine.stats()
    golden = (DATA / "stories260K.golden.txt").read_text()
    assert len(answers[0].text) > 200 and golden.startswith(answers[0].text.lstrip())
    assert stats.accepted >= 0.7 * stats.drafted
    assert stats.steps < 0.62 * 400
