"""The two ends of a stream that is measured: a thread, a process, two ranks of MPI, or another machine."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pykvgraph import stream
from pykvgraph.bench.streams import StreamSpeed, end_of, measure_streams, receive
from pykvgraph.errors import TransportError, UnsupportedError
from pykvgraph.model.model import Model
from pykvgraph.params.other_python import python_command

_RUN = "from pykvgraph.bench.stream_ends import run; run(sys.argv[1])"
_TIMEOUT = 120.0  # seconds: a prompt is decoded without a region that leaves
_LONG = 3600.0  # the same on another machine, for which somebody may have to start the other end


def transports_here() -> list[str]:
    """All but mpi where that is not installed."""
    return ["memory", "device", "unix", "tcp", *(["mpi"] if _mpiexec().exists() else []), "file"]


def measure_over(
    kind: str,
    model: Model,
    depth: int,
    n_repetitions: int,
    sizes: Mapping[str, Any],
    where: Mapping[str, Any],
    tick: Callable[[], None],
) -> list[StreamSpeed]:
    """As measure_streams(), over a transport of that kind. where: how the model was opened.

    Raises UnsupportedError where MPI is missing, TransportError when the other end has failed.
    """
    job = {"model": str(model.path), "where": dict(where), "depth": depth, "repetitions": n_repetitions}
    job["sizes"] = dict(sizes)
    if kind == "mpi":
        return _ranks(job)
    with _meeting(kind, model, job) as end:
        found = measure_streams(model, end, depth, n_repetitions, sizes, tick)
        end_of(end)
        return found


@contextlib.contextmanager
def other_machine(address: str, token: str | None) -> Iterator[stream.Transport]:
    """An end for measure_streams(), whose other one is in receive_from(). Raises what stream.open() does."""
    with stream.open(address, token, timeout=_LONG) as end:
        yield end
        end_of(end)


def receive_from(
    model: Model, address: str, token: str | None, sizes: Mapping[str, Any], tell: Callable[[str], None]
) -> int:
    """Waits at an address, and takes what one other_machine() sends; how many streams that was.

    address: as stream.listen() takes it, or stream.open() for files and MPI. tell: gets the address as it is.
    """
    with contextlib.ExitStack() as stack:
        if address.partition(":")[0] in ("unix", "tcp"):
            listener = stack.enter_context(stream.listen(address, token, timeout=_LONG))
            tell(listener.address)
            end: stream.Transport = stack.enter_context(listener.accept())
        else:
            end = stack.enter_context(stream.open(address, token, timeout=_LONG))
            tell(end.address)
        return receive(model, end, sizes)


@contextlib.contextmanager
def _meeting(kind: str, model: Model, job: Mapping[str, Any]) -> Iterator[stream.Transport]:
    """Our end; the other one is in receive() until this is closed."""
    with tempfile.TemporaryDirectory(prefix="pykvgraph-bench-") as folder:
        if kind in ("memory", "device", "file"):
            address = f"{kind}:{folder}"
            with stream.open(address, timeout=_TIMEOUT) as end, _receiver(kind, address, model, job):
                yield end
                end.close()
            return
        with (
            stream.listen(f"unix:{folder}/s" if kind == "unix" else "tcp:0", timeout=_TIMEOUT) as listener,
            _receiver(kind, listener.address, model, job),
            listener.accept() as end,
        ):
            yield end


@contextlib.contextmanager
def _receiver(kind: str, address: str, model: Model, job: Mapping[str, Any]) -> Iterator[None]:
    if kind in ("memory", "device"):
        work = threading.Thread(target=_take, args=(address, model, job), name="pykvgraph receiver")
        work.start()
        yield
        work.join()
        return
    command = [*python_command(_RUN), json.dumps({**job, "address": address})]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield
        except TransportError as error:
            process.terminate()
            raise TransportError(f"{error}\n{_last_words(process.communicate()[1])}".rstrip()) from None
        except BaseException:
            process.terminate()
            raise


def _take(address: str, model: Model, job: Mapping[str, Any]) -> None:
    with stream.open(address, timeout=_TIMEOUT) as end:
        receive(model, end, job["sizes"])


def _ranks(job: Mapping[str, Any]) -> list[StreamSpeed]:
    mpiexec = _mpiexec()
    if not mpiexec.exists():
        raise UnsupportedError("the bench of mpi needs mpiexec beside Python: pip install 'pykvgraph[mpi]'")
    command = [str(mpiexec), "-n", "2", *python_command(_RUN), json.dumps({**job, "address": ""})]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TransportError(f"mpi: a rank failed; {_last_words(done.stderr)}")
    return [StreamSpeed(**each) for each in json.loads(done.stdout)]


def _mpiexec() -> Path:
    return Path(sys.executable).parent / "mpiexec"


def _last_words(text: str) -> str:
    return "\n".join(text.splitlines()[-3:])


def run(text: str) -> None:
    """A process of its own: the receiver, or a rank of MPI, of which 0 sends. text: its job, as JSON."""
    job = json.loads(text)
    rank = _rank() if not job["address"] else 1
    where = job["where"] if rank == 0 else {"device": "cpu"}
    with Model(job["model"], **where) as model:
        if rank == 1 and job["address"]:
            _take(job["address"], model, job)
        elif rank == 1:
            _take("mpi:0", model, job)
        else:
            with stream.open("mpi:1", timeout=_TIMEOUT) as end:
                found = measure_streams(
                    model, end, job["depth"], job["repetitions"], job["sizes"], lambda: None
                )
                end_of(end)
            print(json.dumps([asdict(each) for each in found]))


def _rank() -> int:
    from mpi4py import MPI

    return int(MPI.COMM_WORLD.Get_rank())
