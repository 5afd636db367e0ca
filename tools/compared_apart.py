"""A file's logits beside libllama's, in a process of its own: a file that libllama can't take may end it.

With F32 weights both have plain attention over an F32 cache: a layer of a random file may add very little to
what comes out, so the rule of the tests, which allows what F16 rounds, would overlook it.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.engines import prompt_then_singles, random_ids
from support.judge import TooFarError, exact_error, judge

from pykvgraph.errors import ModelLoadError

N_PROMPT, N_TOKENS = 80, 120
N_ALONE = 8  # single tokens: a wrong choice of experts may be right for one by chance
ALLOWED = 1e-9  # where weights are F32
REFUSAL = "error loading model: "  # in libllama's log


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
    """A prompt, and single tokens after it. n_tokens=1: the worst of some tokens, each by itself."""
    command = [sys.executable, __file__, str(path), str(n_tokens)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        reasons = [line.partition(REFUSAL)[2] for line in lines if REFUSAL in line]
        return Verdict(None, why="; ".join([*lines[-1:], *reasons]) or f"exit code {done.returncode}")
    return Verdict(**json.loads(done.stdout))


def _log_a_refusal(path: Path) -> None:
    """libllama says why it doesn't take a file to those only who want its log."""
    from pykvgraph._native import libllama

    ll = libllama.package("llama_cpp")
    logging.getLogger("llama-cpp-python").setLevel(logging.DEBUG)
    ll.llama_model_load_from_file(str(path).encode(), ll.llama_model_default_params())


def _measure(path: Path, n_tokens: int) -> Verdict:
    import pykvgraph as kvg

    with kvg.GgufFile(path) as file:
        n_vocab = file.model_info().n_vocab
        is_rounded = any(tensor.type != "f32" for tensor in file.tensors)
    n_texts = 1 if n_tokens > 1 else N_ALONE
    verdicts = [
        _judged(path, random_ids(n_tokens, n_vocab, seed), is_rounded) for seed in range(1, n_texts + 1)
    ]
    return max(verdicts, key=lambda verdict: (verdict.error or 0.0) / verdict.allowed)


def _judged(path: Path, ids: list[int], is_rounded: bool) -> Verdict:
    scenario = partial(prompt_then_singles, ids=ids, n_prompt=N_PROMPT)
    if not is_rounded:
        return Verdict(exact_error(path, scenario, n_ctx=256), ALLOWED)
    try:
        distance = judge(path, scenario, n_ctx=256)
    except TooFarError as error:
        distance = error.distance
    return Verdict(distance.worst, distance.allowed)


def main(path: Path, n_tokens: int) -> None:
    try:
        print(json.dumps(asdict(_measure(path, n_tokens))))
    except ModelLoadError:
        _log_a_refusal(path)
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
