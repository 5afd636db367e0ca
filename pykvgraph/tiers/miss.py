"""Why something that might have been loaded was not."""

from __future__ import annotations

from typing import Literal, get_args

# gone: somebody has removed it. unreadable: the disk says so. foreign: no record at all. damaged: not the
# bytes that were written. other: the rows of something else. no-room: of memory, or of cells. late: decoding
# would be done by now. device: its rows could not be written
Reason = Literal["gone", "unreadable", "foreign", "damaged", "other", "no-room", "late", "device"]
REASONS: tuple[Reason, ...] = get_args(Reason)


class MissError(Exception):
    """It is decoded instead. Never leaves the engine."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason
