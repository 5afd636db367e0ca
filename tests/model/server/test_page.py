"""The page at /, and what /cells tells it."""

from __future__ import annotations

import concurrent.futures
import json
import re
import threading
import time
from typing import Any

import httpx
import numpy as np
import pytest
from click.testing import CliRunner
from support.served import N_SLOTS, served

import pykvgraph as kvg
from pykvgraph.cli import main
from pykvgraph.engine.step import Stepper
from pykvgraph.server import looks, run
from pykvgraph.server.settings import Settings

from .conftest import STORIES, load

SHARED = "Once upon a time there was a little girl named Lily who had a cat. " * 3
FILES = ("/", "/index.html", "/page.css", "/page.js", "/icon.svg")


def naive(view: kvg.CellsView) -> list[tuple[int, int]]:
    """(who, marks) of each cell, one at a time."""
    found = []
    for cell in range(len(view.pos)):
        seqs = [seq for seq in range(view.seq.shape[1]) if view.seq[cell, seq]]
        who = seqs[0] if len(seqs) == 1 else -3 if seqs else -2 if view.held[cell] else -1
        is_held, is_pending = bool(view.held[cell]), bool(view.shift[cell]) and not view.waiting[cell]
        found.append((who, is_held + 2 * is_pending + 4 * bool(view.waiting[cell])))
    return found


def unrolled(runs: list[int]) -> list[tuple[int, int]]:
    triples = zip(runs[::3], runs[1::3], runs[2::3], strict=True)
    return [(who, marks) for n, who, marks in triples for _ in range(n)]


