"""A text that changes: what is decoded for it, from first principles, and whether it is read rightly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.architectures import ArchSpec
from support.ctrl_c_at_a_line import ctrl_c_at
from support.engines import Logits, open_context, random_ids
from support.faults import fault
from support.judge import nmse
from support.models import N_VOCAB, SMALL, ModelSpec, write_model

import pykvgraph as kvg
from pykvgraph.sequence import sequence, tokens
from pykvgraph.sequence.sequence import EVERY, TokenSequence, checkpoint_cells, checkpoint_places

IDS = random_ids(400, N_VOCAB)
OTHER = random_ids(400, N_VOCAB, 1)
OPTIONS: dict[str, Any] = {"n_ctx": 400, "n_batch": 40, "n_ubatch": 16, "type_k": "f32", "type_v": "f32"}
WINDOW = 24
# none of which can go back but to checkpoints, beside the first
SPECS: list[ModelSpec | ArchSpec] = [
    SMALL,
    ArchSpec("gpt-oss", n_layer=4, n_expert=4, window=WINDOW),
    ArchSpec("gemma3", n_layer=3, window=WINDOW, period=4),  # no layer sees everything
    ArchSpec("qwen35", n_layer=4, period=4, state_heads=4),
    ArchSpec("lfm2", head_dim=16, n_layer=4, period=2, state_heads=1, n_taps=3, window=WINDOW),
]
PLAIN, STATES = SPECS[0], SPECS[3]


@pytest.fixture(scope="module", params=SPECS, ids=str)
def model(
    request: pytest.FixtureRequest,
    architecture: Callable[[ArchSpec], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[kvg.Model]:
    spec = request.param
    path = (
        architecture(spec) if isinstance(spec, ArchSpec) else write_model(spec, tmp_path_factory.mktemp("m"))
    )
    with kvg.Model(path, device="cpu") as model:
        yield model


@pytest.fixture(scope="module")
def delta_net(architecture: Callable[[ArchSpec], Path]) -> Iterator[kvg.Model]:
    assert isinstance(STATES, ArchSpec)
    with kvg.Model(architecture(STATES), device="cpu") as model:
        yield model


def n_alike(a: list[int], b: list[int]) -> int:
    """One by one, as nothing else counts it."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def opened(model: kvg.Model, **options: Any) -> kvg.Context:
    """Windows keep three checkpoints, and little else: texts are much longer than their groups."""
    return open_context(model, checkpoint_cells=checkpoint_cells(model, 3), **(OPTIONS | options))


def read_anew(model: kvg.Model, ids: list[int]) -> Logits:
    """The last token's logits in a context that reads nothing else."""
    with open_context(model, **OPTIONS) as ctx:
        for begin in range(0, len(ids), ctx.n_batch):
            batch = kvg.Batch()
            batch.extend(ids[begin : begin + ctx.n_batch], begin)
            last = ctx.decode_last(batch)
    return last


def held(ctx: kvg.Context) -> int:
    return ctx.kv.seq_pos_max(0) + 1


def test_an_edit_goes_back_to_where_it_was_announced(model: kvg.Model) -> None:
    """As a chat does: the last message begins at 150, and is edited there."""
    with opened(model) as ctx:
        text = TokenSequence(ctx)
        assert text.set(IDS[:200], at=(150,))[:3] == (0, 0, 200)
        for token in IDS[200:350]:
            text.append(int(token))
        assert (text.ids == IDS[:350]).all()
        edited = [*IDS[:150], *OTHER[:30]]
        change = text.set(edited, at=(150,))
        assert change[:3] == (150, 150, 30)
        assert (text.ids == edited).all()
        assert held(ctx) == 180
        assert nmse(change.last.logits, read_anew(model, edited)) <= 1e-6


def test_another_answer_takes_one_token(model: kvg.Model) -> None:
    with opened(model) as ctx:
        text = TokenSequence(ctx)
        first = text.set(IDS[:200]).last
        for _ in range(3):
            for token in OTHER[:150]:
                text.append(int(token), copy_logits=False)
            again = text.set(IDS[:200])
            assert again[:3] == (200, 199, 1)
            assert nmse(again.last.logits, first.logits) <= 1e-6


def test_a_conversation_that_grows_decodes_what_is_new(model: kvg.Model) -> None:
    with opened(model) as ctx:
        text = TokenSequence(ctx)
        n_held = 0
        for n in range(60, 360, 60):
            change = text.set(IDS[:n])
            assert change[:3] == (n_held, n_held, n - n_held)
            for token in IDS[n : n + 10]:
                text.append(int(token))
            n_held = n + 10
        assert nmse(text.set(IDS[:400]).last.logits, read_anew(model, IDS[:400])) <= 1e-6


