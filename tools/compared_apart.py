"""A file's logits beside libllama's, in a process of its own: a file that libllama can't take may end it.

With F32 weights both have plain attention over an F32 cache: a layer of a random file may add very little to
what comes out, so the rule of the tests, which allows what F16 rounds, would overlook it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.engines import prompt_then_singles, random_ids
from support.judge import TooFarError, exact_error, judge

N_PROMPT, N_TOKENS = 80, 120
ALLOWED = 1e-9  # where weights are F32


@dataclass(frozen=True)
class Verdict:
    """error: NMSE; None when one of the engines doesn't take the file; why says so."""

    error: float | None
    allowed: float = 0.0
    why: str = ""

    @property
    def agrees(self) -> bool:
        return self.error is not None and self.error <= self.allowed

    def __str__(self) -> str:
        if self.error is None:
            return f"can't be compared: {self.why}"
        return f"NMSE {self.error:.1e}, allowed {self.allowed:.1e}"


def compare(path: Path, n_tokens: int = N_TOKENS) -> Verdict:
    """A prompt, and single tokens after it."""
    command = [sys.executable, __file__, str(path), str(n_tokens)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return Verdict(None, why=lines[-1] if lines else f"exit code {done.returncode}")
    return Verdict(**json.loads(done.stdout))


def _measure(path: Path, n_tokens: int) -> Verdict:
    import pykvgraph as kvg

    with kvg.GgufFile(path) as file:
        n_vocab = file.model_info().n_vocab
        is_rounded = any(tensor.type != "f32" for tensor in file.tensors)
    ids = random_ids(n_tokens, n_vocab, seed=1)
    scenario = partial(prompt_then_singles, ids=ids, n_prompt=N_PROMPT)
    if not is_rounded:
        return Verdict(exact_error(path, scenario, n_ctx=256), ALLOWED)
    try:
        distance = judge(path, scenario, n_ctx=256)
    except TooFarError as error:
        distance = error.distance
    return Verdict(distance.worst, distance.allowed)


if __name__ == "__main__":
    print(json.dumps(asdict(_measure(Path(sys.argv[1]), int(sys.argv[2])))))
