"""What is typed in a chat, and what comes through a pipe."""

from __future__ import annotations

import io

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from pykvgraph.cli.chat_input import PipeInput, TerminalInput


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("\n  \n one \n\n", ["one"]),
        ("one\\\ntwo\nthree", ["one\ntwo", "three"]),
        ("one\\", ["one"]),
        ("one\r\n", ["one"]),
        ("", []),
    ],
)
def test_pipe(text: str, messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    given = PipeInput()
    assert list(iter(given.read, None)) == messages


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("one\r", "one"),
        ("\r  \rone\r", "one"),
        ("one\x1b\rtwo\r", "one\ntwo"),
        ("one\\\rtwo\r", "one\ntwo"),
        ("\x1b[200~one\ntwo\x1b[201~\r", "one\ntwo"),
        ("\x04", None),
    ],
    ids=["enter", "nothing", "alt-enter", "backslash", "paste", "ctrl-d"],
)
def test_terminal(keys: str, message: str | None) -> None:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text(keys)
        assert TerminalInput().read() == message


def test_terminal_has_a_history_and_edits() -> None:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        given = TerminalInput()
        pipe.send_text("one\r")
        given.read()
        pipe.send_text("\x1b[A\r")  # up
        assert given.read() == "one"
        pipe.send_text("!\r")
        assert given.read("what was") == "what was!"


def test_ctrl_c() -> None:
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text("one\x03")
        with pytest.raises(KeyboardInterrupt):
            TerminalInput().read()
