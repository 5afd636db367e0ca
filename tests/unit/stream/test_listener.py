"""Who may connect, and where one can listen."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import socket
import stat
import threading
import time
from pathlib import Path

import pytest
from support.ends import meanwhile, met

from pykvgraph import stream
from pykvgraph.errors import InvalidArgumentError, TransportError
from pykvgraph.stream.transports.hello import ConnectorSide, ListenerSide
from pykvgraph.stream.transports.listener import HELLO_SECONDS

HELLO = b"kvgs\1\0\0\0"


def raw(listener: stream.Listener) -> socket.socket:
    """A connection that says what the test wants."""
    kind, _, rest = listener.address.partition(":")
    connected = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    connected.settimeout(10)
    connected.connect(rest if kind == "unix" else ("127.0.0.1", int(rest.rpartition(":")[2])))
    return connected


def test_the_hello_is_that_of_the_table() -> None:
    """A connector of our own, from the words of hello.py."""
    with stream.listen("tcp:0", "secret", timeout=10) as listener:

        def connect() -> None:
            with raw(listener) as connected:
                challenge = connected.recv(40, socket.MSG_WAITALL)
                assert challenge[:8] == HELLO
                own = bytes(range(32))
                both = challenge[8:] + own
                proof = hmac.new(b"secret", b"kvgs 1 connector" + both, hashlib.sha256).digest()
                connected.sendall(HELLO + own + proof)
                welcome = connected.recv(32, socket.MSG_WAITALL)
                assert welcome == hmac.new(b"secret", b"kvgs 1 listener" + both, hashlib.sha256).digest()

        with meanwhile(connect), listener.accept():
            pass


def test_the_token_does_not_travel_and_no_hello_is_like_another() -> None:
    seen: list[set[bytes]] = []
    for _ in range(2):
        listener, connector = ListenerSide(b"secret"), ConnectorSide(b"secret")
        challenge = listener.challenge()
        answer = connector.answer(challenge)
        welcome = listener.welcome(answer)
        connector.check(welcome)
        seen.append({challenge[8:], answer[8:40], answer[40:], welcome})
    assert len(seen[0] | seen[1]) == 8
    assert all(b"secret" not in each for each in seen[0] | seen[1])


@pytest.mark.parametrize(("there", "here"), [("a", "b"), ("a", None), (None, "b")])
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_another_token(tmp_path: Path, kind: str, there: str | None, here: str | None) -> None:
    """Refused; whoever knows it gets in all the same."""
    address = f"unix:{tmp_path}/s" if kind == "unix" else "tcp:0"
    with stream.listen(address, there, timeout=10) as listener:

        def refused() -> None:
            with pytest.raises(
                TransportError, match=r"the listener refused, or is not ours .* the same token"
            ):
                stream.open(listener.address, here, timeout=10)

        def connect() -> None:
            refused()
            stream.open(listener.address, there, timeout=10).close()

        with meanwhile(connect), listener.accept():
            pass


def test_a_listener_that_does_not_know_the_token() -> None:
    """It could have sent anything: the connector asks for its proof, too."""
    with socket.create_server(("127.0.0.1", 0)) as false:

        def answer() -> None:
            connected, _ = false.accept()
            with connected:
                connected.sendall(HELLO + bytes(32))
                mirrored = connected.recv(72, socket.MSG_WAITALL)
                connected.sendall(mirrored[40:])

        with (
            meanwhile(answer),
            pytest.raises(TransportError, match=r"refused, or is not ours \(it has another token\)"),
        ):
            stream.open(f"tcp:{false.getsockname()[1]}", "secret", timeout=10)


@pytest.mark.parametrize(
    "said", [b"HTTP/1.1 400 Bad Request\r\n" * 2, b"kvgs\2\0\0\0" + bytes(32), b"", b"kvgs"]
)
def test_a_listener_that_is_not_ours(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as false:

        def answer() -> None:
            connected, _ = false.accept()
            with connected:
                connected.sendall(said)

        with meanwhile(answer), pytest.raises(TransportError, match="the listener refused, or is not ours"):
            stream.open(f"tcp:{false.getsockname()[1]}", timeout=10)


def test_a_listener_that_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        with pytest.raises(
            TransportError, match=r"has not answered for 0\.2 s; see whether it waits in accept"
        ):
            stream.open(f"tcp:{silent.getsockname()[1]}", timeout=0.2)
        assert time.monotonic() - start < 5


def test_strangers_keep_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred that say nothing, half of an answer, or nonsense: the right one gets in at once."""
    with stream.listen(f"unix:{tmp_path}/s", "secret", timeout=20) as listener:
        strangers = []

        def connect() -> None:
            for i in range(100):
                strangers.append(raw(listener))
                strangers[-1].send((b"", b"kvgs\1", b"GET / HTTP/1.1\r\n" * 5)[i % 3])
            start = time.monotonic()
            with stream.open(listener.address, "secret", timeout=20):
                assert time.monotonic() - start < HELLO_SECONDS

        with meanwhile(connect), listener.accept():
            pass
        assert len(listener._strangers()) <= 64
        monkeypatch.setattr(listener, "timeout", 0.1)
        for stranger in listener._strangers():
            stranger.deadline = 0
        with pytest.raises(
            TransportError, match=r"nobody with the token has connected for 0\.1 s \(the last"
        ):
            listener.accept()
        assert not listener._strangers()
        for each in strangers:
            each.close()


