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
from collections.abc import Callable
from pathlib import Path

import httpx

from pykvgraph.cluster.worker import READY
from pykvgraph.errors import KVGraphError
from pykvgraph.server.engine_spec import EngineSpec
from pykvgraph.server.keys import RUN_HEADER
from pykvgraph.server.settings import Settings

_log = logging.getLogger("pykvgraph.server")
FIRST_DELAY, LONGEST_DELAY = 0.1, 30.0  # seconds before a worker is started again; doubled each time
CALM_SECONDS = 60.0  # a worker that lived so long begins with the first delay again
_CONNECT_SECONDS = 10.0
_KEEP_SECONDS = 30.0  # less than after which a worker closes a connection that is idle

# the modules that this process would import, whatever the folder that it was started in
_START = "import sys; sys.path[:] = {path!r}; from pykvgraph.cluster.worker import main; main()"


class Workers:
    """n processes with an engine each, numbered from 0.

    on_up(number, client): a worker can be asked. on_down(number): it can't any more. Both are called in the
    event loop of run(). A worker that ends is started again, after a delay that grows up to LONGEST_DELAY.
    The workers listen on Unix sockets in a folder that only this user can enter, and want a token that this
    run made. They end with this process, however it ends.
    """

    def __init__(
        self,
        settings: Settings,
        engine: EngineSpec,
        n: int,
        on_up: Callable[[int, httpx.AsyncClient], None],
        on_down: Callable[[int], None],
    ) -> None:
        self.n_restarts = 0
        self._settings = settings
        self._engine = engine
        self._n = n
        self._on_up = on_up
        self._on_down = on_down
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
            if time.monotonic() - begin > CALM_SECONDS:
                delay = FIRST_DELAY
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
        assert process.stdout is not None
        try:
            if await process.stdout.readline() == READY:
                self._was_up = True
                async with self._client(path) as client:
                    self._on_up(number, client)
                    try:
                        code = await process.wait()
                    finally:
                        self._on_down(number)
            else:
                code = await process.wait()
        finally:
            del self._processes[number]
            path.unlink(missing_ok=True)
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    async def _start(self, number: int, path: Path) -> Process:
        n_slots = self._settings.n_slots
        settings = dataclasses.replace(self._settings, run_token=self._token, first_slot=number * n_slots)
        order = {
            "number": number,
            "path": str(path),
            "settings": dataclasses.asdict(settings),
            "engine": dataclasses.asdict(self._engine),
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
