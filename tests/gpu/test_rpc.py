"""A device on another machine: a ggml RPC server that the test starts on loopback."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.models import ModelSpec
from support.rpc_server import TESTS

import pykvgraph as kvg

pytestmark = pytest.mark.gpu

SPEC = ModelSpec(n_layer=3, rope_factors=True)


def distance(
    path: Path, endpoint: str, kv_type: str, *arguments: str, kv_tier: str = "device"
) -> tuple[list[str], float]:
    """The device of each layer, and how far every operation there is from the CPU's.

    In a process of its own, which knows no server yet.
    """
    done = subprocess.run(
        [sys.executable, "-m", "support.every_op", str(path), endpoint, kv_type, kv_tier, *arguments],
        cwd=TESTS,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    layers, error = done.stdout.splitlines()
    return layers.split(), float(error)


# the server computes as the CPU does, but for the order of additions
@pytest.mark.parametrize("kv_tier", ["device", "host"])
@pytest.mark.parametrize(("kv_type", "limit"), [("f32", 1e-6), ("f16", 1e-4)])
def test_layers_on_the_server_and_here(
    model_file: Callable[[ModelSpec], Path], endpoint: str, kv_type: str, limit: float, kv_tier: str
) -> None:
    where = ("device=RPC0", "n_gpu_layers=2")
    layers, error = distance(model_file(SPEC), endpoint, kv_type, *where, kv_tier=kv_tier)
    assert layers == ["CPU", "CPU", "RPC0", "RPC0"]
    assert error <= limit


@pytest.mark.parametrize(("kv_type", "kv_tier"), [("f32", "device"), ("f16", "device"), ("f16", "host")])
def test_layers_on_the_server_and_on_a_device(
    model_file: Callable[[ModelSpec], Path], endpoint: str, device: str, kv_type: str, kv_tier: str
) -> None:
    arguments = (f"device={device},RPC0", "tensor_split=(1, 3)")
    layers, error = distance(model_file(SPEC), endpoint, kv_type, *arguments, kv_tier=kv_tier)
    assert layers == [device, "RPC0", "RPC0", "RPC0"]
    assert error <= 1e-3


def test_generate_over_rpc(endpoint: str, stories: Path, golden_story: str) -> None:
    """The published story, with three of five layers and the output on the server."""
    where = ["--rpc", endpoint, "-dev", "RPC0", "-ngl", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "pykvgraph", "generate", "-m", str(stories), "-c", "512", "-n", "64", *where],
        cwd=TESTS,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert golden_story.strip().startswith(done.stdout.strip())
    assert len(done.stdout) > 100


@pytest.mark.parametrize(
    "text", ["", "localhost", "host:", "host:0", "host:65536", ":50052", "a,b:1", "h:1x", "\0:1"]
)
def test_no_endpoint(text: str) -> None:
    with pytest.raises(kvg.InvalidArgumentError, match="host:port"):
        kvg.add_rpc_server(text)


def test_nobody_answers() -> None:
    """ggml would end the process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(kvg.DeviceError, match=f"{endpoint}|no RPC"):
        kvg.add_rpc_server(endpoint)


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        struct.pack("<QBBBB", 28, 7, 1, 0, 0) + bytes(24),  # ggml would end the process
        struct.pack("<QBBBB", 28, 6, 0, 0, 0) + bytes(24),
    ],
    ids=["nothing", "http", "minor", "major"],
)
@pytest.mark.usefixtures("rpc")
def test_somebody_else_answers(reply: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(64)
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(kvg.DeviceError, match="no RPC server"):
            kvg.add_rpc_server(f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()
