"""`pykvgraph plan`, and `-c auto`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support.kept_graphs import grow_graphs
from support.made_contexts import of_made_contexts
from support.planned import decode_apart

import pykvgraph as kvg
from pykvgraph.cli import main
from pykvgraph.engine import step_times
from pykvgraph.plan import fitting

STORIES = str(Path(__file__).parents[2] / "data" / "stories260K.gguf")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def plan(*arguments: str) -> Any:
    return json.loads(run("plan", "-m", STORIES, "-dev", "none", "--json", *arguments).stdout)


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "host_free_bytes", lambda *_, **__: 10_000_000)


def test_everything_fits() -> None:
    found = plan("-c", "1000")
    (part,) = kvg.plan_memory(STORIES, "cpu", n_ctx=1000)
    assert (found["n_ctx"], found["most"], found["full"]) == (1000, 1000, "")
    assert found["parts"][0]["cache_bytes"] == part.cache_bytes
    assert plan()["most"] == 512
    assert plan("-np", "3")["most"] == 3 * 512


@pytest.mark.usefixtures("little")
def test_what_fits() -> None:
    found = plan("-c", "100000")
    assert found["full"] == "CPU"
    assert found["limits"] == [8_000_000]
    assert found["n_ctx_by_type"]["f16"] == found["n_ctx"]
    assert "q8_0" not in found["n_ctx_by_type"]  # its heads have 8 values
    assert plan("-c", "100000", "-ctk", "f32", "-ctv", "f32")["n_ctx"] < found["n_ctx"]
    assert plan("-c", "100000", "--margin", "0")["n_ctx"] > found["n_ctx"]


@pytest.mark.usefixtures("little")
def test_for_people(tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    result = run("plan", "-m", STORIES, "-dev", "none", "-c", "100000", "--plot", str(picture))
    assert result.exit_code == 0
    assert "CPU has no room for more" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_c_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("generate", "-m", STORIES, "-dev", "none", "-n", "3", "-c", "auto", "--json", "-p", "Once")
    assert json.loads(run(*arguments).stdout)["n_ctx"] == 512
    monkeypatch.setattr(fitting, "host_free_bytes", lambda *_, **__: 3_500_000)
    assert json.loads(run(*arguments).stdout)["n_ctx"] == 256
    monkeypatch.setattr(fitting, "host_free_bytes", lambda *_, **__: 1_000_000)
    result = run(*arguments)
    assert result.exit_code == 1
    assert "CPU has no room for a cache of 256 cells" in result.stderr


@pytest.mark.parametrize("verb", ["generate", "chat", "passkey", "batch"])
def test_a_margin_of_each_verb(
    little: None,
    verb: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As many cells as `plan` tells for it; a number of cells that leaves less is told of, with what does."""
    prompts = tmp_path / "prompts"
    prompts.write_text('{"prompt": "Once", "max_tokens": 3}\n')
    words = {
        "generate": "-n 1 -p Once",
        "chat": "-n 1",
        "passkey": "--n-junk 1 -b 512",
        "batch": f"-np 1 -o - -f {prompts}",
    }
    made = of_made_contexts(monkeypatch, "n_ctx")
    long = ("--override-kv", "llama.context_length=int:65536")
    arguments = (verb, "-m", STORIES, "-dev", "none", *long, *words[verb].split(), "-t", "1")
    for margin in ("10", "40"):
        run(*arguments, "-c", "auto", "--margin", margin)
        assert made[-1] == plan(*long, "--margin", margin)["n_ctx"]
    n_ctx = made[-1]
    told = rf"a cache of {n_ctx + 256} cells does not leave 40 % .* n_ctx={n_ctx} \(-c {n_ctx}\) does"
    for asked, is_told in ((n_ctx + 256, True), (n_ctx, False)):
        caplog.clear()
        result = run(*arguments, "-c", str(asked), "--margin", "40")
        assert bool(re.search(told, result.stderr + caplog.text)) == is_told  # an engine's is logged


