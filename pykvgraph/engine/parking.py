"""A request that is set aside until its caller wants it back."""

from __future__ import annotations

from concurrent.futures import Future

from pykvgraph.engine.request import Request
from pykvgraph.engine.running import Texts
from pykvgraph.errors import KVGraphError


class Parking:
    """What a caller asks for. parks: False: it is to come back. done: whether there was anything to do."""

    def __init__(self, request: Request, parks: bool) -> None:
        self.request = request
        self.parks = parks
        self.done: Future[bool] = Future()

    def run(self, texts: Texts) -> None:
        """Does it, between two steps; `done` has what came of it."""
        try:
            self.done.set_result(texts.park(self.request) if self.parks else texts.resume(self.request))
        except (KVGraphError, MemoryError) as error:
            self.done.set_exception(error)