def test_texts_that_part_anywhere(model: kvg.Model) -> None:
    """At random: what stays is the longest prefix that the cache has; the logits are those of the text."""
    rng = np.random.default_rng(0)
    plain = model.arch == "llama"
    with opened(model) as ctx:
        text = TokenSequence(ctx, every=64)
        now = list(IDS[:100])
        text.set(now)
        for _ in range(25):
            n_same = int(rng.integers(0, len(now) + 1))
            wanted = [*now[:n_same], *rng.integers(0, N_VOCAB, rng.integers(1, 60)).tolist()][:380]
            n_common = n_alike(wanted, now)
            above = [p for p in ctx.kv.checkpoints(0) if p <= min(n_common, len(wanted) - 1)]
            change = text.set(wanted)
            assert change.n_common == n_common
            assert change.n_decoded == len(wanted) - change.n_kept
            assert max(above, default=0) <= change.n_kept <= min(n_common, len(wanted) - 1)
            if plain:
                assert change.n_kept == min(n_common, len(wanted) - 1)
            now = wanted
            assert held(ctx) == len(now)
            assert nmse(change.last.logits, read_anew(model, now)) <= 1e-6


def test_deep_branches_find_the_checkpoint_before_them(delta_net: kvg.Model) -> None:
    with opened(delta_net) as ctx:
        text = TokenSequence(ctx, every=64)
        text.set(IDS[:300])
        assert ctx.kv.checkpoints(0) == [64, 128, 192, 256, 299]
        assert text.set([*IDS[:200], *OTHER[:50]])[:3] == (200, 192, 58)
        assert ctx.kv.checkpoints(0) == [64, 128, 192, 200, 249]
        # the next edit at the same place
        assert text.set([*IDS[:200], *OTHER[50:90]])[:3] == (200, 200, 40)


def test_plain_models_keep_no_checkpoints(small: kvg.Model) -> None:
    with opened(small) as ctx:
        TokenSequence(ctx).set(IDS[:200], at=(150,))
        assert ctx.kv.checkpoints(0) == []


def test_no_room_for_checkpoints(delta_net: kvg.Model) -> None:
    """Everything is decoded again then."""
    with opened(delta_net, checkpoint_bytes=0) as ctx:
        text = TokenSequence(ctx)
        text.set(IDS[:100], at=(50,))
        change = text.set([*IDS[:60], *OTHER[:10]])
        assert change[:3] == (60, 0, 70)
        assert nmse(change.last.logits, read_anew(delta_net, [*IDS[:60], *OTHER[:10]])) <= 1e-6


def test_resume_points_that_take_all_room(delta_net: kvg.Model) -> None:
    with opened(delta_net, n_seq_max=2) as ctx:
        batch = kvg.Batch()
        kept = []
        for i in range(8):
            batch.clear()
            batch.extend(IDS[i : i + 1], i, (1,))
            ctx.decode(batch)
            kept.append(ctx.kv.resume_point(1))
        text = TokenSequence(ctx)
        assert text.set(IDS[:100], at=(30, 50)).n_decoded == 100
        assert text.set(IDS[:110]).n_decoded == 10


def test_what_others_append_is_told(small: kvg.Model) -> None:
    with opened(small) as ctx:
        text = TokenSequence(ctx)
        text.set(IDS[:50])
        tokens = [piece.token for piece in kvg.generate(ctx, IDS[50:51], max_tokens=5)]
        text.record([int(IDS[50]), *tokens[:-1]])
        assert held(ctx) == 55
        wanted = [*IDS[:51], *tokens, 7]
        assert text.set(wanted)[:3] == (55, 55, 2)


def test_ctrl_c_right_after_a_decode(model: kvg.Model) -> None:
    """What was decoded is known, and isn't decoded again: a state could not go back by one token."""

    def interrupted(*arguments: Any) -> Any:
        real(*arguments)
        raise KeyboardInterrupt

    with opened(model) as ctx:
        text = TokenSequence(ctx)
        text.set(IDS[:100], at=(50,))
        real = ctx._handle.call
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ctx._handle, "call", interrupted)
            with pytest.raises(KeyboardInterrupt):
                text.append(7)
        assert (len(text), held(ctx)) == (100, 101)
        assert text.set([*IDS[:100], 7, 8])[:3] == (101, 101, 1)
        assert (
            nmse(text.set([*IDS[:100], 7, 8, 9]).last.logits, read_anew(model, [*IDS[:100], 7, 8, 9])) <= 1e-6
        )


