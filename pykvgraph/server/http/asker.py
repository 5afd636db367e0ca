"""Who asks, and what else a router wants done with what is asked."""

from __future__ import annotations

from dataclasses import dataclass

# headers that a router sends to its workers; what clients send of them it doesn't give on
COPY_TO_HEADER = "x-kvgraph-copy-to"
READS_HEADER = "x-kvgraph-reads"
TELLS_HEADER = "x-kvgraph-tells"  # tokens, in comments of a stream
NAME_HEADER = "x-kvgraph-name"  # of the request: what the worker tells while it reads it
SAID_HEADER = "x-kvgraph-said"  # the body has SAID_FIELD
SAID_FIELD = "x_kvgraph_said"
SAID_COMMENT = b":said "


@dataclass(frozen=True)
class Asker:
    """key: of the client; b"": the server has no keys. copy_to: address of a second worker, which is
    sent what this one decodes; "": none is. only_reads: that is all that is wanted, and of the prompt alone.
    tells: the tokens of a stream are told, each before its text. said: what another worker has said of the
    answer.
    """

    key: bytes
    copy_to: str = ""
    only_reads: bool = False
    tells: bool = False
    said: tuple[int, ...] = ()
