"""`-md` with an assistant: it is seen by the file, and drafts for the model."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner
from support.architectures import ArchSpec
from support.assistants import crafted_pair
from support.kept_graphs import grow_graphs
from support.planned import decode_apart

import pykvgraph as kvg
from pykvgraph.cli import main
from pykvgraph.cli.draft import draft_arguments, spec_type_of
from pykvgraph.server.engine_spec import EngineSpec

SPEC = ArchSpec("gemma4", n_layer=4, window=24)


@pytest.fixture
def pair(architecture: Callable[[ArchSpec], Path], tmp_path: Path) -> tuple[str, str]:
    model, assistant = crafted_pair(SPEC, architecture(SPEC), tmp_path, 0.0)
    return str(model), str(assistant)


def test_it_is_seen_by_the_file(pair: tuple[str, str]) -> None:
    model, assistant = pair
    for wanted in (None, "draft-mtp"):
        assert spec_type_of(wanted, assistant, model, {}) == "draft-mtp"
    assert draft_arguments("draft-mtp", assistant) == {"draft_heads": False, "assistant": assistant}
    assert spec_type_of(None, model, model, {}) == "draft-simple"
    assert draft_arguments("draft-simple", model) == {"draft_heads": False, "assistant": None}
    with pytest.raises(click.UsageError, match="no use for -md"):
        spec_type_of("draft-mtp", model, model, {})
    with pytest.raises(click.UsageError, match="no use for -md"):
        spec_type_of("ngram-simple", assistant, model, {})
    with pytest.raises(click.UsageError, match="whose drafts are draft-mtp"):
        spec_type_of("draft-simple", assistant, model, {})


def test_a_damaged_one_is_taken_for_what_is_wanted(pair: tuple[str, str], tmp_path: Path) -> None:
    """So that its loading says what is wrong, and not that the command is."""
    model, assistant = pair
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(Path(assistant).read_bytes()[:3000])
    assert spec_type_of("draft-mtp", str(damaged), model, {}) == "draft-mtp"
    assert spec_type_of(None, str(damaged), model, {}) == "draft-simple"


def test_batch_answers_the_same(pair: tuple[str, str], tmp_path: Path) -> None:
    model, assistant = pair
    prompts, found = tmp_path / "prompts.jsonl", []
    prompts.write_text(json.dumps({"tokens": [1, 40, 41], "max_tokens": 20, "temperature": 0}) + "\n")
    for options in ([], ["-md", assistant]):
        answers = tmp_path / f"{len(options)}.jsonl"
        given = ["-f", str(prompts), "-m", model, "-o", str(answers), "-c", "256", "-dev", "none", *options]
        done = CliRunner().invoke(main, ["batch", *given])
        assert done.exit_code == 0, done.output
        found.append(json.loads(answers.read_text())["text"])
    assert found[0] and found[1] == found[0]


def test_serve_loads_it(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, assistant = pair
    specs: list[EngineSpec] = []

    def told(settings: object, engine: EngineSpec, *others: object) -> SimpleNamespace:
        specs.append(engine)
        return SimpleNamespace(run=lambda sockets: None)

    monkeypatch.setattr(importlib.import_module("pykvgraph.cli.serve"), "_server", told)
    given = ["serve", "-m", model, "-md", assistant, "-c", "256", "-dev", "none", "--port", "0"]
    done = CliRunner().invoke(main, given)
    assert done.exit_code == 0, done.output
    with specs[0].load() as engine:
        assert engine.model.assistant == Path(assistant) and engine.model.n_draft_heads == 0


def test_inspect_says_what_it_is_for(pair: tuple[str, str]) -> None:
    done = CliRunner().invoke(main, ["inspect", pair[1]])
    assert done.exit_code == 0, done.output
    assert "those of a gemma4 model of width 64" in done.output


def test_plan_counts_it(pair: tuple[str, str]) -> None:
    """As what is held when both are loaded and it has drafted; another draft model has a plan of its own."""
    model, assistant = pair
    run_of = ["plan", "-m", model, "-dev", "none", "-c", "400", "-b", "64", "-ub", "64"]
    done = CliRunner().invoke(main, [*run_of, "--json", "-md", assistant])
    assert done.exit_code == 0, done.output
    (part,) = json.loads(done.stdout)["parts"]
    with (
        kvg.Model(model, device="cpu", assistant=assistant) as loaded,
        kvg.Context(loaded, n_ctx=400, n_batch=64, n_ubatch=64) as ctx,
    ):
        grow_graphs(ctx)
        decode_apart(ctx)
        ctx.draft([(0, 5, 2)])
        (held,) = ctx.devices
    for kind in ("weight_bytes", "cache_bytes", "compute_bytes"):
        planned, taken = part[kind], getattr(held, kind)
        assert taken <= planned <= 1.02 * taken, kind
    done = CliRunner().invoke(main, [*run_of, "-md", model])
    assert done.exit_code == 2 and "a plan of its own" in done.output
