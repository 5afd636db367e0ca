"""Which layers of a model travel over which transport."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pykvgraph.checks import integer, shown
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.stream.transports.transport import Transport


class Layout:
    """What each transport carries: layers by their numbers in the model.

    A sender may have some of the layers, as a worker of several does; a receiver must have all of them. What
    one layer has travels over one transport alone.

    parts: transports with their layers, in rising order. Raises InvalidArgumentError for a layer that is
    there twice, and for what is no transport.
    """

    def __init__(self, parts: Mapping[Transport, Iterable[int]]) -> None:
        if not isinstance(parts, Mapping) or not parts:
            raise InvalidArgumentError(f"parts must be a dict of transports and layers, got {shown(parts)}")
        found: dict[int, Transport] = {}
        for transport, layers in parts.items():
            if not isinstance(transport, Transport):
                raise InvalidArgumentError(f"a part must be of a Transport, got {shown(transport)}")
            for layer in layers:
                number = integer(layer, "a layer", 0)
                if number in found:
                    raise InvalidArgumentError(
                        f"layer {number} is there twice: it travels over one transport"
                    )
                found[number] = transport
        self.parts = tuple(
            (transport, tuple(sorted(layer for layer, of in found.items() if of is transport)))
            for transport in parts
        )
        self.layers = frozenset(found)

    def close(self) -> None:
        """Closes the transports."""
        for transport, _ in self.parts:
            transport.close()


def crossings(source: Sequence[range], target: Sequence[range]) -> dict[tuple[int, int], range]:
    """Which layers go from which worker to which when both split a model, each in its own way.

    source, target: the layers of each worker, neighbours. Returns, for (a sender, a receiver) that have
    layers in common, these: each pair needs a transport.
    """
    return {
        (i, j): range(max(ours.start, theirs.start), min(ours.stop, theirs.stop))
        for i, ours in enumerate(source)
        for j, theirs in enumerate(target)
        if max(ours.start, theirs.start) < min(ours.stop, theirs.stop)
    }
