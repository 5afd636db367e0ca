"""Weights on the CPU: pages of the file itself, large ones where the filesystem has them."""

from __future__ import annotations

from pathlib import Path

from support.models import ModelSpec, write_model

import pykvgraph as kvg


def flags_of_mappings(path: Path) -> list[list[str]]:
    """`VmFlags` of each of this process's mappings of the file, the largest first; proc(5), smaps."""
    found: list[tuple[int, list[str]]] = []
    size, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if first == "Size:":
            size = int(rest[0])
        elif first == "VmFlags:":
            found += [(size, rest)] if ours else []
        elif not first.endswith(":"):
            ours = rest[-1] == str(path)
    return [flags for _, flags in sorted(found, reverse=True)]


def test_a_large_file_is_asked_for_in_huge_pages(tmp_path: Path) -> None:
    # with pages of 4 KiB a token takes 4 to 8 % longer: every token goes through all of the weights
    path = write_model(ModelSpec(n_layer=1, n_embd=512, n_head=8, n_ff=2048), tmp_path)
    assert path.stat().st_size > 4 << 20
    with kvg.Model(path, device="none"):
        assert "hg" in flags_of_mappings(path)[0]
