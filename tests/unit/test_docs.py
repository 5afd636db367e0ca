"""What the README and docs/ name is there, and the README is short."""

from __future__ import annotations

import re
from pathlib import Path

import gen_map
import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# what a path in the text may be relative to
PLACES = [ROOT, ROOT / "native/src", ROOT / "native/include", ROOT / "pykvgraph"]
BUILT = "build/"


def is_there(path: str) -> bool:
    return any((place / path).exists() or list(place.glob(f"{path}.*")) for place in PLACES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_links(page: Path) -> None:
    """A path in backticks is there, with or without a file's ending; so is what a link points to."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    paths = re.findall(r"`([\w.-]+/[\w./-]*|\w+\.(?:py|cpp|h))`", text)
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    missing = [path for path in paths if not path.startswith(BUILT) and not is_there(path.rstrip("/"))]
    missing += [link for link in links if not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_conflict_was_left(page: Path) -> None:
    assert not re.search(r"^(<{7}|>{7}) ", page.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_readme_is_short() -> None:
    assert len(PAGES[0].read_text(encoding="utf-8").splitlines()) <= 130


def test_the_map_says_what_the_files_say() -> None:
    """And each file says it, of which `python tools/gen_map.py` makes the page."""
    text = gen_map.PAGE.read_text(encoding="utf-8")
    assert gen_map.BEGIN in text and "| `cache` | The KV cache of a context" in text
    assert text == gen_map.written(text, gen_map.rooms_from_the_top())
    assert not [path for path in gen_map.PACKAGE.rglob("*.py") if not gen_map.first_line(path)]
