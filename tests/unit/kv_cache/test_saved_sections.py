"""Sections of format 2: those that must be there, those that may, and those that may not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from support.saved_cells import TWO_GROUPS_HERE, saved
from support.state_bytes import Part, container, parts_of

from pykvgraph.errors import StateError
from pykvgraph.kv_cache.saved.format import unpack

STATE = saved(geometry=TWO_GROUPS_HERE)
PARTS = parts_of(TWO_GROUPS_HERE, STATE)
PLANNED = ["TOKN", "SMPL"]


def refused(blob: bytes, told: str) -> None:
    with pytest.raises(StateError, match=told):
        unpack(blob, TWO_GROUPS_HERE)


@pytest.mark.parametrize("tag", [*PLANNED, "XYZW", "\0\xff\n\x1b"])
@pytest.mark.parametrize("place", range(len(PARTS) + 1))
def test_what_is_unknown_is_refused_or_skipped(tag: str, place: int) -> None:
    """Wherever it stands, and whatever is in it: required or not is all that counts."""
    for contents in (b"", b"12345", bytes(800)):
        other = Part(tag.encode("latin-1"), contents, index=3, flags=0, checksum=5)
        twice = [*PARTS[:place], other, other, *PARTS[place:]]
        back = unpack(container(twice), TWO_GROUPS_HERE)
        for cells, expected in zip(back.groups, STATE.groups, strict=True):
            assert np.array_equal(cells.pos, expected.pos)
            assert np.array_equal(cells.rows, expected.rows)
        needed = [*PARTS[:place], replace(other, flags=1), *PARTS[place:]]
        refused(container(needed), "this pykvgraph can't read that")


@pytest.mark.parametrize(("tag", "what"), [("TOKN", "tokens"), ("SMPL", "sampler")])
def test_what_is_planned_is_told_by_name(tag: str, what: str) -> None:
    refused(container([*PARTS, Part(tag.encode(), b"")]), f"section {tag} 0 holds .*{what}")


@pytest.mark.parametrize("place", range(len(PARTS)))
def test_missing_twice_and_out_of_order(place: int) -> None:
    part = PARTS[place]
    name = f"section {part.tag.decode()} {part.index}"
    refused(container(PARTS[:place] + PARTS[place + 1 :]), f"has no {name}")
    refused(container([*PARTS[: place + 1], *PARTS[place:]]), f"{name} is there twice")
    refused(container([*PARTS, part]), f"{name} is there twice")
    for other in range(place):
        turned = list(PARTS)
        turned[place], turned[other] = turned[other], turned[place]
        refused(container(turned), "stands behind .*out of order")


@pytest.mark.parametrize("place", range(len(PARTS)))
def test_a_length_that_is_wrong(place: int) -> None:
    """Over the section after it, beyond the end, or nothing at all."""
    n_bytes = len(PARTS[place].contents)
    for wrong in (0, n_bytes - 8, n_bytes + 8, n_bytes + 80, 2**40, 2**64 - 1, 2**64 - 64):
        parts = [*PARTS[:place], replace(PARTS[place], n_bytes=wrong), *PARTS[place + 1 :]]
        with pytest.raises(StateError):
            unpack(container(parts), TWO_GROUPS_HERE)


MORE: dict[str, tuple[Callable[[], bytes], str]] = {
    "no sections": (lambda: container([]), "has no section MODL 0"),
    "too few are told of": (lambda: container(PARTS, n_sections=4), "bytes after its last section"),
    "too many are told of": (lambda: container(PARTS, n_sections=6), "fewer sections than"),
    "far too many": (lambda: container(PARTS, n_sections=2**32 - 1), "tells of 4294967295 sections"),
    "a total that is larger": (lambda: container(PARTS, total=2**60), "tells of 1152921504606846976"),
    "bytes behind": (lambda: container(PARTS) + bytes(8), "it is cut off or damaged"),
    "a third group's cells": (
        lambda: container([*PARTS[:3], replace(PARTS[2], index=2), *PARTS[3:]]),
        "has section CELL 2, and 2 groups",
    ),
    "a third group's rows": (
        lambda: container([*PARTS, replace(PARTS[4], index=2)]),
        "has section ROWS 2, and 2 groups",
    ),
    "rows of fewer cells": (
        lambda: container([*PARTS[:4], replace(PARTS[4], contents=PARTS[4].contents[:-132])]),
        "ROWS 1 has 792 bytes, and 7 cells have 924",
    ),
    "cells that are damaged": (
        lambda: container([PARTS[0], replace(PARTS[1], checksum=7), *PARTS[2:]]),
        "CELL 0 is damaged",
    ),
    "a geometry that is damaged": (
        lambda: container([replace(PARTS[0], checksum=7), *PARTS[1:]]),
        "MODL 0 is damaged",
    ),
    "rows that are damaged": (
        lambda: container([*PARTS[:3], replace(PARTS[3], checksum=7), PARTS[4]]),
        "K and V are damaged",
    ),
    "not required": (
        lambda: container([*PARTS[:3], replace(PARTS[3], flags=0), PARTS[4]]),
        "ROWS 0 is not marked as required",
    ),
    "unknown flags": (lambda: container([*PARTS, Part(b"XYZW", b"", flags=2)]), "flags 2"),
    "what must be zero": (lambda: container([*PARTS, Part(b"XYZW", b"", flags=0, zero=1)]), "XYZW"),
    "too little geometry": (
        lambda: container([replace(PARTS[0], contents=PARTS[0].contents[:-8]), *PARTS[1:]]),
        "too short",
    ),
    "too much geometry": (
        lambda: container([replace(PARTS[0], contents=PARTS[0].contents + bytes(8)), *PARTS[1:]]),
        "more than its groups",
    ),
    "no geometry": (lambda: container([replace(PARTS[0], contents=b""), *PARTS[1:]]), "too short"),
    "megabytes of geometry": (
        lambda: container([replace(PARTS[0], contents=bytes(2**20 + 8)), *PARTS[1:]]),
        "far too many",
    ),
    "no counts": (lambda: container([PARTS[0], replace(PARTS[1], contents=b""), *PARTS[2:]]), "too few"),
}


@pytest.mark.parametrize(("make", "told"), MORE.values(), ids=MORE.keys())
def test_what_does_not_add_up(make: Callable[[], bytes], told: str) -> None:
    refused(make(), told)


def test_what_fills_up_to_eight_is_zero() -> None:
    parts = [*PARTS, Part(b"XYZW", b"123", flags=0)]
    blob = bytearray(container(parts))
    unpack(bytes(blob), TWO_GROUPS_HERE)
    blob[-1] = 1
    refused(bytes(blob), "isn't followed by zeros")
