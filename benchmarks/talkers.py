"""Clients that talk in streams, and how long each of their tokens was waited for."""

from __future__ import annotations

import threading
import time
from collections import Counter

import httpx

N = 5
_SECONDS = 300.0  # that a talker waits for a token before it is an error
QUESTIONS = (
    "Tell me a long story about a fox.",
    "Why is the sky blue? Explain in detail.",
    "Describe a day at the sea.",
    "How does one bake bread?",
    "What did people eat in the Middle Ages?",
)


class Talkers:
    """gaps: seconds from a token of a stream to its next. firsts: until the first one. errors: by kind."""

    def __init__(self, url: str) -> None:
        self.gaps: list[float] = []
        self.firsts: list[float] = []
        self.errors: Counter[str] = Counter()
        self._url = url
        self._ends = threading.Event()
        self._threads = [threading.Thread(target=self._talk, args=(i,), daemon=True) for i in range(N)]
        for each in self._threads:
            each.start()

    def end(self) -> None:
        """Each breaks off."""
        self._ends.set()
        for each in self._threads:
            each.join(10)

    def _talk(self, number: int) -> None:
        with httpx.Client(base_url=self._url, timeout=_SECONDS) as client:
            for turn in range(1_000_000):
                if self._ends.is_set():
                    return
                try:
                    self._ask(client, f"{QUESTIONS[(number + turn) % len(QUESTIONS)]} ({number}, {turn})")
                except httpx.HTTPError as error:
                    self.errors[type(error).__name__] += not self._ends.is_set()
                    self._ends.wait(1)

    def _ask(self, client: httpx.Client, question: str) -> None:
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 300, "stream": True}
        last, is_first = time.monotonic(), True
        with client.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                self.errors[str(reply.status_code)] += 1
                self._ends.wait(1)
                return
            for line in reply.iter_lines():
                if self._ends.is_set():
                    return
                if line.startswith('data: {"error"'):
                    self.errors["an error in a stream"] += 1
                if line.startswith("data: {"):
                    now = time.monotonic()
                    (self.firsts if is_first else self.gaps).append(now - last)
                    last, is_first = now, False
