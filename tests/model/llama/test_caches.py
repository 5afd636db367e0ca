"""set_cache with LlamaRAMCache and LlamaDiskCache: what another Llama read is not decoded again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.architectures import ArchSpec
from support.kinds import KINDS

import pykvgraph as kvg
from pykvgraph.llama import LlamaCache, LlamaDiskCache, LlamaRAMCache
from pykvgraph.sequence.sequence import Change, TokenSequence

from .conftest import EXACT, plain

EACH = pytest.mark.parametrize("kind", KINDS, ids=str)


@pytest.fixture
def changes(monkeypatch: pytest.MonkeyPatch) -> list[Change]:
    """What TokenSequence.set() did."""
    found: list[Change] = []
    real = TokenSequence.set

    def noted(text: TokenSequence, *arguments: Any) -> Change:
        found.append(real(text, *arguments))
        return found[-1]

    monkeypatch.setattr(TokenSequence, "set", noted)
    return found


def opened(path: Path, **options: Any) -> kvg.Llama:
    return kvg.Llama(str(path), n_ctx=256, swa_full=False, **{**EXACT, **options})


def tokens(n: int, seed: int) -> list[int]:
    return [int(each) for each in np.random.default_rng(seed).integers(3, 200, n)]


@EACH
@pytest.mark.parametrize("on_disk", [False, True])
def test_a_text_of_another_llama(
    kind: ArchSpec,
    architecture: Callable[[ArchSpec], Path],
    tmp_path: Path,
    changes: list[Change],
    on_disk: bool,
) -> None:
    def cache() -> Any:
        return LlamaDiskCache(tmp_path / "cache", 1 << 24) if on_disk else memory

    path, memory = architecture(kind), LlamaRAMCache(1 << 24)
    with opened(path) as one:
        one.set_cache(cache())
        one.create_completion(tokens(100, 1), max_tokens=8, temperature=0.0)
        text = one.eval_tokens
        one.create_completion(tokens(100, 2), max_tokens=8, temperature=0.0)
    prompt = [*text, *tokens(5, 3)]
    with opened(path) as fresh:
        expected = plain(fresh.create_completion(prompt, max_tokens=8, temperature=0.0))
    with opened(path) as other:
        other.set_cache(cache())
        other.create_completion(tokens(50, 4), max_tokens=8, temperature=0.0)
        said = plain(other.create_completion(prompt, max_tokens=8, temperature=0.0))
        assert changes[-1].n_decoded == len(prompt) - len(text)
        other.set_cache(None)
        other.kv.clear()
        assert plain(other.create_completion(prompt, max_tokens=8, temperature=0.0)) == said
        assert changes[-1].n_decoded == len(prompt)
    assert said == expected


@EACH
def test_bytes_are_never_above_the_capacity(
    kind: ArchSpec, architecture: Callable[[ArchSpec], Path], tmp_path: Path
) -> None:
    caches = [LlamaRAMCache(100_000), LlamaDiskCache(tmp_path, 100_000)]
    with opened(architecture(kind)) as llm:
        for cache in caches:
            llm.set_cache(cache)
            for seed in range(6):
                llm.create_completion(tokens(100, seed), max_tokens=2, temperature=0.0)
                assert cache.cache_size <= cache.capacity_bytes == 100_000
            assert cache.flush()
            assert cache.cache_size > 50_000


def test_what_is_not_kept(architecture: Callable[[ArchSpec], Path]) -> None:
    with (
        opened(architecture(KINDS[0]), logits_all=True) as llm,
        pytest.raises(kvg.UnsupportedError, match="logits"),
    ):
        llm.set_cache(LlamaCache())
    with pytest.raises(kvg.InvalidArgumentError, match="bytes"):
        LlamaRAMCache(-1)


def test_a_forked_process_does_not_wait_for_the_disk(
    architecture: Callable[[ArchSpec], Path], tmp_path: Path
) -> None:
    """It has no thread that writes; what waits there is its parent's."""
    program = (
        "import os, sys, threading\n"
        "from pykvgraph.tiers.disk import DiskTier\n"
        "from pykvgraph.llama import Llama, LlamaDiskCache\n"
        "goes, real = threading.Event(), DiskTier.put\n"
        "DiskTier.put = lambda *given: goes.wait() and real(*given)\n"
        "cache, llm = LlamaDiskCache(sys.argv[2], 1 << 24), Llama(sys.argv[1], n_ctx=256)\n"
        "llm.set_cache(cache)\n"
        "llm.create_completion(list(range(5, 105)), max_tokens=2)\n"
        "if os.fork() == 0:\n"
        "    sys.exit(7)\n"
        "code = os.wait()[1] >> 8\n"
        "goes.set()\n"
        "print(code, cache.flush())\n"
    )
    command = [sys.executable, "-c", program, str(architecture(KINDS[0])), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=8, check=True)
    assert done.stdout.split()[-2:] == ["7", "True"]
