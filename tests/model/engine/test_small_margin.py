"""An engine whose cache leaves others too little memory says what to type, and works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import where

import pykvgraph as kvg
from pykvgraph.plan import fitting


def warnings_of(caplog: pytest.LogCaptureFixture, stories: Path, n_ctx: int, margin: int = 20) -> list[str]:
    caplog.clear()
    with (
        kvg.Model(stories, device="cpu") as model,
        kvg.Engine(model, n_ctx=n_ctx, n_seq_max=2, margin=margin) as engine,
    ):
        assert engine.submit([1, 5, 6], kvg.SamplingParams(max_tokens=2)).result().tokens
    return [record.getMessage() for record in caplog.records if record.name == "pykvgraph.engine"]


@pytest.mark.skipif(where.device != "cpu", reason="it is about the memory of the host")
def test_what_to_type(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stories: Path
) -> None:
    assert warnings_of(caplog, stories, 8192) == []
    monkeypatch.setattr(fitting, "host_free_bytes", lambda *_, **__: 10_000_000)
    (warning,) = warnings_of(caplog, stories, 8192)
    found = re.fullmatch(r"CPU: a cache of 8192 cells .* n_ctx=(\d+) \(-c \1\) does", warning)
    assert found
    fitting_n_ctx = int(found[1])
    assert warnings_of(caplog, stories, fitting_n_ctx) == []
    assert len(warnings_of(caplog, stories, fitting_n_ctx + 256)) == 1
    assert warnings_of(caplog, stories, fitting_n_ctx + 256, margin=10) == []
    (warning,) = warnings_of(caplog, stories, fitting_n_ctx, margin=30)
    assert "does not leave 30 % " in warning
    monkeypatch.setattr(fitting, "host_free_bytes", lambda *_, **__: 1_000)
    (warning,) = warnings_of(caplog, stories, 512)
    assert warning.endswith("free memory there")
