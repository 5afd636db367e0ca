"""`pykvgraph perplexity` on a small model: what it prints, the file of logits, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from support.naive_perplexity import chunk_rows, kl_table, perplexity
from support.real import Libllama

import pykvgraph as kvg
from pykvgraph.cli import main
from pykvgraph.demos.base_logits import BaseFile

DATA = Path(__file__).parents[2] / "data"
STORIES, TEXT = str(DATA / "stories260K.gguf"), str(DATA / "stories260K.golden.txt")
SIZES = ("-m", STORIES, "-dev", "none", "-t", "1")
N_CTX, N_CHUNKS = 32, 5
MEASURE = (*SIZES, "-f", TEXT, "-c", str(N_CTX), "--chunks", str(N_CHUNKS))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["perplexity", *arguments], env={"COLUMNS": "80"})


def told(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def base(tmp_path: Path) -> str:
    """The logits of an F16 cache."""
    path = str(tmp_path / "f16.base")
    told(*MEASURE, "--kl-divergence-base", path)
    return path


def test_the_figure(stories: Path) -> None:
    """Of libllama's logits; alike with several chunks a batch, with one, and with a chunk in parts."""
    with Libllama(stories, N_CTX, kv_type="f16") as libllama:
        ids = libllama.model.encode(Path(TEXT).read_text(encoding="utf-8").removesuffix("\n"))
        value, error = perplexity(chunk_rows(libllama.read, ids, N_CTX, ids[0], N_CHUNKS))
        first, _ = perplexity(chunk_rows(libllama.read, ids, N_CTX, ids[0], 1))
    for n_batch in ("512", "40", "16"):
        found = told(*MEASURE, "-b", n_batch)
        assert found["perplexity"] == pytest.approx(value, rel=1e-3)
        assert found["perplexity_error"] == pytest.approx(error, rel=1e-2)
        assert found["so_far"][0] == pytest.approx(first, rel=1e-3)
        assert found["so_far"][-1] == pytest.approx(found["perplexity"], rel=1e-12)
        assert (found["n_ctx"], found["n_chunks"], found["n_tokens"]) == (N_CTX, N_CHUNKS, N_CHUNKS * 15)


def test_for_people() -> None:
    lines = run(*MEASURE).stdout.splitlines()
    assert re.fullmatch(r"(\[\d\]\d+\.\d{4},?){5}", lines[0])
    assert re.fullmatch(r"Final estimate: PPL = \d+\.\d{4} \+/- \d+\.\d{5}", lines[1])


def test_the_same_run_again(base: str) -> None:
    found = told(*SIZES, "--kl-divergence", "--kl-divergence-base", base)
    assert (found["kl_max"], found["same_top"], found["n_chunks"]) == (0.0, 1.0, N_CHUNKS)
    assert found["perplexity"] == found["base_perplexity"]


def test_another_run(base: str) -> None:
    """Of other weights, as a base's rows and ours give it to NumPy."""
    override = ("--override-kv", "llama.rope.freq_base=float:20000")
    found = told(*SIZES, *override, "--kl-divergence", "--kl-divergence-base", base)
    with (
        kvg.Model(STORIES, device="cpu") as model,
        kvg.Model(STORIES, device="cpu", kv_overrides={"llama.rope.freq_base": 20000.0}) as other,
    ):
        ids = model.tokenizer.encode(Path(TEXT).read_text(encoding="utf-8").removesuffix("\n"))
        rows = [list(chunk_rows(reader(each), ids, N_CTX, ids[0], N_CHUNKS)) for each in (model, other)]
    base_rows, other_rows = ([logits for logits, _ in each] for each in rows)
    expected = kl_table(base_rows, other_rows, [nexts for _, nexts in rows[0]])
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert expected["kl_mean"] > 1e-3
    people = run(*SIZES, *override, "--kl-divergence", "--kl-divergence-base", base).stdout
    assert f"{found['kl_mean']:.6f}" in people and f"{found['same_top']:.3%}" in people
    fewer = told(*SIZES, *override, "--kl-divergence", "--kl-divergence-base", base, "--chunks", "2")
    assert (fewer["n_chunks"], fewer["n_tokens"]) == (2, 30)


def reader(model: kvg.Model) -> Any:
    def read(ids: list[int]) -> np.ndarray:
        with kvg.Context(model, n_ctx=N_CTX, n_batch=N_CTX, n_threads=1, n_threads_batch=1) as ctx:
            batch = kvg.Batch()
            batch.extend(ids, 0, logits="all")
            ctx.decode(batch)
            return ctx.logits()

    return read


def test_the_base_has_the_text(base: str, stories: Path) -> None:
    with BaseFile(base) as file, kvg.Model(stories, device="cpu") as model:
        ids = model.tokenizer.encode(Path(TEXT).read_text(encoding="utf-8"))
        assert file.chunks.tokens.ravel().tolist() == ids[: N_CTX * N_CHUNKS]
        assert file.n_vocab == model.n_vocab and file.chunks.bos == model.tokenizer.bos


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give -f FILE"),
        (("--kl-divergence",), "give --kl-divergence-base FILE"),
        (("--kl-divergence", "--kl-divergence-base", "b", "-f", TEXT), "leave out -f"),
        (("-f", TEXT, "-c", "2"), "-c"),
        (("-f", TEXT, "-c", "32", "--chunks", "0"), "n_chunks is 0"),
        (("-f", TEXT, "-c", "5000"), "needs 10000 or more"),
        (("-f", STORIES), "not text in UTF-8"),
        (("--kl-divergence", "--kl-divergence-base", "missing"), "Error: 'missing': No such file"),
        (("--kl-divergence", "--kl-divergence-base", TEXT), "has no base logits"),
        (("--kl-divergence", "--kl-divergence-base", "/dev/null"), "is a device"),
        (("-f", TEXT, "-c", "32", "--kl-divergence-base", "/dev/null"), "is no file"),
        (("-f", TEXT, "-c", "32", "--kl-divergence-base", "/missing/base"), "Error: '/missing/base': "),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], said: str) -> None:
    result = run(*SIZES, *arguments)
    assert result.exit_code in (1, 2)
    assert said in " ".join(result.stderr.split()), result.stderr
    assert result.stdout == ""


def test_a_base_of_another_kind(base: str, tmp_path: Path) -> None:
    compare = ("--kl-divergence", "--kl-divergence-base", base)
    assert "chunks of 32 tokens, not of 64" in run(*SIZES, *compare, "-c", "64").stderr
    other = run("-m", str(kvg_embedded()), "-dev", "none", *compare)
    assert other.exit_code == 1 and "only models with one vocabulary" in " ".join(other.stderr.split())


def kvg_embedded() -> Path:
    from pykvgraph.models import embedded_model

    return embedded_model()


def test_an_interrupted_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none, and the old one stays."""
    path = tmp_path / "base"
    path.write_bytes(b"old")
    decode, calls = kvg.Context.decode, [0]

    def interrupted(self: kvg.Context, *arguments: Any, **others: Any) -> None:
        calls[0] += 1
        if calls[0] == 5:
            raise KeyboardInterrupt
        decode(self, *arguments, **others)

    monkeypatch.setattr(kvg.Context, "decode", interrupted)
    assert run(*MEASURE, "--kl-divergence-base", str(path)).exit_code == 130
    assert [each.name for each in tmp_path.iterdir()] == ["base"]
    assert path.read_bytes() == b"old"