def test_nobody_connects() -> None:
    with stream.listen("tcp:0", timeout=0.1) as listener:
        start = time.monotonic()
        with pytest.raises(
            TransportError, match=r"nobody with the token has connected for 0\.1 s; start the"
        ):
            listener.accept()
        assert 0.09 < time.monotonic() - start < 5


def test_closed_while_it_waits() -> None:
    with stream.listen("tcp:0", timeout=30) as listener:

        def wait() -> None:
            with pytest.raises(TransportError, match="it was closed here; listen anew"):
                listener.accept()

        with meanwhile(wait):
            time.sleep(0.05)
            listener.close()
        listener.close()


def test_what_was_accepted_outlives_the_listener() -> None:
    with stream.listen("tcp:0", timeout=10) as listener:
        one, other = met(listener, timeout=10)
    with one, other:
        one.flush("k", b"1")
        other.fetch("k", bytearray(1))
        with pytest.raises(TransportError, match="nobody can be reached there"):
            stream.open(listener.address, timeout=10)


def test_a_path_is_for_its_owner_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "s"
    before = os.umask(0)
    try:
        with stream.listen(f"unix:{path}"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)
    assert not path.exists()


def test_a_path_that_is_taken(tmp_path: Path) -> None:
    """By a listener, or by a file. What a listener left that died makes way."""
    path = tmp_path / "s"
    with stream.listen(f"unix:{path}", timeout=10) as listener:
        with pytest.raises(TransportError, match=r"nobody can listen there .* name another address"):
            stream.listen(f"unix:{path}")
        one, other = met(listener, timeout=10)
        one.close()
        other.close()
    path.write_text("mine")
    with pytest.raises(TransportError, match="nobody can listen there"):
        stream.listen(f"unix:{path}")
    assert path.read_text() == "mine"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as died:
        died.bind(os.fspath(path))
    assert path.exists()
    with stream.listen(f"unix:{path}"):
        path.unlink()
        path.write_text("of somebody else")
    assert path.exists()


def test_leftovers_are_removed_by_one_at_a_time(tmp_path: Path) -> None:
    """Whoever has the folder's lock may be about to listen there."""
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(TransportError, match="nobody can listen there"):
        stream.listen(f"unix:{tmp_path}/s", timeout=0.1)

    def let_go() -> None:
        time.sleep(0.05)
        os.close(folder)

    with meanwhile(let_go), stream.listen(f"unix:{tmp_path}/s", timeout=20):
        assert stat.S_ISSOCK((tmp_path / "s").stat().st_mode)


def test_of_many_that_find_a_leftover_one_listens(tmp_path: Path) -> None:
    path = tmp_path / "s"
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as died:
            died.bind(os.fspath(path))
        listeners: list[stream.Listener] = []
        start = threading.Barrier(4)

        def listen(found: list[stream.Listener] = listeners, start: threading.Barrier = start) -> None:
            start.wait()
            with contextlib.suppress(TransportError):
                found.append(stream.listen(f"unix:{path}", timeout=10))

        with meanwhile(listen), meanwhile(listen), meanwhile(listen):
            listen()
        (listener,) = listeners
        one, other = met(listener, timeout=10)
        one.close()
        other.close()
        listener.close()


@pytest.mark.parametrize("address", ["tcp:0.0.0.0:0", "tcp:[::]:0"])
def test_other_machines_need_a_token(address: str) -> None:
    with pytest.raises(InvalidArgumentError, match="is open to other machines, so it needs a token"):
        stream.listen(address)
    if not address.startswith("tcp:[") or socket.has_ipv6:
        try:
            stream.listen(address, "secret").close()
        except TransportError as error:
            assert "tcp:[" in str(error)  # no IPv6 here


@pytest.mark.parametrize("address", ["tcp:0", "tcp::0", "tcp:127.0.0.1:0", "tcp:localhost:0"])
def test_ways_to_say_this_machine(address: str) -> None:
    with stream.listen(address, timeout=10) as listener:
        one, other = met(listener, timeout=10)
        with one, other:
            assert one.address == listener.address != address


@pytest.mark.parametrize("address", ["tcp:here", "tcp:1:2:x", "tcp:65536", "tcp:-1", "tcp:", "tcp:\u0661"])
def test_ports_that_are_none(address: str) -> None:
    for call in (stream.open, stream.listen):
        with pytest.raises(InvalidArgumentError, match=r"^address must be "):
            call(address)


def test_hosts_and_paths_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match=r"the host 'no such\.invalid' is not known"):
        stream.open("tcp:no such.invalid:1")
    with pytest.raises(InvalidArgumentError, match="has 108 bytes, and a socket's has 107 at most"):
        stream.listen("unix:" + "x" * 108)
    with pytest.raises(TransportError, match=r"nobody can be reached there \(No such file"):
        stream.open(f"unix:{tmp_path}/none")
    with pytest.raises(TransportError, match=r"nobody can listen there \(No such file"):
        stream.listen(f"unix:{tmp_path}/none/s")


@pytest.mark.parametrize("token", ["", 7, b"bytes", "\ud800"])
def test_tokens_that_are_refused(token: str) -> None:
    for call in (stream.open, stream.listen):
        with pytest.raises(InvalidArgumentError, match=r"^token must be text"):
            call("tcp:1", token)
    with pytest.raises(InvalidArgumentError, match="takes no token"):
        stream.open("memory:x", "secret")
