"""What workers send each other of their caches, and where they find each other."""

from __future__ import annotations

from pykvgraph.cluster.order import Order, WorkerReady, room_of
from pykvgraph.server.service import Service
from pykvgraph.tiers.peer_receiver import PeerReceiver
from pykvgraph.tiers.peers import Peers


def begun(order: Order, service: Service, address: str) -> WorkerReady:
    """What a worker tells of itself whose engine is there.

    Where the order says so, it takes from now on what others of the run send to the address, and sends them
    what it is asked to. Raises TransportError when nobody can listen there, and UnsupportedError for an
    engine without tiers.
    """
    engine, copies_at = service.engine, ""
    if order.copies:
        token = order.settings.run_token
        most = engine.most_record_bytes
        copies_at = PeerReceiver(address, token, most, engine.take_record).address
        service.peers = Peers(token)
    return WorkerReady(engine.context.n_ctx, room_of(engine, order.engine), copies_at)
