"""POST /slots/{id}: a slot's text in a file, and found again; what leads out of the folder, or is broken."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support import chance
from support.served import llama_server, served, served_alone

import pykvgraph as kvg
from pykvgraph.prefix.prefix_file import unpack

from .conftest import STORIES, load

PROMPT = "Once upon a time there was a little girl who liked to play in the garden with her dog, and one day"
N_VOCAB = 512


@contextlib.contextmanager
def saving(folder: Path, **settings: Any) -> Iterator[httpx.Client]:
    with (
        served(load, n_ctx_slot=512, slot_save_path=str(folder), **settings) as (url, _),
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    with saving(folder) as client:
        yield client


def act(client: httpx.Client, slot: object, action: str, *, key: str = "", **fields: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return client.post(f"/slots/{slot}?action={action}", json=fields, headers=headers)


def say(client: httpx.Client, prompt: str = PROMPT, *, key: str = "", **fields: Any) -> Any:
    asked = {"prompt": prompt, "n_predict": 8, "temperature": 0, **fields}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    reply = client.post("/completion", json=asked, headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_slot_is_saved_and_restored(client: httpx.Client, folder: Path) -> None:
    first = say(client, id_slot=2)
    assert first["id_slot"] == 2
    saved = act(client, 2, "save", filename="two.bin").json()
    n = first["tokens_evaluated"] + first["tokens_predicted"] - 1  # the last token was never decoded
    size = (folder / "two.bin").stat().st_size
    assert saved.pop("timings")["save_ms"] > 0
    assert saved == {"id_slot": 2, "filename": "two.bin", "n_saved": n, "n_written": size}
    with saving(folder) as other:
        restored = act(other, 1, "restore", filename="two.bin").json()
        assert restored.pop("timings")["restore_ms"] > 0
        assert restored == {"id_slot": 1, "filename": "two.bin", "n_restored": n, "n_read": size}
        again = say(other, PROMPT + first["content"])
        assert again["timings"]["cache_n"] == n
        assert act(other, 1, "save", filename="again.bin").json()["n_saved"] == n
    assert (folder / "again.bin").read_bytes() == (folder / "two.bin").read_bytes()


def test_an_erased_text_is_decoded_again(client: httpx.Client) -> None:
    text = "The erased slot. " + PROMPT
    n = say(client, text, id_slot=3)["tokens_evaluated"]
    assert say(client, text, id_slot=3)["timings"]["cache_n"] == n - 1
    assert act(client, 3, "erase").json() == {"id_slot": 3, "n_erased": n + 7}
    assert act(client, 3, "erase").json() == {"id_slot": 3, "n_erased": 0}
    assert act(client, 3, "save", filename="none").json()["n_saved"] == 0
    assert say(client, text, id_slot=3)["timings"]["cache_n"] <= 1  # BOS is of all texts


def test_llama_server_answers_with_the_same_fields(client: httpx.Client, tmp_path: Path) -> None:
    arguments = ("-c", "1024", "-np", "2", "--slot-save-path", str(tmp_path))
    with llama_server(STORIES, *arguments) as url, httpx.Client(base_url=url) as theirs:
        for each in (client, theirs):
            say(each, id_slot=1)
        asked: list[tuple[object, str, dict[str, Any]]] = [
            (1, "save", {"filename": "same"}),
            (1, "restore", {"filename": "same"}),
            (1, "erase", {}),
            (1, "burn", {}),
            ("x", "erase", {}),
            (1, "restore", {"filename": "not there"}),
            (1, "save", {"filename": "../a"}),
        ]
        for slot, action, fields in asked:
            ours, other = act(client, slot, action, **fields), act(theirs, slot, action, **fields)
            assert ours.status_code == other.status_code
            assert set(ours.json()) == set(other.json())
            if ours.status_code == 200:
                counts = {"n_saved", "n_restored", "n_erased"} & set(ours.json())
                assert all(ours.json()[name] == other.json()[name] for name in counts)
            else:
                assert ours.json()["error"]["type"] == other.json()["error"]["type"]


NAMES = ["", ".", "..", "../a", "/etc/passwd", "a/b", "a\\b", "a\0b", "a\nb", "a.", " a", "a ", "~/\u2215"]
NAMES += ["a" * 256, "\u00e9" * 128, "\ud800", "a:b", "*", "\ufeffa", "link", "dangling", "folder/../../a"]


@pytest.mark.parametrize("action", ["save", "restore"])
def test_a_name_stays_in_the_folder(tmp_path: Path, action: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    secret = tmp_path / "a"
    secret.write_bytes(b"secret")
    (folder / "link").symlink_to(secret)
    (folder / "dangling").symlink_to(tmp_path / "new")
    with saving(folder) as client:
        say(client, id_slot=0)
        for name in [*NAMES, 3, None, ["a"], {"a": 1}]:
            reply = client.post(f"/slots/0?action={action}", content=json.dumps({"filename": name}))
            assert reply.status_code == 400, (name, reply.text)
        for body in (b"", b"{", b"[]", b"\xff", b"{}"):
            assert client.post(f"/slots/0?action={action}", content=body).status_code == 400
    assert secret.read_bytes() == b"secret"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "dangling", "folder", "link"]


def test_slots_that_are_not_there(client: httpx.Client, address: str) -> None:
    for slot in ("4", "-1", "1e3", "9" * 30, "%00", "\u0661", "0x1"):
        reply = act(client, slot, "erase")
        assert (reply.status_code, reply.json()["error"]["message"]) == (400, "Invalid slot ID"), slot
    for bad in (4, -2, "0", True):
        reply = client.post("/completion", json={"prompt": "a", "n_predict": 1, "id_slot": bad})
        assert reply.status_code == 400 and "id_slot" in reply.text
    off = httpx.post(f"{address}/slots/0?action=erase")
    assert (off.status_code, off.json()["error"]["type"]) == (501, "not_supported_error")


def test_a_body_that_is_longer_than_a_name(folder: Path) -> None:
    """The event loop reads it itself."""
    with saving(folder) as client:
        for path in ("/slots/1?action=save", "/slots/1?action=restore", "/lora-adapters"):
            assert client.post(path, content=b" " * (1 << 16) + b"[").status_code == 413
            assert client.post(path, content=b" " * (1 << 15) + b"[").status_code == 400


def test_a_broken_file_changes_nothing(folder: Path) -> None:
    with saving(folder) as client:
        say(client, id_slot=0)
        act(client, 0, "save", filename="whole")
    data = (folder / "whole").read_bytes()
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    with saving(folder, metrics=True) as client:
        rng = random.Random(chance.seed(1))
        for _ in range(40):
            at = rng.randrange(len(data))
            cut = data[:at] if rng.random() < 0.5 else data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
            (folder / "broken").write_bytes(cut)
            reply = act(client, 0, "restore", filename="broken")
            assert reply.status_code == 400, reply.text
            assert str(folder) not in reply.text
        os.truncate(folder / "broken", 1 << 40)
        for name in ("pipe", "folder", "broken"):
            assert act(client, 0, "restore", filename=name).status_code == 400
            assert act(client, 0, "save", filename=name).json().get("n_saved", 0) == 0
        (folder / "broken").unlink()
        assert act(client, 0, "save", filename="nothing").json()["n_saved"] == 0
        assert say(client)["timings"]["cache_n"] == 0


def test_a_full_disk_leaves_the_old_file(client: httpx.Client, folder: Path) -> None:
    say(client, id_slot=1)
    act(client, 1, "save", filename="full")
    old = (folder / "full").read_bytes()
    say(client, PROMPT + " the dog", id_slot=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        reply = act(client, 1, "save", filename="full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert reply.status_code == 500
    assert reply.json()["error"]["message"] == "Unable to save slot: File too large"
    assert (folder / "full").read_bytes() == old
    assert not list(folder.glob(".*"))
    assert say(client, id_slot=1)["tokens_predicted"] == 8


CODES = {
    errno.EISDIR: 400,
    errno.ENAMETOOLONG: 400,
    errno.EILSEQ: 400,
    errno.EACCES: 403,
    errno.EPERM: 403,
    errno.ENOSPC: 500,
    errno.EDQUOT: 500,
    errno.EROFS: 500,
    errno.EIO: 500,
    errno.EMFILE: 500,
}


@pytest.mark.parametrize("number", CODES, ids=lambda number: errno.errorcode[number])
def test_whose_fault_an_error_of_the_system_is(
    client: httpx.Client, folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A name, a permission, or the server's disk: as a full one is, no test can have all of them."""
    say(client, id_slot=1)
    assert act(client, 1, "save", filename="system").status_code == 200

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(folder / "secret"))

    monkeypatch.setattr(kvg.Engine, "save_prefix", fail)
    monkeypatch.setattr(kvg.Engine, "load_prefix", fail)
    for action in ("save", "restore"):
        reply = act(client, 1, action, filename="system")
        error = reply.json()["error"]
        assert reply.status_code == error["code"] == CODES[number]
        assert error["message"] == f"Unable to {action} slot: {os.strerror(number)}"
        assert (error["type"] == "server_error") == (reply.status_code == 500)
        assert (error["type"] == "permission_error") == (reply.status_code == 403)


def test_what_is_no_file_is_not_written_to(folder: Path) -> None:
    for name, make in (("pipe2", os.mkfifo), ("folder2", os.mkdir)):
        make(folder / name)
    with saving(folder) as client:
        for _ in range(2):  # without a text, and with one
            for name in ("pipe2", "folder2"):
                for action in ("save", "restore"):
                    reply = act(client, 0, action, filename=name)
                    assert (reply.status_code, reply.json()["error"]["type"]) == (
                        400,
                        "invalid_request_error",
                    )
                    assert str(folder) not in reply.text
            say(client, id_slot=0)
    assert (folder / "folder2").is_dir() and (folder / "pipe2").is_fifo()


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with saving(folder) as client:
        say(client, id_slot=0)
        folder.rmdir()
        saved, restored = (act(client, 0, action, filename="a") for action in ("save", "restore"))
    assert (saved.status_code, restored.status_code) == (500, 400)  # a file that isn't there is the client's


def test_a_text_is_its_owners(client: httpx.Client, folder: Path) -> None:
    before = os.umask(0)
    try:
        say(client, id_slot=1)
        act(client, 1, "save", filename="own")
    finally:
        os.umask(before)
    assert (folder / "own").stat().st_mode & 0o777 == 0o600


def test_a_taken_slot_is_waited_for(folder: Path) -> None:
    with (
        served(load, n_ctx_slot=512, slot_save_path=str(folder)) as (url, server),
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        found: list[Any] = []
        slots = server.service.slots
        talk = threading.Thread(target=lambda: found.append(say(client, id_slot=1, n_predict=30)))
        save = threading.Thread(target=lambda: found.append(act(client, 1, "save", filename="late").json()))
        with server.service.engine._loop._stepping:  # the engine stands still
            talk.start()
            while not slots.n_processing:
                time.sleep(0.001)
            save.start()
            while not slots._ends[1]:
                time.sleep(0.001)
            assert client.get("/slots").json()[1]["is_processing"]
        talk.join()
        save.join()
    [saved] = [each for each in found if "n_saved" in each]
    [said] = [each for each in found if "content" in each]
    assert saved["n_saved"] == said["tokens_evaluated"] + 29


def test_a_key_saves_its_own_texts(folder: Path) -> None:
    with saving(folder, api_keys=("mine", "yours")) as client:
        say(client, key="mine", id_slot=1)
        assert act(client, 1, "save", filename="keyed").status_code == 401
        assert act(client, 1, "save", key="yours", filename="keyed").json()["n_saved"] == 0
        assert act(client, 1, "erase", key="yours").json()["n_erased"] == 0
        assert act(client, 1, "save", key="mine", filename="keyed").json()["n_saved"] > 8


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_a_whole_file(tmp_path: Path) -> None:
    """kill -9 at random moments of a server that saves all the time: the file is one of the two texts."""
    rng = random.Random(chance.seed(5))
    texts = {say_alone(prompt) for prompt in (PROMPT, "The dog. " + PROMPT)}
    n_saves, n = 0, 15 if chance.THOROUGH else 5
    for _ in range(n):
        with served_alone(STORIES, "-c", "2048", "--slot-save-path", str(tmp_path)) as (url, process):
            client = httpx.Client(base_url=url, timeout=30)
            say(client, id_slot=0)
            say(client, "The dog. " + PROMPT, id_slot=1)
            killer = threading.Timer(rng.uniform(0.02, 0.2), process.kill)
            killer.start()
            with contextlib.suppress(httpx.TransportError):
                while act(client, n_saves % 2, "save", filename="kept").status_code == 200:
                    n_saves += 1
            killer.join()
        assert tuple(unpack((tmp_path / "kept").read_bytes(), N_VOCAB).ids) in texts
    assert n_saves > n


def say_alone(prompt: str) -> tuple[int, ...]:
    """What a slot has after say(): the prompt and the answer, but for its last token."""
    with load() as engine:
        ids = engine.model.tokenizer.encode(prompt)
        said = engine.submit(ids, kvg.SamplingParams(max_tokens=8, temperature=0)).result()
        return (*ids, *said.tokens[:-1])
