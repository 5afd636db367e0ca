from __future__ import annotations

import errno

import pytest

import pykvgraph
from pykvgraph import errors
from pykvgraph._native.ffi import KvgStatus
from pykvgraph._native.status import errcheck


@pytest.mark.parametrize(
    ("status", "kinds"),
    [
        (KvgStatus.KVG_INVALID_ARGUMENT, (errors.InvalidArgumentError, errors.KVGraphError, ValueError)),
        (KvgStatus.KVG_MODEL_LOAD, (errors.ModelLoadError, errors.KVGraphError, ValueError)),
        (KvgStatus.KVG_NOT_FOUND, (FileNotFoundError,)),
        (KvgStatus.KVG_CACHE_FULL, (errors.CacheFullError, errors.KVGraphError, RuntimeError)),
        (KvgStatus.KVG_UNSUPPORTED, (errors.UnsupportedError, errors.KVGraphError, NotImplementedError)),
        (KvgStatus.KVG_DEVICE, (errors.DeviceError, errors.KVGraphError, RuntimeError)),
        (KvgStatus.KVG_INTERNAL, (errors.KVGraphError,)),
        (99, (errors.KVGraphError,)),
    ],
)
def test_status_becomes_class(status: int, kinds: tuple[type[Exception], ...]) -> None:
    check = errcheck(lambda: "what was wrong, é".encode())
    with pytest.raises(kinds[0], match=r"^(\[Errno 2\] )?what was wrong, é$") as caught:
        check(status, None, ())
    assert all(isinstance(caught.value, kind) for kind in kinds)
    assert type(caught.value) is kinds[0]


def test_a_missing_file_has_errno_and_name() -> None:
    check = errcheck(lambda: b"/no/file can't be opened: No such file or directory")
    with pytest.raises(FileNotFoundError) as caught:
        check(KvgStatus.KVG_NOT_FOUND, None, (b"/no/file", None))
    assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, "/no/file")
    assert str(caught.value) == "[Errno 2] No such file or directory: '/no/file'"


def test_a_file_that_is_named_in_a_record() -> None:
    """As an assistant's is: the first argument is the model's."""
    check = errcheck(lambda: b"other can't be opened: No such file or directory")
    with pytest.raises(FileNotFoundError) as caught:
        check(KvgStatus.KVG_NOT_FOUND, None, (b"/model", None))
    assert str(caught.value) == "[Errno 2] No such file or directory: 'other'"


def test_an_empty_path_is_named() -> None:
    check = errcheck(lambda: b" can't be opened: No such file or directory")
    with pytest.raises(FileNotFoundError) as caught:
        check(KvgStatus.KVG_NOT_FOUND, None, (b"", None))
    assert str(caught.value) == "[Errno 2] No such file or directory: ''"


def test_every_status_is_tested() -> None:
    assert len(KvgStatus) == 8


def test_ok_asks_for_no_message() -> None:
    def never() -> bytes:
        raise AssertionError("asked for a message")

    errcheck(never)(KvgStatus.KVG_OK, None, ())


def test_no_memory_for_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is rarely used is imported when it is asked for; reading a folder may fail for lack of memory."""

    def fails(module: str) -> None:
        raise OSError(error, "as the system says it", module)

    monkeypatch.setattr(pykvgraph, "_import_module", fails)
    monkeypatch.delitem(vars(pykvgraph), "plan_memory", raising=False)
    error = errno.ENOMEM
    with pytest.raises(MemoryError, match=r"no memory to import pykvgraph\."):
        _ = pykvgraph.plan_memory
    error = errno.EIO
    with pytest.raises(OSError, match="as the system says it"):
        _ = pykvgraph.plan_memory


def test_state_error_is_a_value_error() -> None:
    assert issubclass(errors.StateError, (errors.KVGraphError, ValueError))
    assert issubclass(errors.StateError, ValueError)
