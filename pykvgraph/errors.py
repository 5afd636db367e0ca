"""pykvgraph's exceptions, and what can't be copied."""

from __future__ import annotations

from typing import NoReturn


class KVGraphError(Exception):
    """The base of pykvgraph's exceptions; raised itself for broken logits, and for a bug in kvgraph."""


class ModelLoadError(KVGraphError, ValueError):
    """The file is not a GGUF model, or it is damaged or can't be read."""


class InvalidArgumentError(KVGraphError, ValueError):
    """An argument has a value that the call doesn't accept; the call changed nothing."""


class CopyError(InvalidArgumentError, TypeError):
    """The object can't be copied or pickled, because it owns memory of the native library."""


class CacheFullError(KVGraphError, RuntimeError):
    """The cache has fewer empty cells than the call needs; the call changed nothing."""


class UnsupportedError(KVGraphError, NotImplementedError):
    """The request is valid, but this build, model or device can't do it; the call changed nothing."""


class StateError(KVGraphError, ValueError):
    """A saved state is damaged, or was saved with another model or another kind of cache."""


class DeviceError(KVGraphError, RuntimeError):
    """A device is missing, out of memory, or failed.

    The cache has the tokens and positions that it had before the call. A defrag or a K-shift that was pending
    may have been done, or is still pending. When the device fails in the middle of a K-shift, a sorting
    defrag or a load, K and V are unusable: every call that needs them then raises DeviceError, until
    `KVCache.clear()`.
    """


class TransportError(KVGraphError, ConnectionError):
    """The other end of a stream is gone, stalled, or sends what is not right. This end is closed then."""


class NotCopied:
    """What owns or reaches a native object: copy.copy, copy.deepcopy and pickle raise CopyError for it.

    A copy would be a second owner, which uses the native object after the first one has freed it.
    """

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """All three ask this. Raises CopyError."""
        name = type(self).__name__
        raise CopyError(f"a {name} can't be copied or pickled: share this one, or make a new one")
