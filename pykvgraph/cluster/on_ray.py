"""Workers on machines of a Ray cluster: Ray places them, watches them and starts them again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import threading
import time
from typing import Any

from pykvgraph import env
from pykvgraph.cluster.copies import begun
from pykvgraph.cluster.order import WorkerReady, read_order
from pykvgraph.cluster.pool import Pool
from pykvgraph.cluster.supervisor import Supervisor
from pykvgraph.errors import DeviceError, KVGraphError
from pykvgraph.server.engine_spec import EngineSpec
from pykvgraph.server.run import Server, address_of, listen

_log = logging.getLogger("pykvgraph.server")
_AGAIN_SECONDS = 60.0  # in which Ray has a process for an actor that has ended
_PLACED_SECONDS = 15.0  # after which somebody is told that Ray has no room yet


class RayWorkers(Supervisor):
    """Workers that are actors of Ray, each with a server on its machine's address.

    address: of a Ray cluster; "auto": the one that runs here, or a new one of this machine. Each gets as many
    of Ray's CPUs as let all of them run, or the engine's threads, and a GPU where the cluster has one for
    each. Only small messages go through Ray; requests and answers go over HTTP, with the token of this run.

    Raises ImportError without ray, and KVGraphError when there is no such cluster or no room in it.
    """

    def __init__(self, pool: Pool, engine: EngineSpec, n: int, address: str) -> None:
        ray = _connected(address)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        threads = int(engine.context.get("n_threads") or 0)
        n_cpus, on_one = _placed([int(node.get("CPU", 0)) for node in nodes], n, threads)
        n_gpus = _n_gpus(nodes, engine, n)
        super().__init__(pool, engine.share_of(on_one, n_cpus), n)
        self._ray = ray
        actor = ray.remote(RayWorker).options(
            num_cpus=n_cpus, num_gpus=n_gpus, max_restarts=-1, max_concurrency=8
        )
        self._actors = [actor.remote() for _ in range(n)]

    async def run(self) -> None:
        """As Supervisor's."""
        try:
            await super().run()
        finally:
            for actor in self._actors:
                self._ray.kill(actor, no_restart=True)

    def stop(self) -> None:
        """Each lets those finish who are answered; the second time nobody may."""
        super().stop()
        for actor in self._actors:
            actor.drain.remote()

    async def _live(self, number: int, life: int) -> str:
        actor = self._actors[number]
        try:
            await self._there(actor)
            told = json.loads(await self._placing(number, actor.serve.remote(self._order(number))))
            if "error" in told:
                self._ray.kill(actor, no_restart=False)  # its process serves once
                return str(told["error"])
            if self._stops.is_set():
                actor.drain.remote()
            async with self._client(told["address"]) as client:
                where = f"process {told['pid']} at {told['address']}"
                its_life = self._up(number, client, WorkerReady(**told["told"]), where)
                try:
                    while await actor.news.remote() == "drains":
                        self._drains(number)
                finally:
                    self._down(number)
                    its_life.end()
        except self._ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines()
            return f"{type(error).__name__}: {lines[-1] if lines else 'no reason is told'}"
        if not self._stops.is_set():
            self._ray.kill(actor, no_restart=False)  # Ray makes the next one
        return "it has drained"

    def _kill(self, number: int) -> None:
        self._ray.kill(self._actors[number], no_restart=False)

    async def _there(self, actor: Any) -> None:
        """Waits while Ray starts it again."""
        end = time.monotonic() + _AGAIN_SECONDS
        while True:
            try:
                await actor.there.remote()
                return
            except self._ray.exceptions.ActorUnavailableError:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(0.1)

    async def _placing(self, number: int, told: Any) -> str:
        waiting = asyncio.ensure_future(_of(told))
        done, _ = await asyncio.wait({waiting}, timeout=_PLACED_SECONDS)
        if not done:
            _log.info("worker %d: still loading, or Ray has no free CPU or GPU for it", number)
        return await waiting


class RayWorker:
    """The actor. Each life of its process serves once."""

    def __init__(self) -> None:
        self._server: Server | None = None
        self._ended = threading.Event()
        self._news = threading.Condition()
        self._n_drains = 0
        self._n_told = 0
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self.drain())

    def there(self) -> None:
        """It can be asked."""

    def serve(self, order: str) -> str:
        """Loads, listens, and tells where; or what went wrong. JSON."""
        import ray

        read, ip = read_order(order), ray.util.get_node_ip_address()
        ready = threading.Event()
        failure: list[str] = []
        with contextlib.ExitStack() as opened:
            listener = opened.enter_context(listen(ip, 0))
            server = self._server = Server(read.settings, read.engine.load, ready.set)

            def run() -> None:
                try:
                    server.run(sockets=[listener])
                except (KVGraphError, ImportError, OSError, MemoryError) as error:
                    failure.append(" ".join(str(error).split()) or "there is not enough memory")
                finally:
                    listener.close()
                    self._ended.set()
                    ready.set()
                    self._tell()

            threading.Thread(target=run, daemon=True).start()
            opened.pop_all()
        ready.wait()
        if failure or not server.service.is_ready:
            return json.dumps({"error": failure[0] if failure else "it was told to end"})
        told = begun(read, server.service, f"tcp:[{ip}]:0" if ":" in ip else f"tcp:{ip}:0")
        return json.dumps({"address": address_of(listener), "pid": os.getpid(), "told": told._asdict()})

    def news(self) -> str:
        """Waits until it drains, "drains", or has ended, "ended"."""
        with self._news:
            self._news.wait_for(lambda: self._ended.is_set() or self._n_told < self._n_drains)
            if self._ended.is_set():
                return "ended"
            self._n_told = self._n_drains
            return "drains"

    def drain(self) -> None:
        """Lets those finish who are answered; the second time nobody may."""
        if self._server:
            self._server.stop()
        self._n_drains += 1
        # a signal's handler must not wait for a lock that its own thread may have
        threading.Thread(target=self._tell, daemon=True).start()

    def _tell(self) -> None:
        with self._news:
            self._news.notify_all()


async def _of(told: Any) -> str:
    return str(await told)


def _connected(address: str) -> Any:
    """The module, connected to a cluster."""
    env.tell_nobody()
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ImportError(f"{error.name} is missing: pip install 'pykvgraph[cluster]'") from error
    try:
        ray.init(
            address=None if address == "auto" else address,
            include_dashboard=False,
            logging_level=logging.WARNING,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        what = " ".join(str(error).split())
        raise KVGraphError(f"--cluster {address}: {what}") from None
    return ray


def _placed(cpus: list[int], n: int, threads: int) -> tuple[int, int]:
    """CPUs of each worker, and the most workers that a machine may get. cpus: of each machine."""
    for each in [threads] if threads else range(max(cpus, default=0), 0, -1):
        there = [have // each for have in cpus]
        if sum(there) >= n:
            return each, min(max(there), n)
    raise DeviceError(
        f"{n} workers need {threads or 1} CPUs each, and the machines of the Ray cluster have {cpus}: use "
        "fewer --workers or -t, or add machines"
    )


def _n_gpus(nodes: list[dict[str, float]], engine: EngineSpec, n: int) -> int:
    """Of each worker."""
    wants = engine.where.get("n_gpu_layers") != 0 and engine.where.get("device") not in ("none", "cpu")
    return int(wants and sum(int(node.get("GPU", 0)) for node in nodes) >= n)
