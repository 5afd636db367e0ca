"""Directories of prefixes that others have damaged, share, or that fail: misses, and never a wrong token."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import chance, sanitizer, where
from support.architectures import ArchSpec
from support.soak import F32
from support.tier_process import LIMIT, SHORT, bytes_in, prompts_of

import pykvgraph as kvg
from pykvgraph.engine import fetches
from pykvgraph.prefix import block
from pykvgraph.tiers.record import read_header
from pykvgraph.tiers.store import Store

from .test_tier_records import damaged
from .test_tiers import engine_of, ids_of, push_out

pytestmark = pytest.mark.usefixtures("decoding_is_slow")
N_FILES = 10_000 // 3 + 1  # of each of three models
N_SHARE = 10 if sanitizer.ADDRESS else chance.SHARE  # decoding there is slow


class Damage:
    """Prompts whose records are on the disk, and what is wrong with one of each.

    texts: of each prompt the files that it needs, by name. foreign: records of the same prompts by another
    model, and with another type of the cache.
    """

    def __init__(self, model: kvg.Model, other: kvg.Model, folder: Path, n: int) -> None:
        self.model = model
        self.folder = folder
        self.n_ctx = n * 96
        self.prompts = [ids_of(model, 64 + 7, 100 + each) for each in range(n)]
        self.expected, self.texts = self._recorded(model)
        self.foreign = [*self._recorded(other)[1][0].values()]
        self.foreign += self._recorded(model, type_k="f16")[1][0].values()

    def _recorded(
        self, model: kvg.Model, **options: Any
    ) -> tuple[list[tuple[int, ...]], list[dict[str, bytes]]]:
        folder = self.folder / "recorded"
        tiers = kvg.Tiers("64M", "64M", folder)
        with kvg.Engine(model, n_ctx=self.n_ctx, tiers=tiers, **{**F32, **options}) as engine:
            said = [engine.submit(prompt, SHORT).result().tokens for prompt in self.prompts]
        files = [each for each in folder.iterdir() if each.suffix != ".lock"]
        found = [
            {each.name: each.read_bytes() for each in files_of(prompt, files)} for prompt in self.prompts
        ]
        shutil.rmtree(folder)
        return said, found

    def try_one_of_each(self, rng: random.Random, again: bool = False) -> Counter[str]:
        """A file of each prompt's; misses by reason. again: the right ones are there for the next engine."""
        folder = self.folder / "mixed"
        folder.mkdir()
        for texts in self.texts:
            wrong = rng.choice(sorted(texts))
            for name, text in texts.items():
                (folder / name).write_bytes(self._wrong(text, rng) if name == wrong else text)
        misses = self._misses(folder)
        assert sum(misses.values()) == len(self.prompts)
        assert not (again and self._misses(folder))
        shutil.rmtree(folder)
        return misses

    def _wrong(self, text: bytes, rng: random.Random) -> bytes:
        foreign = [b"", b"GGUF" + bytes(3000), *self.foreign]
        found = text
        while found == text:
            found = (
                rng.choice(foreign)
                if rng.random() < 0.2
                else damaged([text, *self.texts[0].values()], 0, rng)
            )
        return found

    def _misses(self, folder: Path) -> Counter[str]:
        with engine_of(self.model, kvg.Tiers("64M", "64M", folder), n_ctx=self.n_ctx) as engine:
            requests = [engine.submit(prompt, SHORT) for prompt in self.prompts]
            assert [each.result().tokens for each in requests] == self.expected
            stats = engine.stats().tiers
        assert stats is not None
        return +Counter(stats.misses)


def files_of(prompt: list[int], files: list[Path]) -> list[Path]:
    """Its two blocks, and the end that it goes on from: where there are several, the shorter one."""
    text, blocks, ends = array("i", prompt).tobytes(), [], []
    for each in files:
        header = read_header(each.read_bytes())
        assert header is not None
        if header.kind == block.TOKENS and header.tokens in text:
            blocks.append(each)
        elif header.kind == block.END and header.tokens[:24] == text[4 * 64 : 4 * 70]:
            ends.append((len(header.tokens), each))
    assert len(blocks) == 2
    return [*blocks, min(ends)[1]]


