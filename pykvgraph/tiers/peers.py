"""The engines that copies go to, by their addresses."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict

from pykvgraph.stream.transports.opening import open as open_transport
from pykvgraph.stream.transports.transport import Transport
from pykvgraph.tiers.peer import Peer

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
