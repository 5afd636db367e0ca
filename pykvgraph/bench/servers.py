"""Servers that speak llama-server's wire, to be measured: started on a file, and asked over HTTP."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import IO, Any

from pykvgraph.model.tokenizer import Tokenizer

HOST = "127.0.0.1"
_START_SECONDS = 120
_ANSWER_SECONDS = 600


@contextmanager
def started(command: Sequence[str], log: IO[bytes]) -> Iterator[int]:
    """A server that has loaded its model; its port. log: gets what it prints.

    Raises RuntimeError when it does not start, OSError when there is no such program.
    """
    with socket.socket() as free:
        free.bind((HOST, 0))
        port: int = free.getsockname()[1]
    address = ["--host", HOST, "--port", str(port)]
    with subprocess.Popen([*command, *address], stdout=log, stderr=log) as process:
        try:
            _wait_for(port, process)
            yield port
        finally:
            process.terminate()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        with closing(http.client.HTTPConnection(HOST, port, timeout=5)) as connection:
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
        time.sleep(0.1)
    raise RuntimeError(f"{process.args!r} did not start: status {process.poll()}")


class Client:
    """Asks for the likeliest tokens, none of which is a part of a character or ends the answer.

    A server keeps parts of a character back until they are one: the token before them would seem late. more:
    further fields of each request.
    """

    def __init__(self, port: int, tokenizer: Tokenizer, more: Mapping[str, Any] | None = None) -> None:
        self._port = port
        unwanted = [
            token for token in range(tokenizer.n_vocab) if not _is_text(tokenizer.token_to_piece(token))
        ]
        self._fields = {
            "temperature": 0,
            "ignore_eos": True,
            "logit_bias": [[token, False] for token in unwanted],
            "stream": True,
            "return_tokens": True,
            "cache_prompt": True,
            **(more or {}),
        }

    def complete(self, ids: Sequence[int], n_tokens: int) -> Iterator[dict[str, Any]]:
        """The events of an answer to these tokens, as they come; the last one has `timings`.

        Raises RuntimeError when the server refuses, or answers with less than n_tokens tokens.
        """
        body = json.dumps({"prompt": list(ids), "n_predict": n_tokens, **self._fields})
        n_said = 0
        with closing(http.client.HTTPConnection(HOST, self._port, timeout=_ANSWER_SECONDS)) as connection:
            connection.request("POST", "/completion", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"the server refused the prompt: {response.read().decode()}")
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    n_said += len(event["tokens"])
                    yield event
        if n_said != n_tokens:
            raise RuntimeError(f"the server answered with {n_said} tokens, not {n_tokens}")


def _is_text(piece: bytes) -> bool:
    try:
        return bool(piece.decode("utf-8"))
    except UnicodeDecodeError:
        return False
