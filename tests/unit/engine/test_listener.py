"""One task that listens to many requests, which other threads let speak."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from pykvgraph.engine.listener import RequestListener
from pykvgraph.engine.request import Request
from pykvgraph.engine.types import PromptProgress
from pykvgraph.errors import DeviceError
from pykvgraph.types import Piece


def request() -> Request:
    return Request(1, lambda _: None)


def piece(token: int) -> Piece:
    return Piece("", token, 0.0, None)


def says(asked: Request, tokens: list[int]) -> None:
    for token in tokens:
        asked._say(piece(token))
    completion: Any = None
    asked._complete(0, completion)


def tokens_of(pieces: list[Piece] | PromptProgress) -> list[int]:
    assert isinstance(pieces, list)
    return [each.token for each in pieces]


async def heard(
    listener: RequestListener, on_end: Callable[[int], None] = lambda number: None
) -> dict[int, list[int]]:
    """The tokens of each request, which end with -1."""
    found: dict[int, list[int]] = {}
    async for number, pieces in listener.bunches():
        assert isinstance(pieces, list)
        found.setdefault(number, []).extend([each.token for each in pieces] or [-1])
        if not pieces:
            on_end(number)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_each_is_heard_once_and_in_order(seed: int) -> None:
    """Some have ended before, some speak meanwhile, one at a time or all at once."""
    rng = random.Random(seed)
    asked = [request() for _ in range(300)]
    tokens = [list(range(rng.randrange(6))) for _ in asked]

    def speak() -> None:
        for number in rng.sample(range(100, 300), 200):
            says(asked[number], tokens[number])
            if rng.random() < 0.1:
                time.sleep(0.001)

    async def main() -> dict[int, list[int]]:
        for number in range(100):
            says(asked[number], tokens[number])
        thread = threading.Thread(target=speak)
        thread.start()
        try:
            return await asyncio.wait_for(heard(RequestListener(asked)), 30)
        finally:
            thread.join()

    found = asyncio.run(main())
    assert found == {number: [*each, -1] for number, each in enumerate(tokens)}
    assert not any(each._wakes for each in asked)
    assert [each.token for each in asked[200]] == []  # whoever listens later hears the end


def test_one_that_is_added_when_another_has_ended() -> None:
    async def main() -> dict[int, list[int]]:
        first = request()
        listener = RequestListener([first])
        says(first, [7])

        def on_end(number: int) -> None:
            if number < 5:
                new = request()
                listener.add(new)
                threading.Timer(0.001, says, (new, [number])).start()

        return await asyncio.wait_for(heard(listener, on_end), 30)

    assert asyncio.run(main()) == {0: [7, -1], **{i + 1: [i, -1] for i in range(5)}}


def test_one_that_ends_while_it_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes the loop once more then: its end is told once, and the others are waited for."""

    async def main() -> list[tuple[int, list[int]]]:
        first, second = request(), request()
        said_by_now = first._said_by_now

        def late() -> Any:
            if not first.done:
                says(first, [1])
                threading.Timer(0.05, says, (second, [2])).start()
            return said_by_now()

        monkeypatch.setattr(first, "_said_by_now", late)
        bunches = RequestListener([first, second]).bunches()
        return [(number, tokens_of(pieces)) async for number, pieces in bunches]

    assert asyncio.run(asyncio.wait_for(main(), 30)) == [(0, [1]), (0, []), (1, [2]), (1, [])]


@pytest.mark.parametrize("hears", [True, False])
def test_how_far_a_prompt_is_comes_before_what_is_said(hears: bool) -> None:
    """Also what was told before anybody listened; and by whom nobody wants to hear it, nobody is woken."""
    told = [PromptProgress(9, 0, n, n / 10) for n in (0, 4, 9)]

    async def main() -> list[PromptProgress | list[int]]:
        asked, found = request(), []
        asked._report(told[0])
        listener = RequestListener([asked], hears_progress=hears)

        def speak() -> None:
            asked._report(told[1])
            time.sleep(0.02)
            asked._report(told[2])
            says(asked, [5])

        threading.Timer(0.02, speak).start()
        async for _, news in listener.bunches():
            found.append(news if isinstance(news, PromptProgress) else tokens_of(news))
        return found

    found = asyncio.run(asyncio.wait_for(main(), 30))
    assert found == [*(told if hears else []), [5], []]


def test_an_error_ends_all_and_nobody_is_woken_any_more() -> None:
    async def main() -> list[Request]:
        asked = [request() for _ in range(10)]
        threading.Timer(0.01, asked[3]._fail, (DeviceError("broken"),)).start()
        with pytest.raises(DeviceError, match="broken"):
            await asyncio.wait_for(heard(RequestListener(asked)), 30)
        return asked

    assert not any(each._wakes for each in asyncio.run(main()))


def test_others_have_their_turn_meanwhile() -> None:
    """While thousands have something to say at once."""

    async def main() -> int:
        asked = [request() for _ in range(2000)]
        for each in asked:
            says(each, [1])
        n_turns = 0

        async def other() -> None:
            nonlocal n_turns
            while True:
                n_turns += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(other())
        await heard(RequestListener(asked))
        task.cancel()
        return n_turns

    assert asyncio.run(main()) >= 20
