"""Processes of this machine, each with an engine: started, watched, started again, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import secrets
import shutil
import signal
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import httpx

from pykvgraph.cluster.front import Front
from pykvgraph.cluster.worker import DRAINS, READY
from pykvgraph.errors import KVGraphError
from pykvgraph.server.engine_spec import EngineSpec
from pykvgraph.server.keys import RUN_HEADER

_log = logging.getLogger("pykvgraph.server")
FIRST_DELAY, LONGEST_DELAY = 0.1, 30.0  # seconds before a worker is started again; doubled each time
CALM_SECONDS = 60.0  # a worker that lived so long begins with the first delay again
_CONNECT_SECONDS = 10.0
_KEEP_SECONDS = 30.0  # less than after which a worker closes a connection that is idle

# the modules that this process would import, whatever the folder that it was started in
_START = "import sys; sys.path[:] = {path!r}; from pykvgraph.cluster.worker import main; main()"


class Workers:
    """n processes with an engine each, numbered from 0.

    The front is told in the event loop of run() when one can be asked, drains, and can't be asked any more.
    A worker that gets SIGTERM drains: it gets nothing new, and ends when it has answered what it was asked.
    One that ends is started again, after a delay that grows up to LONGEST_DELAY; its cache has as many cells
    as before. The workers listen on Unix sockets in a folder that only this user can enter, and want a token
    that this run made. They end with this process, however it ends.
    """

    def __init__(self, front: Front, engine: EngineSpec, n: int) -> None:
        self.n_restarts = 0
        self._front = front
        self._engine = engine
        self._n = n
        self._n_ctx: dict[int, int] = {}  # of a worker's first life, as then the memory was free
        self._drained: set[int] = set()
        self._token = secrets.token_hex(32)
        self._processes: dict[int, Process] = {}
        self._stops = asyncio.Event()
        self._was_up = False  # any of them, ever

    async def run(self) -> None:
        """Until stop(), and all of them have ended.

        Raises KVGraphError when one ends before any of them was ready: it would end again.
        """
        folder = Path(tempfile.mkdtemp(prefix="kvgraph-"))  # nobody else may enter it
        keepers = [asyncio.ensure_future(self._keep(number, folder)) for number in range(self._n)]
        try:
            await asyncio.gather(*keepers)
        except BaseException:
            self.stop()
            await asyncio.wait(keepers)
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def stop(self) -> None:
        """Sends SIGTERM to each: whoever is answered may finish; the second time nobody may."""
        self._stops.set()
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    async def _keep(self, number: int, folder: Path) -> None:
        delay = FIRST_DELAY
        for life in range(sys.maxsize):
            begin = time.monotonic()
            # each life has a socket of its own: the one of the last life may still be there
            end = await self._live(number, folder / f"{number}.{life}")
            if self._stops.is_set():
                return
            if not self._was_up:
                raise KVGraphError(f"worker {number} ended before it was ready ({end}); it says why above")
            drained = number in self._drained
            self._drained.discard(number)
            if drained or time.monotonic() - begin > CALM_SECONDS:
                delay = FIRST_DELAY
            if not drained:
                _log.warning("worker %d ended (%s); it is started again in %g s", number, end, delay)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stops.wait(), delay)
                return
            delay = min(2 * delay, LONGEST_DELAY)
            self.n_restarts += 1

    async def _live(self, number: int, path: Path) -> str:
        """One life of a worker; how it ended."""
        try:
            process = await self._start(number, path)
        except OSError as error:
            return str(error)
        self._processes[number] = process
        if self._stops.is_set():
            self.stop()
        try:
            await self._listen(number, process, path)
            code = await process.wait()
        finally:
            del self._processes[number]
            path.unlink(missing_ok=True)
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    async def _listen(self, number: int, process: Process, path: Path) -> None:
        """To what it says of itself, until its end."""
        assert process.stdout is not None
        async with self._client(path) as client:
            try:
                async for line in process.stdout:
                    if line.startswith(READY):
                        self._was_up = True
                        self._n_ctx.setdefault(number, int(line[len(READY) :]))
                        _log.info("worker %d is ready (process %d)", number, process.pid)
                        self._front.up(number, client)
                    elif line == DRAINS and not self._stops.is_set():
                        _log.info("worker %d drains; another one takes its place then", number)
                        self._drained.add(number)
                        self._front.drains(number)
            finally:
                self._front.down(number)

    async def _start(self, number: int, path: Path) -> Process:
        n_slots = self._front.settings.n_slots
        settings = dataclasses.replace(
            self._front.settings, run_token=self._token, first_slot=number * n_slots
        )
        context = dict(self._engine.context)
        if context.get("n_ctx") == "auto" and number in self._n_ctx:
            context["n_ctx"] = self._n_ctx[number]
        engine = dataclasses.replace(self._engine, context=context)
        order = {
            "number": number,
            "path": str(path),
            "settings": dataclasses.asdict(settings),
            "engine": dataclasses.asdict(engine),
        }
        code = _START.format(path=sys.path)
        # a session of its own: Ctrl-C goes to this process alone, which lets those finish who are answered
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")
        with contextlib.suppress(ConnectionError):  # it has ended: _live() sees that
            await process.stdin.drain()
        return process

    def _client(self, path: Path) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, keepalive_expiry=_KEEP_SECONDS)
        return httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(uds=str(path), limits=limits),
            base_url="http://worker",
            headers={RUN_HEADER: self._token},
            timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS),
            trust_env=False,
        )
