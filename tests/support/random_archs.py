"""llama.cpp's own random models, which hold every tensor that it reads for an architecture."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

FOLDER = Path(os.environ.get("LLAMA_ARCHS", Path(__file__).parents[3] / "shared" / "rivals" / "archs"))
PROGRAM = FOLDER / "test-llama-archs"
ABSENT = "llama.cpp's test-llama-archs is not there: set LLAMA_ARCHS to its folder"
N_VOCAB = 128


def write_random_archs(name: str, seed: int, folder: Path) -> list[Path]:
    """The models of one architecture: dense, with experts, or both; none where llama.cpp has none."""
    folder.mkdir(exist_ok=True)
    subprocess.run(
        [PROGRAM, "-a", f"^{name}$", "-s", str(seed), "-o", folder],
        env={**os.environ, "LD_LIBRARY_PATH": str(FOLDER)},
        check=True,
        capture_output=True,
    )
    return sorted(folder.glob("*.gguf"))
