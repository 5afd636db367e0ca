"""POST /slots/{id}?action=fork, edit: a second slot of the same cells, a text without some of its tokens."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from typing import Any

import httpx
import pytest
from support.served import N_SLOTS, served

from pykvgraph.server.run import Server
from pykvgraph.server.slots import Text

from .conftest import TEMPLATE, load

PROMPT = "Once upon a time there was a little girl who liked to play in the garden with her dog, and one day"
CHAT = "/v1/chat/completions"
MESSAGES = [
    {"role": "system", "content": "You tell short stories to a child."},
    {"role": "user", "content": "The dog ran to the park. What did the dog see there?"},
    {"role": "assistant", "content": "A big red ball, and a cat who was sad."},
    {"role": "user", "content": "And then?"},
]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Server]]:
    with served(load, n_ctx_slot=512, chat_template=TEMPLATE) as found:
        yield found


@pytest.fixture
def client(server: tuple[str, Server]) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server[0], timeout=30) as client:
        yield client


def act(client: httpx.Client, slot: object, action: str, **fields: Any) -> httpx.Response:
    return client.post(f"/slots/{slot}?action={action}", json=fields)


def done(client: httpx.Client, slot: object, action: str, **fields: Any) -> Any:
    reply = act(client, slot, action, **fields)
    assert reply.status_code == 200, reply.text
    assert reply.json()["timings"][f"{action}_ms"] > 0
    return {name: value for name, value in reply.json().items() if name != "timings"}


def say(client: httpx.Client, prompt: Any, **fields: Any) -> Any:
    asked = {"prompt": prompt, "n_predict": 8, "temperature": 0, "return_tokens": True, **fields}
    reply = client.post("/completion", json=asked)
    assert reply.status_code == 200, reply.text
    return reply.json()


def tokens_of(client: httpx.Client, text: str) -> list[int]:
    reply = client.post("/tokenize", json={"content": text, "add_special": True})
    return [int(token) for token in reply.json()["tokens"]]


def n_used(client: httpx.Client) -> int:
    """Cells in use now; not those of a look a moment ago."""
    return int(client.get("/cells").json()["groups"][0]["n_used"])


def test_a_fork_has_the_same_cells(server: tuple[str, Server], client: httpx.Client) -> None:
    """Both slots go on by themselves, and nothing is decoded or copied for the second one."""
    first = say(client, tokens_of(client, PROMPT), id_slot=1)
    text = [*tokens_of(client, PROMPT), *first["tokens"]]
    engine = server[1].service.engine
    before, steps = engine.stats().cells_used, engine.stats().steps
    assert done(client, 1, "fork", id_slot=3) == {"id_slot": 1, "id_slot_fork": 3, "n_forked": len(text) - 1}
    assert (engine.stats().cells_used, engine.stats().steps) == (before, steps)
    assert done(client, 3, "fork", id_slot=2)["n_forked"] == len(text) - 1
    for slot, token, n in (
        (1, 300, len(text) - 1),
        (3, 301, len(text)),
    ):  # the second finds what the first read
        assert say(client, [*text, token], id_slot=slot)["timings"]["cache_n"] == n
    assert done(client, 1, "fork")["id_slot_fork"] in (0, 2)  # of those that nobody had, or had longest ago
    again = done(client, 0, "fork", id_slot=2)
    assert again["n_forked"] in (0, len(text), len(text) + 8)


def test_tokens_are_removed_and_the_slot_goes_on(client: httpx.Client) -> None:
    """Who names the slot finds what is left; nobody else does, as its cells read another text."""
    ids = tokens_of(client, "The fork. " + PROMPT)
    text = [*ids, *say(client, ids, id_slot=3)["tokens"]]
    left = [*text[:8], *text[14:20], *text[26:]]
    n = len(left) - 1  # the last token was never decoded
    told = done(client, 3, "edit", tokens=[[20, 26], [8, 14]], repair=2)
    assert told == {"id_slot": 3, "n_removed": 12, "n_tokens": len(left), "n_cached": n, "n_exact": 10}
    assert say(client, [*left, 300])["timings"]["cache_n"] == 8, "cells of another text were handed out"
    other = say(client, [*left, 300], id_slot=1)
    mine = say(client, [*left, 300], id_slot=3)
    assert mine["timings"]["cache_n"] == len(left) - 1
    assert other["timings"]["cache_n"] >= len(left)
    further = [*left, 300, *mine["tokens"], 301]
    assert say(client, further, id_slot=3)["timings"]["cache_n"] >= len(further) - 2
    saved = say(client, text)["timings"]
    assert saved["cache_n"] >= len(text) - 1, "the old text has lost its cells"
    told = done(client, 3, "edit", tokens=[[12, 14]], repair=100)
    assert told["n_exact"] == 10 < told["n_cached"], "what was read behind a cut is not exact"


def test_all_behind_a_cut_repaired_is_the_text_itself(client: httpx.Client) -> None:
    """Then everybody may have it, and it says what a text says that was never edited."""
    ids = tokens_of(client, "The repair. " + PROMPT)
    text = [*ids, *say(client, ids, id_slot=2)["tokens"]]
    left = [*text[:8], *text[14:]]
    told = done(client, 2, "edit", tokens=[[8, 14]], repair=len(text))
    assert told["n_exact"] == told["n_cached"] == len(left) - 1
    found = say(client, left)
    assert found["timings"]["cache_n"] == len(left) - 1
    assert found["tokens"] == say(client, left, cache_prompt=False)["tokens"]


def test_messages_are_removed(client: httpx.Client) -> None:
    """What is left is what the template writes without them, with the answer behind it."""
    asked: Any = {"max_tokens": 6, "temperature": 0, "reasoning_effort": "none", "id_slot": 1}
    reply = client.post(CHAT, json={**asked, "messages": MESSAGES}).json()
    said = reply["choices"][0]["message"]["content"]
    shorter = [MESSAGES[0], MESSAGES[3]]
    prompts = [
        client.post("/apply-template", json={"messages": each, "reasoning_effort": "none"}).json()["prompt"]
        for each in (MESSAGES, shorter)
    ]
    n_before, n_after = (len(tokens_of(client, prompt)) for prompt in prompts)
    told = done(client, 1, "edit", messages=[2, 1], repair=2)
    assert told["n_removed"] == n_before - n_after
    assert told["n_tokens"] == n_after + 6 and told["n_exact"] < told["n_cached"]
    talk = [*shorter, {"role": "assistant", "content": said}, {"role": "user", "content": "Why?"}]
    usage = client.post(CHAT, json={**asked, "messages": talk}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= n_after
    assert act(client, 1, "edit", messages=[1]).status_code == 200
    refused = act(client, 1, "edit", messages=[1])
    assert refused.status_code == 400 and "send `tokens`" in refused.json()["error"]["message"]


def test_others_are_answered_while_a_template_writes(
    server: tuple[str, Server], client: httpx.Client
) -> None:
    """It writes the conversation once for each message that goes, and may take long."""
    writes, goes_on = threading.Event(), threading.Event()
    ids = tokens_of(client, "The others. " + PROMPT)

    def without(numbers: Collection[int]) -> list[int]:
        writes.set()
        goes_on.wait(60)
        return ids[:4] + ids[9:]

    server[1].service.slots.put(0, Text(ids, b"", without=without, n_prompt=len(ids)))
    replies: list[httpx.Response] = []
    edit = threading.Thread(target=lambda: replies.append(act(client, 0, "edit", messages=[1])))
    edit.start()
    try:
        assert writes.wait(60)
        assert httpx.get(f"{server[0]}/health", timeout=10).status_code == 200
    finally:
        goes_on.set()
        edit.join(60)
    assert replies[0].json()["n_removed"] == 5


BAD_EDITS: list[tuple[dict[str, Any], str]] = [
    ({}, "send `tokens`"),
    ({"tokens": [[1, 2]], "messages": [1]}, "send `tokens`"),
    ({"tokens": [[1, 2]] * 65}, "64"),
    ({"tokens": [[2, 2]]}, "must have tokens"),
    ({"tokens": [[3, 2]]}, "must have tokens"),
    ({"tokens": [[-1, 2]]}, "from 0"),
    ({"tokens": [[1, 4], [3, 5]]}, "overlap"),
    ({"tokens": [[1, 9999]]}, "within"),
    ({"tokens": [[1, 2, 3]]}, "span"),
    ({"tokens": [[1, True]]}, "span"),
    ({"tokens": [3]}, "span"),
    ({"tokens": {"0": 1}}, "array"),
    ({"tokens": [[1, 2]], "repair": -1}, "repair"),
    ({"tokens": [[1, 2]], "repair": 100_000}, "repair"),
    ({"messages": [0]}, "send `tokens`"),  # it is no conversation
]


def test_what_can_not_be_done_is_refused(client: httpx.Client) -> None:
    say(client, "The edits. " + PROMPT, id_slot=2)
    for fields, told in BAD_EDITS:
        reply = act(client, 2, "edit", **fields)
        assert reply.status_code == 400 and told in reply.json()["error"]["message"], (fields, reply.text)
    for fields in ({"id_slot": 2}, {"id_slot": N_SLOTS}, {"id_slot": "x"}):
        assert act(client, 2, "fork", **fields).status_code == 400
    client.post(CHAT, json={"messages": MESSAGES, "max_tokens": 1, "id_slot": 2})
    for numbers in ([4], [-1], ["x"], [True]):
        assert act(client, 2, "edit", messages=numbers).status_code == 400, numbers
    assert client.post("/slots/2?action=fork", content=b"[]").status_code == 400
    assert client.post("/slots/2?action=fork").status_code == 200  # no body names no slot


def test_forks_that_name_no_slot_get_one_each() -> None:
    """The slots that never had a text first, then whose text came longest ago, by a fork or otherwise."""
    with served(load, n_ctx_slot=512) as (url, _), httpx.Client(base_url=url, timeout=30) as client:
        ids = tokens_of(client, PROMPT)
        say(client, ids, id_slot=0)
        forked = [done(client, 0, "fork")["id_slot_fork"] for _ in range(N_SLOTS - 1)]
        assert sorted(forked) == list(range(1, N_SLOTS))
        done(client, forked[0], "edit", tokens=[[4, 9]])
        say(client, [*ids, 20], id_slot=forked[1])
        assert done(client, 0, "fork")["id_slot_fork"] == forked[2]


def test_a_slot_of_another_key_is_nobody_else_s() -> None:
    with served(load, n_ctx_slot=512, api_keys=("one", "two")) as (url, _):
        mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        with httpx.Client(base_url=url, timeout=30) as client:
            asked = {"prompt": PROMPT, "n_predict": 1, "id_slot": 1}
            assert client.post("/completion", json=asked, headers=mine).status_code == 200
            n_forked = [
                client.post("/slots/1?action=fork", json={"id_slot": 2}, headers=headers).json()["n_forked"]
                for headers in (other, mine)
            ]
            assert n_forked[0] == 0 < n_forked[1]
            edit = {"tokens": [[1, 2]]}
            refused = client.post("/slots/2?action=edit", json=edit, headers=other)
            assert refused.status_code == 400 and "no text of yours" in refused.text
            assert client.post("/slots/2?action=edit", json=edit, headers=mine).status_code == 200


def test_an_edited_slot_is_not_saved(tmp_path: Any) -> None:
    with (
        served(load, n_ctx_slot=512, slot_save_path=str(tmp_path)) as (url, _),
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        say(client, PROMPT, id_slot=1)
        done(client, 1, "edit", tokens=[[4, 9]], repair=2)
        refused = act(client, 1, "save", filename="a")
        assert refused.status_code == 400 and "edited" in refused.json()["error"]["message"]
        assert act(client, 1, "erase").json()["n_erased"] > 0
    with (
        served(load, n_ctx_slot=512, slots=False) as (url, _),
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        assert act(client, 1, "fork").status_code == 501
