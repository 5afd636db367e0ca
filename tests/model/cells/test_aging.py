"""Rows that age: fresh ones as they are written, old ones in a smaller type, by the cell that they are in."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support import chance
from support.engines import Token, decode, open_context, random_ids, repair, run_of
from support.judge import nmse
from support.models import N_VOCAB, ModelSpec, random_tensors
from support.naive_aging import NaiveAging, aged
from support.naive_llama import normed, turned

import pykvgraph as kvg

SPEC = ModelSpec(n_layer=2, n_embd=64, n_head=2, n_head_kv=1, seed=11)  # heads of 32
F, N_CTX = 128, 512
AGING: dict[str, Any] = {"n_ctx": N_CTX, "type_k": f"f16:q4_0@{F}", "type_v": f"f16:q4_0@{F}"}
PLAIN = {"n_ctx": N_CTX, "n_batch": F}
AGING_256: dict[str, Any] = {"n_ctx": N_CTX, "type_k": "f16:q4_0@256", "type_v": "f16:q4_0@256"}


@pytest.fixture(scope="module")
def model(model_file: Callable[[ModelSpec], Path]) -> Iterator[kvg.Model]:
    with kvg.Model(model_file(SPEC), device="cpu") as opened:
        yield opened


def test_a_young_text_has_the_bits_of_f16(model: kvg.Model) -> None:
    """Nothing has aged, and rows are not mixed: the same rows in the same cells."""
    ids = random_ids(F, N_VOCAB, 1)
    with open_context(model, **AGING, hadamard=False) as aging, open_context(model, **PLAIN) as plain:
        for ctx in (aging, plain):
            decode(ctx, run_of(ids[:100]))
        for i, token in enumerate(ids[100:], 100):
            assert np.array_equal(decode(aging, [Token(token, i)]), decode(plain, [Token(token, i)]))
        assert np.array_equal(aging.kv.read_k(0)[:F], plain.kv.read_k(0)[:F])


def test_where_all_cells_are_fresh_nothing_ages(model: kvg.Model) -> None:
    ids = random_ids(300, N_VOCAB, 2)
    whole = {"type_k": f"f16:q4_0@{N_CTX}", "type_v": f"f16:q8_0@{N_CTX}"}
    with open_context(model, n_ctx=N_CTX, **whole) as ctx, open_context(model, n_ctx=N_CTX) as plain:
        assert np.array_equal(decode(ctx, run_of(ids)), decode(plain, run_of(ids)))
        assert ctx.kv.bytes == plain.kv.bytes
        assert ctx.kv.groups == plain.kv.groups


@pytest.mark.parametrize("old", ["q4_0", "q8_0"])
@pytest.mark.parametrize("mixes", [False, True])
def test_logits_behind_what_has_aged(model: kvg.Model, old: str, mixes: bool) -> None:
    """The fresh cells are full: the next token finds all that is before it aged."""
    ids = random_ids(F + 1, N_VOCAB, 3)
    naive = NaiveAging(SPEC, old, mixes=mixes)
    with open_context(
        model, n_ctx=N_CTX, type_k=f"f16:{old}@{F}", type_v=f"f16:{old}@{F}", hadamard=mixes
    ) as ctx:
        prompt = decode(ctx, run_of(ids[:F]))[-1]
        assert nmse(prompt, naive.decode(ids[:F]).astype(np.float32)) <= 1e-6
        naive.age()
        expected = naive.decode(ids[F:]).astype(np.float32)
        found = decode(ctx, [Token(ids[F], F)])[0]
        assert (ctx.kv.cells().pos[:F] >= 0).sum() == 1
        assert nmse(found, expected) <= 1e-6
    with open_context(model, **PLAIN) as plain:
        unaged = decode(plain, run_of(ids[:F]))[-1:]
        unaged = decode(plain, [Token(ids[F], F)])
    assert nmse(unaged[0], expected) > 1e-5


@pytest.mark.parametrize(
    ("fresh", "old"), [("f16", "q4_0"), ("f16", "q8_0"), ("f32", "f16"), ("q8_0", "q4_0")]
)
def test_rows_age_by_ggmls_own_quantization(model: kvg.Model, fresh: str, old: str) -> None:
    """To the byte: every value that is read is the one that those bytes have. K ages, and V stays."""
    ids = random_ids(F + 1, N_VOCAB, 4)
    with open_context(model, n_ctx=N_CTX, type_k=f"{fresh}:{old}@{F}", type_v=fresh, hadamard=False) as ctx:
        decode(ctx, run_of(ids[:F]))
        before = [(ctx.kv.read_k(layer), ctx.kv.read_v(layer)) for layer in range(SPEC.n_layer)]
        decode(ctx, [Token(ids[F], F)])
        pos = ctx.kv.cells().pos
        order = [int(np.flatnonzero(pos == p).item()) for p in range(F)]
        assert min(order) >= F
        for layer, (k, v) in enumerate(before):
            assert np.array_equal(ctx.kv.read_v(layer)[order], v[:F])
            found = ctx.kv.read_k(layer)[order].reshape(F, -1)
            assert np.array_equal(found, aged(k[:F].reshape(F, -1), old))


def test_bytes(model: kvg.Model) -> None:
    """Counted by hand: K and V of 2 layers, rows of 32 values, 64 bytes in F16 and 18 in Q4_0."""
    with open_context(model, **AGING) as ctx:
        assert ctx.kv.bytes == 2 * 2 * (F * 64 + (N_CTX - F) * 18)
        (group,) = ctx.kv.groups
        assert (group.n_cells, group.n_fresh) == (N_CTX, F)
        assert (group.cell_bytes, group.old_cell_bytes) == (2 * 2 * 64, 2 * 2 * 18)
        assert sum(part.cache_bytes for part in ctx.devices) == ctx.kv.bytes
    (planned,) = kvg.plan_memory(model.path, device="cpu", **AGING)
    assert planned.cache_bytes == 2 * 2 * (F * 64 + (N_CTX - F) * 18)
    with open_context(model, n_ctx=N_CTX, type_k=f"f16:q4_0@{F - 1}") as ctx:  # in whole steps, and K alone
        assert ctx.kv.bytes == 2 * (F * 64 + (N_CTX - F) * 18 + N_CTX * 64)


def test_the_oldest_go_first(model: kvg.Model) -> None:
    """What only a hold keeps before all others, then what stands furthest before the end of its text."""
    with open_context(model, **AGING_256, n_seq_max=3) as ctx:
        for seq, n in enumerate((100, 100, 56)):
            decode(ctx, run_of(random_ids(n, N_VOCAB, seq), 0, (seq,)))
        hold = ctx.kv.hold(2, 16, 56)
        ctx.kv.seq_rm(2, 0, -1)
        decode(ctx, run_of(random_ids(20, N_VOCAB, 5), 100, (0,)))  # 16 cells are empty, so that 128 age
        cells = ctx.kv.cells()
        old = np.arange(len(cells.pos)) >= 256
        assert sorted(cells.pos[old & (cells.held > 0)]) == list(range(16, 56))
        for seq in (0, 1):
            assert sorted(cells.pos[old & cells.seq[:, seq]]) == list(range(44))
        hold.release()


def test_what_ages_is_rotated_first(model: kvg.Model) -> None:
    """To where it stands, pending shifts too, and without dither: the old type would take it for another."""
    ids = random_ids(40, N_VOCAB, 8)
    with open_context(model, **AGING, hadamard=False) as ctx:
        decode(ctx, run_of(ids))
        for _ in range(3):
            ctx.kv.seq_add(0, 0, -1, 9)
            assert ctx.kv.update().shifted_cells == 40
        assert (ctx.kv.cells().dither[:40] > 1).all()
        ctx.kv.seq_add(0, 47, -1, 3)
        decode(ctx, run_of(random_ids(F, N_VOCAB, 9), 70))
        cells = ctx.kv.cells()
        old = np.flatnonzero((cells.pos >= 0) & (np.arange(N_CTX) >= F))
        assert (cells.dither[old] <= 1).all() and (cells.shift[old] == 0).all()
        places = [(27 + i + (3 if i >= 20 else 0), token) for i, token in enumerate(ids)]
        row = {int(cells.pos[i]): i for i in old}
        found = ctx.kv.read_k(0)[[row[pos] for pos, _ in places]].reshape(40, -1)
        expected = aged(_keys(places).astype(np.float32).reshape(40, -1), "q4_0")
        assert nmse(found, expected) <= 1e-3  # some values round the other way


def test_an_engine(model: kvg.Model) -> None:
    """Texts that come and go, and share a beginning, as with one type."""
    shared = random_ids(150, N_VOCAB, 10)
    with kvg.Engine(model, **AGING, n_seq_max=2) as engine:
        wanted = kvg.SamplingParams(max_tokens=20, temperature=0.0)
        requests = [engine.submit(shared + random_ids(30, N_VOCAB, i), wanted) for i in range(4)]
        done = [request.result() for request in requests]
        assert all(each.tokens for each in done)
        assert any(each.n_cached >= 128 for each in done)
        assert engine.context.kv.groups[0].n_fresh == F


def test_all_that_is_empty_can_be_taken(model: kvg.Model) -> None:
    """A batch finds room until every cell is used, and then none; nothing is lost on the way."""
    ids = random_ids(N_CTX + 1, N_VOCAB, 6)
    with open_context(model, **AGING) as ctx:
        for begin in range(0, N_CTX, 64):
            decode(ctx, run_of(ids[begin : begin + 64], begin))
        cells = ctx.kv.cells()
        assert sorted(cells.pos) == list(range(N_CTX))
        assert sorted(cells.pos[:F]) == list(range(N_CTX - F, N_CTX))
        with pytest.raises(kvg.CacheFullError):
            decode(ctx, [Token(ids[-1], N_CTX)])
        ctx.kv.seq_rm(0, 10, 74)  # holes among old cells: fresh ones must become empty
        assert np.isfinite(decode(ctx, run_of(ids[:64], N_CTX))).all()
        assert ctx.kv.n_free == 0


def test_refused(model: kvg.Model, model_file: Callable[[ModelSpec], Path]) -> None:
    """What rows of two types are not there for says so, and changes nothing."""
    with open_context(model, **AGING) as ctx:
        decode(ctx, run_of(random_ids(200, N_VOCAB, 7)[:F]))
        with pytest.raises(kvg.UnsupportedError, match="two"):
            ctx.kv.save()
        with open_context(model, n_ctx=N_CTX) as plain:
            decode(plain, run_of(random_ids(20, N_VOCAB, 7)))
            state = plain.kv.save()
        with pytest.raises((kvg.UnsupportedError, kvg.StateError)):
            ctx.kv.load(state)
        assert ctx.kv.seq_pos_max(0) == F - 1
    with pytest.raises(kvg.UnsupportedError, match="flash_attn"):
        open_context(model, **AGING, flash_attn="on")
    with pytest.raises(kvg.UnsupportedError, match="tiers"):
        kvg.Engine(model, **AGING, tiers=kvg.Tiers(ram=1 << 20))
    with pytest.raises(kvg.InvalidArgumentError, match="smaller"):
        open_context(model, n_ctx=N_CTX, type_k="q4_0:f16@128")
    small = model_file(ModelSpec(n_layer=1, n_embd=48, n_head=2, n_head_kv=1))
    with kvg.Model(small, device="cpu") as other, pytest.raises(kvg.UnsupportedError, match="blocks of 32"):
        open_context(other, **AGING)


def test_an_edit_without_room_for_copies_of_what_has_aged(model: kvg.Model) -> None:
    """Empty cells are fresh ones, and copies of old rows don't go there: nothing is removed before."""
    with open_context(model, **{**AGING, "n_ctx": 2 * F}) as ctx:
        text = kvg.Sequence(ctx)
        text.set(random_ids(2 * F, N_VOCAB, 8))
        text.go_back(2 * F - 60)
        hold = ctx.kv.hold(0, 20, 40)
        with pytest.raises(kvg.CacheFullError, match="aged"):
            text.remove(10, 15, repair=0)
        assert ctx.kv.seq_count(0, -1, -1).n_cells == len(text) == 2 * F - 60
        hold.release()
        text.remove(10, 15, repair=0)


