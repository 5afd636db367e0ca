from __future__ import annotations

import subprocess
from pathlib import Path

import pykvgraph
from pykvgraph.params.other_python import python_command


def test_it_takes_the_package_of_this_one(tmp_path: Path) -> None:
    (tmp_path / "pykvgraph.py").write_text("raise SystemExit('the one of the folder')\n", encoding="utf-8")
    command = [*python_command("import pykvgraph; print(pykvgraph.__file__, sys.argv[1])"), "more"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert told == f"{pykvgraph.__file__} more\n"
