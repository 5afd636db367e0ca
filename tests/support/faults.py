"""Faults on purpose, in a libkvgraph that was built with KVGRAPH_TEST_HOOKS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import pykvgraph as kvg
from pykvgraph._native.library import lib


def set_fault(site: str, countdown: int) -> None:
    """The countdown-th pass through the site fails, 0: none does. Skips the test where that can't be."""
    try:
        lib().kvg_test_fault(site.encode(), countdown)
    except kvg.UnsupportedError:
        pytest.skip("this libkvgraph was built without KVGRAPH_TEST_HOOKS")


@contextmanager
def fault(site: str, countdown: int = 1) -> Iterator[None]:
    """set_fault(), until the end of the block."""
    set_fault(site, countdown)
    try:
        yield
    finally:
        set_fault(site, 0)