def test_c_auto_of_batch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text('{"prompt": "Once", "max_tokens": 3}\n')
    monkeypatch.setattr(fitting, "host_free_bytes", lambda *_, **__: 1_000_000)
    result = run("batch", "-m", STORIES, "-dev", "none", "-c", "auto", "-o", "-", "-f", str(prompts))
    assert result.exit_code == 1
    assert "CPU has no room for a cache of 256 cells" in result.stderr
    assert run("batch", "-m", STORIES, "-c", "some", "-o", "-", "-f", str(prompts)).exit_code == 2


@pytest.mark.parametrize(("free", "n_ctx"), [(1 << 40, 2 * 512 + 7), (3_500_000, 256)])
def test_c_auto_of_passkey(monkeypatch: pytest.MonkeyPatch, free: int, n_ctx: int) -> None:
    """Two trained contexts, and what is kept; or what there is room for."""
    monkeypatch.setattr(fitting, "host_free_bytes", lambda *_, **__: free)
    sizes = ("--n-junk", "5", "--n-grp", "2", "--keep", "7", "-c", "auto")
    result = run("passkey", "-m", STORIES, "-dev", "none", *sizes, "--json")
    assert json.loads(result.stdout)["n_ctx"] == n_ctx


def test_c_auto_of_chat() -> None:
    """With self-extend it is so many trained contexts."""
    asked = ("chat", "-m", STORIES, "-dev", "none", "-c", "auto", "--self-extend", "3", "-n", "4")
    result = CliRunner().invoke(main, [*asked, "--show-cache"], input="Hello\n")
    assert result.exit_code == 0
    assert str(3 * 512) in result.stderr


@pytest.mark.parametrize("text", ["auto", "0"])
def test_c_auto_of_serve(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """It is the default, and what 0 means."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(main.commands["serve"], "callback", lambda **values: seen.update(values))
    found = []
    for given in (("-c", text), ()):
        assert run("serve", "-m", STORIES, *given).exit_code == 0
        found.append(seen["n_ctx"])
    assert found == [0, 0]


def test_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remembered for the next run; a picture measures them again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(step_times, "_STEADY", 1e9)  # other tests run beside it
    found = plan("--time")
    assert 0 < found["prompt_seconds"] < 60
    assert found["tokens_per_second_empty"] >= found["tokens_per_second_full"] > 0
    assert found["n_prompt"] == 512
    assert plan("--time")["times"] == found["times"]
    picture = tmp_path / "plan.png"
    result = run("plan", "-m", STORIES, "-dev", "none", "--time", "--plot", str(picture))
    assert result.exit_code == 0
    assert "The first token behind a prompt of 512 tokens" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_a_cell_takes() -> None:
    """Of 5 layers with 4 heads of 8 in K and in V, in F16."""
    assert plan()["memory"]["n_out"] == pytest.approx(5 * 4 * 8 * 2 * 2, rel=0.01)


@pytest.mark.parametrize("heads", [True, False])
def test_a_draft_head_counts(heads: bool) -> None:
    """Unless it is left out; and within 2 % of what a context takes that has drafted."""
    path = STORIES.replace("260K", "260K-mtp")
    options = ["--spec-type", "none"] if not heads else []
    run_of = ["plan", "-m", path, "-dev", "none", "-c", "400", "-b", "64", "-ub", "64", "--json"]
    (part,) = json.loads(run(*run_of, *options).stdout)["parts"]
    sizes: dict[str, Any] = {"n_ctx": 400, "n_batch": 64, "n_ubatch": 64}
    with (
        kvg.Model(path, device="cpu", draft_heads=heads) as model,
        kvg.Context(model, **sizes) as ctx,
    ):
        grow_graphs(ctx)
        decode_apart(ctx)
        if heads:
            ctx.draft([(0, 5, 2)])
        (held,) = ctx.devices
    for kind in ("weight_bytes", "cache_bytes", "compute_bytes"):
        planned, taken = part[kind], getattr(held, kind)
        assert taken <= planned <= 1.02 * taken, kind
    assert part["n_layer"] == 5 + heads