@pytest.mark.parametrize(
    "work",
    [
        pytest.param(lambda text: text.append(9), id="append"),
        pytest.param(lambda text: text.set([*IDS[:40], *OTHER[:50]]), id="set"),
        pytest.param(lambda text: text.go_back(39), id="go_back"),
    ],
)
def test_ctrl_c_before_any_line(small: kvg.Model, work: Callable[[TokenSequence], object]) -> None:
    """And before that in an append, which decoded nothing: what the cells have is known, and stays."""

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    wanted, n_cut = [*IDS[:39], 7, 8], 0
    expected = read_anew(small, wanted)
    came = True
    while came:
        with opened(small) as ctx:
            text = TokenSequence(ctx)
            text.set(IDS[:40])
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ctx._handle, "call", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    text.append(7)
            came = ctrl_c_at(n_cut + 1, partial(work, text), sequence, tokens)
            n_cut += came
            change = text.set(wanted)
            assert change[:3] == (39, 39, 2)
            assert (text.ids == wanted).all()
            assert held(ctx) == 41
            assert nmse(change.last.logits, expected) <= 1e-6
    assert n_cut > 10


def test_a_sequence_that_others_cleared(small: kvg.Model) -> None:
    with opened(small) as ctx:
        text = TokenSequence(ctx)
        text.set(IDS[:50])
        ctx.kv.clear()
        assert text.set(IDS[:60])[:3] == (0, 0, 60)


def test_other_sequences_stay(model: kvg.Model) -> None:
    with opened(model, n_seq_max=2) as ctx:
        texts = TokenSequence(ctx, 0), TokenSequence(ctx, 1)
        texts[0].set(IDS[:100])
        texts[1].set(OTHER[:90])
        texts[0].set(IDS[:40])
        assert ctx.kv.seq_pos_max(1) == 89
        last = texts[1].set([*OTHER[:90], 5]).last
        assert nmse(last.logits, read_anew(model, [*OTHER[:90], 5])) <= 1e-6


def test_a_text_that_does_not_fit_changes_nothing(small: kvg.Model) -> None:
    with opened(small, n_ctx=100) as ctx:
        text = TokenSequence(ctx)
        text.set(IDS[:90])
        with pytest.raises(kvg.CacheFullError, match="110 tokens don't fit: 40 of them are in the cache"):
            text.set([*IDS[:40], *OTHER[:70]])
        assert held(ctx) == 90
        assert text.set([*IDS[:90], 3])[:3] == (90, 90, 1)
        assert text.set([*IDS[:40], *OTHER[:60]])[:3] == (40, 40, 60)


@pytest.mark.parametrize(
    "arguments",
    [{"ids": []}, {"ids": [1, N_VOCAB]}, {"ids": [1, -1]}, {"ids": "text"}, {"ids": [1, 2], "at": (3,)}],
    ids=str,
)
def test_what_is_refused_changes_nothing(small: kvg.Model, arguments: dict[str, Any]) -> None:
    with opened(small) as ctx:
        text = TokenSequence(ctx)
        text.set(IDS[:50])
        with pytest.raises(kvg.InvalidArgumentError):
            text.set(**arguments)
        assert held(ctx) == 50
        assert (text.ids == IDS[:50]).all()


def test_a_decode_that_fails_leaves_a_text_that_is_known(delta_net: kvg.Model) -> None:
    with opened(delta_net) as ctx:
        text = TokenSequence(ctx)
        text.set(IDS[:100], at=(70,))
        with fault("compute"), pytest.raises(kvg.DeviceError):
            text.set([*IDS[:70], *OTHER[:100]])
        assert held(ctx) == len(text.ids)
        wanted = [*IDS[:70], *OTHER[:100]]
        change = text.set(wanted)
        assert change.n_kept == 70
        assert nmse(change.last.logits, read_anew(delta_net, wanted)) <= 1e-6


def test_places_of_checkpoints() -> None:
    assert checkpoint_places(0, 1000, [0], EVERY) == [512, 999]
    assert checkpoint_places(0, 1025, [900], EVERY) == [512, 900, 1024]
    assert checkpoint_places(600, 1100, [600], EVERY) == [600, 1024, 1099]
    assert checkpoint_places(600, 1100, [550], EVERY) == [1024, 1099]
    assert checkpoint_places(0, 1, [0], EVERY) == []