def a_view(n_cells: int, n_seqs: int, *, settled: bool) -> kvg.CellsView:
    """Cells of every kind, in stretches and alone."""
    rng = np.random.default_rng(n_cells)
    stretch = rng.integers(0, 9, n_cells // 5 + 1).repeat(5)[:n_cells]
    seq = (rng.random((n_cells, n_seqs)) < 0.4) & (stretch > 2)[:, None]
    held = np.where(stretch < 2, 0, rng.integers(0, 2, n_cells)).astype(np.uint32)
    used = seq.any(axis=1) | (held > 0)
    pos = np.where(used, np.arange(n_cells), -1).astype(np.int32)
    shift = np.where(used, rng.integers(-1, 2, n_cells), 0).astype(np.int32)
    return kvg.CellsView(pos, seq, shift, np.zeros(n_cells, np.uint8), held, settled=settled)


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("n_cells", [1, 7, 500])
def test_runs_are_the_cells(n_cells: int, settled: bool) -> None:
    view = a_view(n_cells, 3, settled=settled)
    runs = looks.runs_of(*looks.places_of(view))
    assert unrolled(runs) == naive(view)
    assert all(runs[i + 1 : i + 3] != runs[i + 4 : i + 6] for i in range(0, len(runs) - 3, 3))


@pytest.mark.parametrize("n_cells", [33, 64, 1000])
def test_a_place_of_a_large_cache_is_whoever_has_most_of_it(
    monkeypatch: pytest.MonkeyPatch, n_cells: int
) -> None:
    monkeypatch.setattr(looks, "MAX_PLACES", 32)
    view = a_view(n_cells, 3, settled=False)
    each = looks.cells_of_a_place(n_cells)
    found = unrolled(looks.runs_of(*looks.places_of(view)))
    alone = naive(view)
    assert len(found) == -(-n_cells // each) <= 32
    for place, (who, marks) in enumerate(found):
        own = alone[place * each : (place + 1) * each]
        used = [kind for kind, _ in own if kind != -1]
        assert used.count(who) == max(map(used.count, used)) if used else who == -1
        assert marks == np.bitwise_or.reduce([mark for _, mark in own])


def test_cells_and_requests_while_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts that begin alike, while one waits; beside what the engine showed for it."""
    shown: list[kvg.EngineLook] = []
    look = kvg.Engine.look

    looks = threading.Event()

    def look_once_all_talk(engine: kvg.Engine) -> kvg.EngineLook:
        looks.set()
        found = look(engine)
        while (len(found.running), len(found.waiting)) != (N_SLOTS, 1) or not all(
            text.n_said for text in found.running
        ):
            found = look(engine)
        shown.append(found)
        return found

    come: list[kvg.Request] = []
    submit, step = kvg.Engine.submit, Stepper.step

    def noted(engine: kvg.Engine, *given: Any, **more: Any) -> kvg.Request:
        come.append(submit(engine, *given, **more))
        return come[-1]

    def step_once_all_came(stepper: Stepper) -> None:
        """Else on a loaded machine the first text ends before the last one comes, or anybody looks."""
        while len(come) <= N_SLOTS or not looks.is_set():
            time.sleep(0.001)
        step(stepper)

    monkeypatch.setattr(kvg.Engine, "look", look_once_all_talk)
    monkeypatch.setattr(kvg.Engine, "submit", noted)
    monkeypatch.setattr(Stepper, "step", step_once_all_came)
    with (
        served(load) as (url, _),
        httpx.Client(base_url=url, timeout=30) as client,
        concurrent.futures.ThreadPoolExecutor(N_SLOTS + 2) as pool,
    ):

        def ask(number: int) -> httpx.Response:
            body = {"prompt": f"{SHARED}{number}", "n_predict": 300, "ignore_eos": True}
            return client.post("/completion", json=body)

        look_at = pool.submit(client.get, "/cells")
        answers = [pool.submit(ask, number) for number in range(N_SLOTS + 1)]
        told = look_at.result(60).json()
        assert all(answer.result(60).status_code == 200 for answer in answers)
    view, group = shown[0].views[0], told["groups"][0]
    each = naive(view)
    assert unrolled(group["runs"]) == each and group["n_cells"] == len(each) == 2048
    assert group["n_used"] == sum(who != -1 for who, _ in each)
    assert group["n_shared"] == sum(who == -3 for who, _ in each) > len(SHARED.split())
    assert group["n_only_held"] == sum(who == -2 for who, _ in each)
    assert (told["n_running"], told["n_waiting"], len(told["waiting"])) == (N_SLOTS, 1, 1)
    assert told["waiting"][0]["seq"] == told["waiting"][0]["n_cached"] == -1
    for text in told["running"]:
        own = np.flatnonzero(view.seq[:, text["seq"]])
        assert text["n_cells"] == len(own) == text["n_prompt"] + text["n_said"] - 1 == text["n_decoded"]
        assert text["n_shared"] == sum(each[cell][0] == -3 for cell in own)
        assert text["letter"] == "abcd"[text["seq"]]
    assert sum(text["n_cached"] for text in told["running"]) == told["prefix_hit_tokens"]
    assert SHARED[:20] not in json.dumps(told)


def test_a_look_is_taken_a_few_times_a_second(client: httpx.Client) -> None:
    told: list[float] = []
    begin = time.monotonic()
    while len(set(told)) < 3 and time.monotonic() < begin + 30:
        told.append(client.get("/cells").json()["seconds"])
    gaps = np.diff(sorted(set(told)))
    assert len(told) > len(gaps) + 1 == 3 and min(gaps) > 0.2


def test_the_page_asks_nobody_else(client: httpx.Client) -> None:
    """Its files are there, of the right kind, and whatever they name is there, too."""
    for path in FILES:
        reply = client.get(path)
        assert reply.status_code == 200 and len(reply.content) > 100
        kind = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}.get(
            path.split(".")[-1], "text/html"
        )
        assert reply.headers["content-type"].split(";")[0] == kind
        assert reply.headers["x-content-type-options"] == "nosniff"
        policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'" and set(policy.values()) == {"'none'", "'self'"}
    html = client.get("/").text
    named = re.findall(r'(?:src|href)="([^"]+)"', html)
    assert sorted(named) == ["icon.svg", "page.css", "page.js"]
    assert not re.search(r"<style|style=|\son\w+=|<script>", html)  # the policy would forbid them
    for path in FILES:
        assert not re.search(r"(?<!xmlns=\")https?://|url\(", client.get(path).text)
    script = client.get("/page.js").text
    ids = set(re.findall(r'byId\("([^"]+)"\)', script))
    assert ids <= set(re.findall(r'id="([^"]+)"', html))
    fetched = re.findall(r'fetch\("([^"]+)"', script)
    assert sorted(fetched) == ["cells", "v1/chat/completions"]


def test_who_has_no_key_sees_the_page_and_nothing_else() -> None:
    with served(load, api_keys=("secret",)) as (url, _), httpx.Client(base_url=url) as client:
        assert all(client.get(path).status_code == 200 for path in FILES)
        assert client.get("/cells").status_code == 401
        assert client.get("/cells", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_without_a_page_or_slots() -> None:
    with served(load, page=False, slots=False) as (url, _), httpx.Client(base_url=url) as client:
        assert {client.get(path).status_code for path in FILES} == {404}
        assert client.get("/cells").status_code == 501


@pytest.mark.parametrize(("flag", "is_there"), [("--no-ui", False), ("--no-webui", False), ("--ui", True)])
def test_the_flag(monkeypatch: pytest.MonkeyPatch, flag: str, is_there: bool) -> None:
    """llama-server has both names."""
    started: list[Settings] = []

    class Unserved:
        def __init__(self, settings: Settings, *_: Any) -> None:
            started.append(settings)

        def run(self, **_: Any) -> None:
            pass

    monkeypatch.setattr(run, "Server", Unserved)
    result = CliRunner().invoke(main, ["serve", "-m", str(STORIES), "--port", "0", flag])
    assert (result.exit_code, [settings.page for settings in started]) == (0, [is_there])
