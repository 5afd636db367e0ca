"""Records of prefixes that are damaged, of something else, or forged: misses, and never a wrong token."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import chance, where
from support.architectures import ArchSpec
from support.soak import F32

import pykvgraph as kvg
from pykvgraph.kv_cache.saved.format import unpack as read_state
from pykvgraph.kv_cache.saved.geometry import Geometry
from pykvgraph.tiers.record import MissError, Name, geometry_of, pack, read_header, split, unpack

from .test_tiers import TALK, engine_of, ids_of

pytestmark = pytest.mark.usefixtures("decoding_is_slow")
N_DAMAGED = 10_000


def records_of(model: kvg.Model, folder: Path, prompt: list[int], **options: Any) -> list[Path]:
    """Files of a prompt, by an engine that has ended."""
    with kvg.Engine(model, n_ctx=256, tiers=kvg.Tiers("64M", "64M", folder), **{**F32, **options}) as engine:
        engine.submit(prompt, TALK).result()
    return sorted(each for each in folder.iterdir() if each.suffix != ".lock")


def geometry_at(model: kvg.Model) -> Geometry:
    with kvg.Context(model, n_ctx=256, **F32) as ctx:
        return ctx.kv._geometry


def name_at(text: bytes, geometry: Geometry) -> Name:
    """What a record is of; the first position of its tokens only its rows tell."""
    header = read_header(text)
    assert header is not None
    state = read_state(split(text).rows, geometry_of(header.kind, geometry))
    end = max(int(cells.pos[-1]) for cells in state.groups if len(cells.pos)) + 1
    return Name(header.kind, header.parent, header.tokens, end - len(header.tokens) // 4)


def damaged(texts: list[bytes], at: int, rng: random.Random) -> bytes:
    """A bit flipped, a field or token changed, cut off, made longer, or another one's content."""
    text, what = bytearray(texts[at]), rng.randrange(5)
    if what == 0:
        text[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
    elif what == 1:
        text[rng.randrange(min(240, len(text)))] = rng.randrange(256)
    elif what == 2:
        text = text[: rng.randrange(len(text))]
    elif what == 3:
        text += bytes(rng.randrange(1, 9))
    else:
        text = bytearray(rng.choice(texts))
    return bytes(text)


def test_damaged_records_are_misses(model: kvg.Model, tmp_path: Path) -> None:
    texts = [each.read_bytes() for each in records_of(model, tmp_path, ids_of(model, 100, 4))]
    geometry = geometry_at(model)
    names = [name_at(text, geometry) for text in texts]
    for name, text in zip(names, texts, strict=True):
        unpack(split(text), name, geometry)
    rng = random.Random(chance.seed(5))
    reasons: Counter[str] = Counter()
    for _ in range(N_DAMAGED):
        at = rng.randrange(len(texts))
        if (text := damaged(texts, at, rng)) == texts[at]:
            continue
        with pytest.raises(MissError) as miss:
            unpack(split(text), names[at], geometry)
        reasons[miss.value.reason] += 1
    assert reasons["damaged"] > 0.4 * N_DAMAGED
    assert reasons["other"] > 0.1 * N_DAMAGED
    assert reasons["foreign"] > 0


def test_forged_records_are_misses(model: kvg.Model, tmp_path: Path) -> None:
    """With the right digests, and rows of another part of the text."""
    texts = [each.read_bytes() for each in records_of(model, tmp_path, ids_of(model, 100, 4))]
    geometry = geometry_at(model)
    names = [name_at(text, geometry) for text in texts]
    for name in names:
        for other, text in zip(names, texts, strict=True):
            if name == other:
                continue
            forged = pack(name, bytes(split(text).rows))
            with pytest.raises(MissError) as miss:
                unpack(forged, name, geometry)
            assert miss.value.reason == "other"


def test_a_damaged_file_is_decoded_and_replaced(model: kvg.Model, tmp_path: Path) -> None:
    prompt = ids_of(model, 100, 6)
    files = records_of(model, tmp_path, prompt)
    tiers = kvg.Tiers("64M", "64M", tmp_path)
    with engine_of(model, tiers) as engine:
        expected = engine.submit(prompt, TALK).result()
        assert expected.n_cached == 99
    for number, file in enumerate(files):
        text = bytearray(file.read_bytes())
        text[len(text) // 2] ^= 4
        file.write_bytes(text if number % 2 else b"GGUF")
        with engine_of(model, tiers) as engine:
            found = engine.submit(prompt, TALK).result()
            stats = engine.stats().tiers
            assert stats is not None
            assert found.tokens == expected.tokens
            n_wrong = stats.misses["damaged"] + stats.misses["foreign"]
            assert n_wrong == sum(stats.misses.values()) <= 1
            assert n_wrong == 1 or found.n_cached == 99  # of two ends one is asked for
        with engine_of(model, tiers) as engine:  # it was written again
            assert engine.submit(prompt, TALK).result().n_cached == 99


def test_another_models_records_are_misses(
    architecture: Callable[[ArchSpec], Path], model: kvg.Model, tmp_path: Path
) -> None:
    """Under the names of this model's: other weights, and another type of the cache."""
    prompt = ids_of(model, 100, 7)
    files = records_of(model, tmp_path / "ours", prompt)
    with kvg.Model(architecture(ArchSpec("llama", 2, 32, 2, 1, 16, 48)), device=where.device) as other:
        theirs = records_of(other, tmp_path / "a", prompt)
    theirs += records_of(model, tmp_path / "b", prompt, type_k="f16")
    assert not {each.name for each in files} & {each.name for each in theirs}
    with engine_of(model, kvg.Tiers("64M", "64M", tmp_path / "none")) as engine:
        expected = engine.submit(prompt, TALK).result().tokens
    for at, each in enumerate(theirs):
        target = next(file for file in files if file.suffix == each.suffix)
        folder = tmp_path / f"mixed{at}"
        folder.mkdir()
        for file in files:
            (folder / file.name).write_bytes(each.read_bytes() if file == target else file.read_bytes())
        with engine_of(model, kvg.Tiers("64M", "64M", folder)) as engine:
            found = engine.submit(prompt, TALK).result()
            assert found.tokens == expected