N_SEQ, MAX_POS = 3, 700
Texts = list[list[tuple[int, int]]]  # of each sequence, positions and tokens


def _edit(rng: random.Random, ctx: kvg.Context, texts: Texts) -> str:
    """Something that is done to ours and to lists; its name, or "" when there was no room for it."""
    kv, seq = ctx.kv, rng.randrange(N_SEQ)
    text = texts[seq]
    end = max((pos for pos, _ in text), default=-1) + 1
    p0 = rng.randrange(end + 1)
    p1 = rng.randrange(p0, end + 2)
    op = rng.choice(
        ("append", "append", "append", "append", "rm", "cp", "add", "div", "repair", "fill", "sort")
    )
    try:
        if op == "append" and end < MAX_POS:
            ids = [rng.randrange(3, N_VOCAB) for _ in range(rng.choice((1, 5, 40, F)))]
            decode(ctx, run_of(ids, end, (seq,)))
            text += list(zip(range(end, end + len(ids)), ids, strict=True))
        elif op == "repair" and end > 0:
            p0 = min(p0, end - 1)
            ids = [rng.randrange(3, N_VOCAB) for _ in range(min(rng.choice((1, 7)), end - p0))]
            repair(ctx, run_of(ids, p0, (seq,)))
            new = list(zip(range(p0, p0 + len(ids)), ids, strict=True))
            texts[seq] = [each for each in text if not p0 <= each[0] < p0 + len(ids)] + new
        elif op == "rm":
            kv.seq_rm(seq, p0, p1)
            texts[seq] = [each for each in text if not p0 <= each[0] < p1]
        elif op == "cp":
            other = (seq + 1) % N_SEQ
            kv.seq_rm(other, 0, -1)
            kv.seq_cp(seq, other, 0, p1)
            texts[other] = [each for each in text if each[0] < p1]
        elif op == "add":
            delta = rng.choice((-p0, rng.randrange(-20, 20)))
            kv.seq_add(seq, p0, p1, delta)
            moved = [(pos + delta if p0 <= pos < p1 else pos, token) for pos, token in text]
            texts[seq] = [each for each in moved if each[0] >= 0]
        elif op == "div":
            kv.seq_div(seq, p0, p1, 2)
            texts[seq] = [(pos // 2 if p0 <= pos < p1 else pos, token) for pos, token in text]
        else:
            kv.defrag("sort" if op == "sort" else "fill")
            kv.update()
    except kvg.CacheFullError:
        return ""
    return op


def _keys(places: list[tuple[int, int]]) -> npt.NDArray[np.float64]:
    """Layer 0's K of tokens at positions, by the model's definition: (n, n_head_kv, head_dim)."""
    pos, ids = np.array(places).T
    weights = {name: tensor.astype(np.float64) for name, tensor in random_tensors(SPEC).items()}
    x = normed(weights["token_embd.weight"][ids], weights["blk.0.attn_norm.weight"])
    return turned(SPEC, (x @ weights["blk.0.attn_k.weight"].T).reshape(len(ids), -1, SPEC.k_dim), pos)


def _check(ctx: kvg.Context, texts: Texts) -> None:
    """Every sequence has its tokens at their positions, and layer 0's K is theirs, as far as types tell."""
    cells, k = ctx.kv.cells(), ctx.kv.read_k(0)
    for seq, text in enumerate(texts):
        own = np.flatnonzero(cells.seq[:, seq])
        counts = Counter(pos for pos, _ in text)
        assert Counter(cells.pos[own].tolist()) == counts
        once = sorted(each for each in text if counts[each[0]] == 1)
        if not once:
            continue
        cell_at = dict(zip(cells.pos[own].tolist(), own.tolist(), strict=True))
        rows = np.array([cell_at[pos] for pos, _ in once])
        expected = _keys(once)
        error = np.linalg.norm(k[rows] - expected, axis=(1, 2)) / np.linalg.norm(expected, axis=(1, 2))
        assert error[rows < 256].max(initial=0) <= 0.01  # F16, rotated a few times
        assert error[rows >= 256].max(initial=0) <= 0.5  # Q4_0, likewise; of another token's it is 1.4
        assert not (rows >= 256).any() or np.median(error[rows >= 256]) <= 0.2


@pytest.mark.parametrize("seed", range(30 if chance.THOROUGH else 3))
def test_random_edits(model: kvg.Model, seed: int) -> None:
    """Beside lists of positions and tokens."""
    rng = random.Random(chance.seed(seed))
    texts: Texts = [[] for _ in range(N_SEQ)]
    done: Counter[str] = Counter()
    with open_context(model, **AGING_256, n_seq_max=N_SEQ) as ctx:
        for _ in range(60):
            done[_edit(rng, ctx, texts)] += 1
            _check(ctx, texts)
        assert len(done) > 7
        assert (ctx.kv.cells().pos[256:] >= 0).any()


def test_defrag_counts_the_bytes_of_old_cells(model: kvg.Model) -> None:
    ids = random_ids(300, N_VOCAB, 8)
    with open_context(model, **AGING) as ctx:
        for begin in range(0, 300, 100):
            decode(ctx, run_of(ids[begin : begin + 100], begin))
        ctx.kv.seq_rm(0, 10, 60)  # they have aged
        before = ctx.kv.cells().pos.copy()
        ctx.kv.defrag("fill")
        stats = ctx.kv.update()
        moved_to = np.flatnonzero((before < 0) & (ctx.kv.cells().pos >= 0))
        n_old = int((moved_to >= F).sum())
        assert n_old > 0 and len(moved_to) == stats.moved_cells
        of_cell = 2 * 2 * 64, 2 * 2 * 18  # as above
        assert stats.moved_bytes == (stats.moved_cells - n_old) * of_cell[0] + n_old * of_cell[1]
