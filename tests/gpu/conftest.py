"""What tests of devices share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.rpc_server import library, rpc_server

import pykvgraph as kvg


@pytest.fixture(scope="session")
def device() -> str:
    """A device with memory of its own."""
    for info in kvg.devices():
        if info.type == "gpu":
            return info.name
    pytest.skip(
        "no device but the CPU: this llama-cpp-python has no other backend, or no device for it was found "
        "(GGML_VK_VISIBLE_DEVICES=0 lets Vulkan take a software device)"
    )


@pytest.fixture(scope="session")
def rpc() -> None:
    """For tests that need ggml's RPC."""
    if library("libggml-rpc") is None:
        pytest.skip("this llama-cpp-python was built without RPC (-DGGML_RPC=on)")


@pytest.fixture(scope="session")
def endpoint(rpc: None) -> Iterator[str]:
    """Of an RPC server on loopback."""
    with rpc_server() as endpoint:
        yield endpoint
