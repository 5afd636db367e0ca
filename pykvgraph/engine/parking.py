"""A request that is set aside until its caller wants it back."""

from __future__ import annotations

from concurrent.futures import Future

from pykvgraph.engine.request import Request


class Parking:
    """What a caller asks for. parks: False: it is to come back. done: whether there was anything to do."""

    def __init__(self, request: Request, parks: bool) -> None:
        self.request = request
        self.parks = parks
        self.done: Future[bool] = Future()
