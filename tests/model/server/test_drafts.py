"""Drafts of a server: the same answers, and llama-server's names for what was drafted."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from support.architectures import ArchSpec
from support.drafting import always_pays
from support.served import N_SLOTS, served

import pykvgraph as kvg
from pykvgraph.cli import main
from pykvgraph.cli.draft import draft_arguments, spec_type_of
from pykvgraph.server.engine_spec import EngineSpec

STORIES = Path(__file__).parents[2] / "data" / "stories260K.gguf"
ASKED = {"prompt": "Once upon a time", "n_predict": 40, "temperature": 0.0}


def test_drafts_are_counted(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is its own draft: greedy, everything holds. 1 token by the prompt, then 1 + 4 a step."""
    plain = client.post("/completion", json=ASKED).json()
    assert plain["generation_settings"]["speculative.types"] == "none"
    assert not any(name.startswith("draft") for name in plain["timings"])
    always_pays(monkeypatch)

    def load() -> kvg.Engine:
        model = kvg.Model(STORIES, device="cpu")
        return kvg.Engine(model, n_ctx=2048, n_seq_max=N_SLOTS, draft=model)

    with (
        served(load, n_ctx_slot=512, metrics=True, spec_type="draft-simple") as (url, _),
        httpx.Client(base_url=url, timeout=30) as drafts,
    ):
        found = drafts.post("/completion", json=ASKED).json()
        assert found["content"] == plain["content"]
        assert found["timings"]["draft_n"] == found["timings"]["draft_n_accepted"] == 31
        assert found["generation_settings"]["speculative.types"] == "draft-simple"
        for name in ("draft", "accepted"):
            text = drafts.get("/metrics").text
            assert re.search(rf"^kvgraph:spec_decode_num_{name}_tokens_total 31.0$", text, re.MULTILINE)
            assert re.search(r'^kvgraph:spec_decode_refused_total{reason="cells"} \d', text, re.MULTILINE)
        assert "llamacpp:spec_decode_num_drafts_total 8\n" in text  # seven of 4 tokens, one of 3
        assert all(slot["speculative"] for slot in drafts.get("/slots").json())


def test_refused_drafts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By reason, as the engine counts them: here there are never cells for any."""
    always_pays(monkeypatch)
    engines: list[kvg.Engine] = []

    def load() -> kvg.Engine:
        model = kvg.Model(STORIES, device="cpu")
        engines.append(kvg.Engine(model, n_ctx=2048, n_seq_max=N_SLOTS, draft="ngram", draft_share=0.0))
        return engines[0]

    with served(load, metrics=True) as (url, _):
        asked = {**ASKED, "logit_bias": [[300, 1e6]]}  # the same token again and again
        assert httpx.post(f"{url}/completion", json=asked, timeout=30).status_code == 200
        text = httpx.get(f"{url}/metrics").text
        expected = engines[0].stats().drafts_refused
    found = re.findall(r'^kvgraph:spec_decode_refused_total{reason="(\w+)"} (\S+)$', text, re.MULTILINE)
    assert {reason: float(n) for reason, n in found} == expected
    assert expected["cells"] > 0


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ["--spec-type", "ngram-mod"],
            "--spec-type ngram-mod: here it is one of none, draft-simple, draft-mtp",
        ),
        (["--spec-type", "draft-simple"], "name the draft model, with -md FILE"),
        (["--spec-type", "none", "-md", str(STORIES)], "has no use for -md"),
        (["--spec-type", "ngram-simple", "-md", str(STORIES)], "has no use for -md"),
        (["--spec-type", "draft-mtp", "-md", str(STORIES)], "has no use for -md"),
        (["-md", "/nowhere.gguf"], "does not exist"),
        (["--draft-max", "0"], "0 is not in the range"),
    ],
)
def test_what_is_not_there_is_refused(arguments: list[str], why: str) -> None:
    found = CliRunner().invoke(main, ["serve", "-m", str(STORIES), *arguments])
    assert found.exit_code == 2
    assert why in " ".join(found.output.split())


def test_a_file_with_a_draft_head_has_drafts_by_it(
    architecture: Callable[[ArchSpec], Path], tmp_path: Path
) -> None:
    """Of -md, --spec-type and what the file has; what is no model here is for its loading to refuse."""
    spec = ArchSpec("glm4moe", n_rot=16, n_expert=8, n_ff_shared=96, draft_head=True)
    with_head, without = str(architecture(spec)), str(architecture(replace(spec, draft_head=False)))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    for wanted, draft, model, found in (
        (None, None, with_head, "draft-mtp"),
        (None, None, without, "none"),
        (None, None, str(broken), "none"),
        ("none", None, with_head, "none"),
        ("ngram-simple", None, with_head, "ngram-simple"),
        (None, without, with_head, "draft-simple"),
        ("draft-mtp", None, without, "draft-mtp"),  # which loading refuses
    ):
        assert spec_type_of(wanted, draft, model, {}) == found
    for kind, loads_head in (("", False), ("mtp", True), ("ngram", False)):
        spec_of_engine = EngineSpec(
            with_head,
            kind,
            {"device": "cpu", **draft_arguments(f"draft-{kind}", None)},
            {"n_ctx": 256, "n_threads": 1, "background": False},
            {},
        )
        with spec_of_engine.load() as engine:
            assert (engine.model.n_draft_heads == 1) is loads_head
