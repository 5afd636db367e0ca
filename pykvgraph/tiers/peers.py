"""The engines that copies go to, by their addresses."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from pykvgraph.stream.transports.opening import open as open_transport
from pykvgraph.stream.transports.transport import Transport
from pykvgraph.tiers.peer import Peer

# before anything was loaded: seconds of a record, and of a byte that is in memory or on a disk
_RECORD = 5e-4
_MEMORY_BYTE = 5e-10
_DISK_BYTE = 5e-9
_WEIGHT = 0.3  # of what was loaded last
_FADES = 0.99  # what was slow is tried again, some time


class Cost(NamedTuple):
    """Of a text's records. first: seconds as they were expected before anything was loaded."""

    first: float
    on_disk: bool


class LoadRate:
    """Seconds of loading, from memory and from the disk: the first guess times a factor that is learned."""

    def __init__(self) -> None:
        self._factors = [1.0, 1.0]

    def cost(self, sizes: Iterable[tuple[int, bool]]) -> Cost:
        """sizes: of each record its bytes, and whether it is on the disk."""
        first, any_on_disk = 0.0, False
        for n_bytes, on_disk in sizes:
            first += _RECORD + n_bytes * (_DISK_BYTE if on_disk else _MEMORY_BYTE)
            any_on_disk |= on_disk
        return Cost(first, any_on_disk)

    def seconds(self, cost: Cost) -> float:
        """As it is expected now."""
        return cost.first * self._factors[cost.on_disk]

    def learn(self, cost: Cost, seconds: float) -> None:
        """What it took."""
        factor = self._factors[cost.on_disk]
        self._factors[cost.on_disk] = factor + _WEIGHT * (seconds / cost.first - factor)

    def refuse(self, cost: Cost) -> None:
        """It was expected to take too long."""
        factor = self._factors[cost.on_disk]
        self._factors[cost.on_disk] = 1.0 + (factor - 1.0) * _FADES


_MOST = 256  # that are open; the one used longest ago is closed
_IDLE_SECONDS = 600.0  # those that got nothing for so long are closed when there is a new one


class Peers:
    """token: what those who listen were given. For several threads."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, Peer] = OrderedDict()

    def at(self, address: str) -> Peer:
        """The one that listens there; it is connected to when there is something to send."""

        def connect() -> Transport:
            return open_transport(address, self._token)

        with self._lock:
            if address not in self._peers:
                self._close_idle()
                self._peers[address] = Peer(connect)
            self._peers.move_to_end(address)
            self._peers[address].used = time.monotonic()
            if len(self._peers) > _MOST:
                self._peers.popitem(last=False)[1].close()
            return self._peers[address]

    def _close_idle(self) -> None:
        """Each has a thread, and of those that have ended nobody tells."""
        latest = time.monotonic() - _IDLE_SECONDS
        for address in [each for each, peer in self._peers.items() if peer.used < latest]:
            self._peers.pop(address).close()

    def close(self) -> None:
        """Closes all of them."""
        with self._lock:
            for peer in self._peers.values():
                peer.close()
            self._peers.clear()
