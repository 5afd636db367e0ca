"""Two ends in one process whose rows needn't leave their device: `memory`, and packed rows besides."""

from __future__ import annotations

from pykvgraph.kv_cache.saved.device_rows import PackedRows
from pykvgraph.stream.transports.memory import MemoryTransport
from pykvgraph.stream.transports.transport import check_key


class DeviceTransport(MemoryTransport):
    """One end of a pair in this process. Regions of bytes travel as over `memory`."""

    def flush_rows(self, key: str, rows: PackedRows) -> None:
        """Sends packed rows, which nobody changes any more. Raises as flush() does."""
        check_key(key)
        way = self._out
        with self._sending, self._ending_on_error():
            with self._changed:
                self._wait(
                    lambda: way.receiver_closed or way.rows_wanted == key or way.arrived.has_room(len(rows)),
                    f"nobody has fetched region {key!r} for {self.timeout:g} s",
                )
                if way.receiver_closed:
                    raise self._error("the other end is closed", "open both anew")
                way.arrived.add(key, rows)
                self._changed.notify_all()
            self.flushes += 1
            self.bytes_sent += len(rows)

    def fetch_rows(self, key: str, n_bytes: int) -> PackedRows:
        """What flush_rows() sent under that key. Raises as fetch() does."""
        check_key(key)
        with self._receiving, self._ending_on_error():
            rows = self._take_rows(key)
            if len(rows) != n_bytes:
                raise self._other_size(key, len(rows), n_bytes)
            if not isinstance(rows, PackedRows):
                raise self._error(f"region {key!r} has bytes, no packed rows", "open both anew")
            return rows

    def _take_rows(self, key: str) -> PackedRows | bytes | bytearray:
        way = self._in
        with self._changed:
            way.rows_wanted = key
            self._changed.notify_all()
            try:
                self._wait(
                    lambda: way.arrived.has(key) or way.sender_closed,
                    f"region {key!r} has not come for {self.timeout:g} s",
                )
            finally:
                way.rows_wanted = None
            rows = way.arrived.take(key)
            self._changed.notify_all()
        if rows is None:
            raise self._error(f"the other end is closed, and region {key!r} has not come", "open both anew")
        return rows
