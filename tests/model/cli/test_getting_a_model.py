"""`-hf` and `-mu`, in every verb: models that the command line downloads, from a server on loopback."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.hub_server import Behaviour, HubServer, environment, hub_server
from support.models import SMALL, write_split

from pykvgraph.cli import main

VERBS = {
    "bench": ["-p", "4", "-n", "0", "-r", "1"],
    "cells": ["-q"],
    "chat": ["-n", "2"],
    "generate": ["-n", "2"],
    "info": [],
    "inspect": [],
    "passkey": ["--n-junk", "2", "-c", "200"],
}


@pytest.fixture
def server(stories: Path) -> Iterator[HubServer]:
    """A server with stories260K, as a file and in a repository."""
    with hub_server() as server:
        server.files["/stories.gguf"] = stories.read_bytes()
        server.repos["ours/stories"] = {"stories-Q8_0.gguf": stories.read_bytes(), "x-F16.gguf": b"GGUF"}
        yield server


def run(server: HubServer, home: Path, *arguments: str, **more: str) -> Result:
    """In this process, whose huggingface_hub may have been imported: for addresses and errors."""
    env = environment(server, home, COLUMNS="80", **more)
    return CliRunner().invoke(main, arguments, env=env, prog_name="pykvgraph")


def run_apart(
    server: HubServer, home: Path, *arguments: str, **more: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pykvgraph", *arguments],
        capture_output=True,
        text=True,
        env=environment(server, home, **more),
        timeout=120,
    )


def test_every_verb_has_them() -> None:
    assert set(VERBS) <= set(main.commands)
    for name, verb in main.commands.items():
        opts = {opt for param in verb.params for opt in param.opts}
        assert ("-m" in opts) == ({"-hf", "-mu", "--hf-repo", "--model-url"} <= opts), name


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_runs_a_model_from_the_web(server: HubServer, tmp_path: Path, verb: str) -> None:
    source = ("-mu", f"{server.url}/stories.gguf")
    if verb == "chat":  # whose stdin is empty
        result = run(server, tmp_path, verb, *VERBS[verb], *source)
        assert (result.exit_code, result.stdout) == (0, "")
    else:
        result = run(server, tmp_path, verb, *VERBS[verb], "--json", *source)
        assert (result.stderr, json.loads(result.stdout) != {}) == ("", True)
    assert len(server.requests) == 1


def test_a_repository_then_offline(server: HubServer, tmp_path: Path) -> None:
    """Endpoint, token, cache and offline mode are huggingface_hub's."""
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    server.behaviour["ours/stories"] = Behaviour(token="hf_ours")
    for more in ({"HF_TOKEN": "hf_ours"}, {"HF_HUB_OFFLINE": "1", "KVGRAPH_HF_REPO": "ours/stories"}):
        named = [] if "KVGRAPH_HF_REPO" in more else ["-hf", "ours/stories:q8_0"]
        done = run_apart(server, tmp_path, "inspect", "--json", *named, **more)
        assert (done.returncode, done.stderr) == (0, "")
        told = json.loads(done.stdout)
        assert (told["recipe"]["arch"], told["size"]) == ("llama", len(server.files["/stories.gguf"]))
        assert told["file"].startswith(str(tmp_path / "hub"))
        assert len(server.requests) == 3  # the list, the file's length and the file; then none


def test_a_split_model_from_the_web(server: HubServer, tmp_path: Path) -> None:
    paths = write_split(SMALL, tmp_path)
    server.files = {f"/{path.name}": path.read_bytes() for path in paths}
    result = run(server, tmp_path / "home", "inspect", "--json", "-mu", f"{server.url}/{paths[0].name}")
    report = json.loads(result.stdout)
    assert [Path(part).name for part in report["parts"]] == [path.name for path in paths]


@pytest.mark.parametrize(
    ("arguments", "env", "told"),
    [
        (["generate"], {}, "Missing the model: give -m, -hf or -mu."),
        (["inspect"], {}, "Missing the model"),
        (["generate", "-m", "a", "-hf", "a/b"], {}, "-m and -hf each name the model: give one of them"),
        (["info", "-mu", "http://a/b", "--hf-repo", "a/b"], {}, "-hf and -mu each name the model"),
        (["inspect", "a", "-mu", "http://a/b"], {}, "MODEL and -mu each name the model"),
        (
            ["bench"],
            {"KVGRAPH_MODEL": "a", "KVGRAPH_MODEL_URL": "http://a/b"},
            "KVGRAPH_MODEL and KVGRAPH_MODEL_URL each name",
        ),
    ],
)
def test_one_model(
    server: HubServer, tmp_path: Path, arguments: list[str], env: dict[str, str], told: str
) -> None:
    result = run(server, tmp_path, *arguments, **env)
    assert (result.exit_code, told in result.stderr, result.stdout) == (2, True, "")


def test_what_is_typed_comes_before_the_environment(server: HubServer, tmp_path: Path, stories: Path) -> None:
    env = {"KVGRAPH_MODEL": "nobody.gguf", "KVGRAPH_HF_REPO": "no/body"}
    result = run(server, tmp_path, "inspect", "--json", "-mu", f"{server.url}/stories.gguf", **env)
    assert result.exit_code == 0
    assert json.loads(run(server, tmp_path, "inspect", "--json", str(stories), **env).stdout)["file"] == str(
        stories
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-mu", "{}/nothing.gguf"], "/nothing.gguf is not there (status 404)"),
        (["-mu", "stories.gguf"], "'stories.gguf' is no address of a file"),
        (["-hf", "stories"], "'stories' is no repository: expected USER/NAME"),
    ],
)
def test_what_cannot_be_had(server: HubServer, tmp_path: Path, arguments: list[str], told: str) -> None:
    result = run(server, tmp_path, "generate", *(argument.format(server.url) for argument in arguments))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)
    assert result.stderr.startswith("Error: ")
    assert told in result.stderr
