"""-c auto under limits of data (ulimit -d), beside llama-server with --fit.

    python benchmarks/auto_limits.py MODEL LLAMA_SERVER

Each starts 20 times on one sequence, and answers a prompt. llama-server's --fit is on, as it is unless one
says otherwise, and -c is 0, which means what the model was trained on, or what fits.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable

MIB = 1 << 20
LIMITS = range(120, 1120, 50)  # MiB
PORT = 18437
SECONDS = 20.0


def limited(limit: int) -> Callable[[], None]:
    """What a child does before it starts."""
    return lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit * MIB, limit * MIB))


def ours(model: str, limit: int) -> str:
    """How many cells there are; or how it ended."""
    wanted = ["-dev", "none", "-c", "auto", "-n", "4", "-p", "a", "--json"]
    command = ["pykvgraph", "generate", "-m", model, *wanted]
    done = subprocess.run(command, preexec_fn=limited(limit), capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return f"{json.loads(done.stdout)['n_ctx']} cells"
    return f"refused: {done.stderr.strip()}" if done.returncode == 1 else f"ended with {done.returncode}"


def theirs(model: str, limit: int, server: str) -> str:
    """The same of llama-server."""
    command = [server, "-m", model, "-c", "0", "-np", "1", "-t", "2", "--port", str(PORT), "--no-warmup"]
    quiet = subprocess.DEVNULL
    child = subprocess.Popen(command, preexec_fn=limited(limit), stdout=quiet, stderr=quiet)
    try:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end and child.poll() is None:
            try:
                body = json.dumps({"prompt": "a", "n_predict": 4}).encode()
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/completion", body) as answer:
                    json.load(answer)
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/props") as answer:
                    return f"{json.load(answer)['default_generation_settings']['n_ctx']} cells"
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        return f"ended with {child.poll()}" if child.poll() is not None else "did not answer"
    finally:
        child.kill()
        child.wait()


if __name__ == "__main__":
    for each in LIMITS:
        found = (ours(sys.argv[1], each), theirs(sys.argv[1], each, sys.argv[2]))
        print(f"{each:5} MiB  pykvgraph: {found[0]:20}  llama-server: {found[1]}", flush=True)
