"""A stream that another worker repeats."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pykvgraph.cluster.replay import RepeatError, Replay


def event(value: Any, name: str = "") -> bytes:
    front = f"event: {name}\n" if name else ""
    return f"{front}data: {json.dumps(value)}\n\n".encode()


def chunk(text: str, index: int = 0, name: str = "A") -> bytes:
    return event(
        {"choices": [{"index": index, "delta": {"content": text}}], "id": name, "created": len(name)}
    )


def test_what_was_sent_is_left_out_and_ids_stay() -> None:
    replay = Replay()
    first = [chunk("Once"), chunk(" upon")]
    assert [replay.take(each) for each in first] == first
    for name in ("BB", "CCC"):  # it is cut off twice
        replay.again()
        assert [replay.take(chunk(text, name=name)) for text in ("Once", " upon")] == [b"", b""]
    rest = replay.take(chunk(" a", name="CCC"))
    assert b'"id": "A"' in rest and b" a" in rest
    replay.again()
    again = [replay.take(chunk(text, name="D")) for text in ("Once", " upon", " a")]
    assert again == [b""] * 3
    assert replay.take(b"data: [DONE]\n\n") == b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "other",
    [chunk("One"), chunk(""), event({"choices": []}), event({"error": {"code": 503}}), b"data: [DONE]\n\n"],
)
def test_another_text_is_refused(other: bytes) -> None:
    replay = Replay()
    replay.take(chunk("Once"))
    replay.again()
    if b'"index"' in other:
        with pytest.raises(RepeatError):
            replay.take(other)
        return
    with pytest.raises(RepeatError):  # it may belong elsewhere, but then its own place is missing
        replay.take(other)
        replay.end()


def test_how_far_a_prompt_is_is_not_told_again() -> None:
    """Another worker decodes it in other parts, and an event's number tells how many there were before."""

    def far(n: int, number: int) -> bytes:
        return event({"prompt_progress": {"processed": n}, "sequence_number": number})

    def said(number: int) -> bytes:
        return event({"delta": "a", "sequence_number": number})

    replay = Replay()
    first = [far(0, 0), far(9, 1), said(2)]
    assert [replay.take(each) for each in first] == first
    replay.again()
    again = [far(5, 0), far(7, 1), far(9, 2), said(3)]
    assert [replay.take(each) for each in again] == [b""] * 4
    quoted = chunk('"prompt_progress":')  # words of a text, and no field
    assert replay.take(quoted) == quoted


def test_answers_of_a_request_may_take_turns_otherwise() -> None:
    replay = Replay()
    sent = [chunk("a", 0), chunk("b", 1), chunk("c", 0)]
    assert [replay.take(each) for each in sent] == sent
    replay.again()
    assert [replay.take(each) for each in (chunk("b", 1), chunk("a", 0))] == [b"", b""]
    assert replay.take(chunk("d", 1)) == chunk("d", 1)
    assert replay.take(chunk("c", 0)) == b""
    replay.end()


def test_signs_of_life_pass() -> None:
    replay = Replay()
    assert replay.take(b":\n\n") == b":\n\n"
    replay.take(chunk("a"))
    replay.again()
    assert replay.take(b":\n\n") == b":\n\n"
    assert replay.take(chunk("a")) == b""


def test_timings_and_floats_of_scores_do_not_count() -> None:
    replay = Replay()
    replay.take(event({"content": "a", "timings": {"predicted_ms": 1.5}, "logprobs": [-0.1]}))
    replay.again()
    assert replay.take(event({"content": "a", "timings": {}, "logprobs": [-0.2]})) == b""
