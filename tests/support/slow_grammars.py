"""Grammars with so many ways to read the same text that libllama doesn't come to an end."""

from __future__ import annotations

import json
from pathlib import Path

# after n letters there are 4^n ways to go on
BRANCHES = 'root ::= s\ns ::= [a-z ] s "0" | [a-z ] s "1" | [a-z ] s "2" | [a-z ] s "3" | [a-z ]'
# a rule that begins with itself, behind what may be empty: libllama fills the memory at 300 MB/s
LOOP = 'root ::= s\ns ::= t s "0" | t s "1" | "x"\nt ::= "y"?'
# 2^30 ways to begin, behind the first letter
TREE = (
    "root ::= [a-z ] t0\n"
    + "".join(f't{i} ::= t{i + 1} "0" | t{i + 1} "1"\n' for i in range(30))
    + 't30 ::= "x"'
)
PATTERN = json.dumps({"type": "string", "pattern": "^" + "(a|b)*" * 40 + "$"})


def grammar_processes() -> list[int]:
    """Processes of this one that have a vocabulary, or a grammar."""
    script = b"grammar_process.py"
    parents = {int(path.name): _parent(path) for path in Path("/proc").iterdir() if path.name.isdigit()}
    hosts = {pid for pid, parent in parents.items() if parent == _own() and script in _command(pid)}
    return [pid for pid, parent in parents.items() if parent in hosts]


def _own() -> int:
    return int(Path("/proc/self").resolve().name)


def _parent(process: Path) -> int:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
