"""An operation under many limits of memory: `python -m support.limits MODEL OPERATION`.

MODEL: of `support.models.SMALL`. Prints how many of the limits it was refused under; ends with an error when
it crashed under one, when a refusal had no type, or when there was no limit under which it worked.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial

import pykvgraph as kvg

HARD = resource.getrlimit(resource.RLIMIT_AS)[1]
N_LIMITS = 120
WORKED, REFUSED, WRONG = 0, 1, 2


def read_size(name: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(name))


def in_child(work: Callable[[], int]) -> int:
    """The exit status of a child that does the work; below 0: the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        status = WRONG
        try:
            signal.alarm(60)
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def under(limit: int, operation: Callable[[], object]) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (read_size("VmSize") + limit, HARD))
    try:
        operation()
    except (kvg.DeviceError, MemoryError):
        return REFUSED
    return WORKED


def peak(operation: Callable[[], object]) -> int:
    """Bytes that it takes at most."""
    read, write = os.pipe()

    def measure() -> int:
        before = read_size("VmSize")
        operation()
        os.write(write, str(read_size("VmPeak") - before).encode())
        return WORKED

    if in_child(measure) != WORKED:
        sys.exit("it doesn't even work without a limit")
    return int(os.read(read, 100))


def prepared(path: str, name: str) -> Callable[[], object]:
    model = kvg.Model(path, device="cpu")
    if name == "context":
        return lambda: kvg.Context(model, n_ctx=2048, n_threads=1)
    if name == "plan":
        plan_memory = kvg.plan_memory  # which imports: not what is measured here
        return lambda: plan_memory(path, "cpu", n_ctx=2048)
    text = {"encode": "th he " * 2000, "encode_word": "the" * 4000, "encode_short": "hello"}[name]
    tokenizer = model.tokenizer
    return lambda: tokenizer.encode(text)


def main(path: str, name: str) -> None:
    operation = prepared(path, name)
    most = peak(operation) * 2 + (24 << 20)
    outcomes = []
    for i in range(N_LIMITS):
        outcomes.append(in_child(partial(under, most * i // (N_LIMITS - 1), operation)))
    print(outcomes.count(REFUSED))
    if set(outcomes) != {WORKED, REFUSED} or outcomes[-1] != WORKED:
        sys.exit(f"{name}: {Counter(outcomes)}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