@pytest.mark.parametrize(
    ("n_prompts", "n"),
    [(8, 8), pytest.param(32, N_FILES // N_SHARE, marks=pytest.mark.slow)],
)
def test_damaged_files(
    model: kvg.Model,
    architecture: Callable[[ArchSpec], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    n_prompts: int,
    n: int,
) -> None:
    """Every one of them is a miss, the answers are right, and the next engine finds everything."""
    monkeypatch.setattr(os, "fsync", lambda file: None)  # nothing loses power here
    rng, reasons = random.Random(chance.seed(n)), Counter[str]()
    with kvg.Model(architecture(ArchSpec("llama", 2, 32, 2, 1, 16, 48)), device=where.device) as other:
        damage = Damage(model, other, tmp_path, n_prompts)
    while reasons.total() < n:
        reasons += damage.try_one_of_each(rng, again=not reasons)
    assert set(reasons) <= {"foreign", "damaged", "other"}
    assert reasons["damaged"] > 0.4 * reasons.total()


def store_of(engine: kvg.Engine) -> Store:
    found = engine._loop.stepper._fetches
    assert found is not None
    return found.store


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "ftruncate", "unlink", "open", "scandir"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_disk_that_fails_from_now_on(
    model: kvg.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """Answers are what they are without a disk; a disk that works again is used again."""
    prompts, real, folder = (
        [ids_of(model, 100, each) for each in range(6)],
        getattr(os, call),
        tmp_path / "tier",
    )

    def fails(what: Any, *args: Any, **options: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else os.fspath(what)
        if path.startswith(str(folder)):
            raise OSError(code, os.strerror(code))
        return real(what, *args, **options)

    with engine_of(model, kvg.Tiers("64M")) as engine:
        expected = [engine.submit(prompt, SHORT).result().tokens for prompt in prompts]
    with engine_of(model, kvg.Tiers("64M", "150K", folder)) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fails)
            for each in (prompts, prompts[::-1]):
                assert [engine.submit(prompt, SHORT).result().tokens for prompt in each] == expected
                expected.reverse()
            store_of(engine).flush(10)
        push_out(engine, 1)
        assert store_of(engine).flush(10)
        assert store_of(engine).counts["written"] > 0


def test_a_directory_that_may_only_be_read(
    model: kvg.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """From the start: what is there is used, nothing is written, and one line says so."""
    prompt, real = ids_of(model, 100, 1), os.open

    def opened(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if str(path).startswith(str(tmp_path)) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *args, **options)

    tiers = kvg.Tiers("64M", "64M", tmp_path)
    with engine_of(model, tiers) as engine:
        expected = engine.submit(prompt, SHORT).result().tokens
    before = sorted(each.name for each in tmp_path.iterdir())
    monkeypatch.setattr(os, "open", opened)
    with engine_of(model, tiers) as engine:
        said = engine.submit(prompt, SHORT).result()
        assert (said.tokens, said.n_cached) == (expected, 99)
        push_out(engine, 1)
    assert sorted(each.name for each in tmp_path.iterdir()) == before
    assert len(caplog.records) == 1


@pytest.mark.slow
def test_closing_does_not_wait_for_a_disk_that_hangs(
    model: kvg.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetches, "_CLOSE_SECONDS", 0.2)
    works = threading.Event()
    real = os.fsync

    def hangs(file: int) -> None:
        works.wait(30)
        real(file)

    monkeypatch.setattr(os, "fsync", hangs)
    with engine_of(model, kvg.Tiers("64M", "64M", tmp_path)) as engine:
        engine.submit(ids_of(model, 100, 1), SHORT).result()
        begin = time.monotonic()
    assert time.monotonic() - begin < 5
    works.set()


def test_bytes_at_every_step(model: kvg.Model, tmp_path: Path) -> None:
    """Of memory and of the disk, with texts that come, go on, and are given up, at random."""
    ram, disk, rng = 100_000, 150_000, random.Random(chance.seed(3))
    begins = [ids_of(model, 130, seed) for seed in range(8)]
    most = [0, 0]
    with engine_of(model, kvg.Tiers(ram, disk, tmp_path), overcommit=True, background=False) as engine:
        for each in range(120):
            prompt = rng.choice(begins)[: rng.randrange(40, 130)] + ids_of(model, rng.randrange(1, 40), each)
            engine.submit(prompt, SHORT)
            for _ in range(rng.randrange(12)):
                engine.step()
                stats = engine.stats().tiers
                assert stats is not None
                on_disk = bytes_in(tmp_path)
                most = [max(most[0], stats.ram_bytes), max(most[1], stats.disk_bytes, on_disk)]
        assert store_of(engine).flush(10)
        assert disk // 2 < bytes_in(tmp_path) <= disk
        stats = engine.stats().tiers
    assert stats is not None
    assert ram // 2 < most[0] <= ram
    assert most[1] <= disk
    assert stats.loaded_tokens > 0


@pytest.mark.slow
def test_two_processes_on_one_directory(model: kvg.Model, tmp_path: Path) -> None:
    """Each uses what the other wrote, and removes it, too: there is room for a third of it."""
    command = [sys.executable, "-m", "support.tier_process", model.path, tmp_path, where.device]
    processes = [
        subprocess.Popen(
            [*map(str, command), str(seed)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
        )
        for seed in (1, 2)
    ]
    reports = [json.loads(each.communicate(timeout=120)[0]) for each in processes]
    with engine_of(model, kvg.Tiers("64M")) as engine:
        expected = [engine.submit(prompt, SHORT).result().tokens for prompt in prompts_of(model)]
    assert sum(report["loaded"] for report in reports) > 0
    for report in reports:
        assert set(report["misses"]) <= {"gone", "late", "no-room"}
        assert report["most"] <= LIMIT
        assert all(tuple(said) == expected[at] for at, said in report["said"])
