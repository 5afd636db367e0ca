"""Processes of this machine, each with an engine: started, watched, started again, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import tempfile
from asyncio.subprocess import PIPE, Process
from pathlib import Path

from pykvgraph.cluster.order import read_told
from pykvgraph.cluster.pool import Pool
from pykvgraph.cluster.supervisor import Supervisor
from pykvgraph.cluster.worker import DRAINS, HAS_READ, READS, READY, copies_path
from pykvgraph.cluster.worker_life import WorkerLife
from pykvgraph.params.other_python import python_command
from pykvgraph.server.engine_spec import EngineSpec

# the modules that this process would import, whatever the folder that it was started in
_START = "from pykvgraph.cluster.worker import main; main()"


class Workers(Supervisor):
    """Workers that are processes of this machine.

    They listen on Unix sockets in a folder that only this user can enter. They end with this process, however
    it ends.
    """

    def __init__(self, pool: Pool, engine: EngineSpec, n: int) -> None:
        super().__init__(pool, engine.share_of(n), n)
        self._processes: dict[int, Process] = {}
        self._folder = Path()

    async def run(self) -> None:
        """As Supervisor's."""
        self._folder = Path(tempfile.mkdtemp(prefix="kvgraph-"))  # nobody else may enter it
        try:
            await super().run()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def stop(self) -> None:
        """Sends SIGTERM to each: whoever is answered may finish. The second time SIGKILL: one may hang."""
        number = signal.SIGKILL if self._stops.is_set() else signal.SIGTERM
        super().stop()
        for process in self._processes.values():
            _end(process, number)

    def _kill(self, number: int) -> None:
        if number in self._processes:
            _end(self._processes[number], signal.SIGKILL)

    async def _live(self, number: int, life: int) -> str:
        # each life has a socket of its own: the one of the last life may still be there
        path = self._folder / f"{number}.{life}"
        try:
            process = await self._start(number, path)
        except OSError as error:
            return str(error)
        self._processes[number] = process
        if self._stops.is_set():
            _end(process, signal.SIGTERM)
        its_life: WorkerLife | None = None
        try:
            its_life = await self._listen(number, process, path)
            code = await process.wait()
        finally:
            del self._processes[number]
            for left in (path, copies_path(path)):
                left.unlink(missing_ok=True)
        end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if its_life is not None:
            # SIGKILL comes from others: a user, or a system that is short of memory
            its_life.end(
                self._fault(number, end if code not in (0, -signal.SIGKILL, -signal.SIGTERM) else "")
            )
        return end if self._was_up else f"{end}; it says why above"

    async def _listen(self, number: int, process: Process, path: Path) -> WorkerLife | None:
        """To what it says of itself, until its end. Returns its life, if it could be asked."""
        assert process.stdout is not None
        life: WorkerLife | None = None
        async with self._client("http://worker", str(path)) as client:
            try:
                async for line in process.stdout:
                    if line.startswith(READY):
                        told = read_told(line[len(READY) :].decode())
                        life = self._up(number, client, told, f"process {process.pid}")
                    elif line == DRAINS:
                        self._drains(number)
                    elif life is not None:
                        _hear(life, line)
            finally:
                self._down(number)
        return life

    async def _start(self, number: int, path: Path) -> Process:
        # a session of its own: Ctrl-C goes to this process alone, which lets those finish who are answered
        process = await asyncio.create_subprocess_exec(
            *python_command(_START), stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        assert process.stdin is not None
        process.stdin.write(f"{path}\n{self._order(number)}\n".encode())
        with contextlib.suppress(ConnectionError):  # it has ended: _live() sees that
            await process.stdin.drain()
        return process


def _hear(life: WorkerLife, line: bytes) -> None:
    """What a worker says of a request."""
    if line.startswith(READS):
        life.begins(line[len(READS) :].decode().strip())
    elif line.startswith(HAS_READ):
        life.has_read(line[len(HAS_READ) :].decode().strip())


def _end(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
