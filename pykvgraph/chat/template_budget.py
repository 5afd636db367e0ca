"""What rendering a chat template, a program of others, may take: steps, and characters of text."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any, TypeVar

V = TypeVar("V")

# A step is 1 us or less: an iteration of a loop of 32 nodes of syntax, 8 elements that are looked at; a call
# is four. Of llama.cpp's templates one takes 900,000 for 1,000 messages with tools, as it looks at all of
# them for each, and the others 330,000 at most.
MOST_STEPS = 4_000_000
# of all texts that it makes, with what lists of them take beside; a second of copying
MOST_CHARACTERS = 1 << 30
MOST_TEXT = 1 << 26  # characters of one text: no tokenizer here takes more
_PER_STEP = 8
_PER_ELEMENT = 64  # bytes that a short text takes in a list
_SMALL = 4096  # what texts up to this length cost is part of the step


class BudgetError(Exception):
    """A template takes more than it may; says of what."""


class Budget:
    """What is left for one rendering. Everything raises BudgetError before it takes more."""

    def __init__(self) -> None:
        self._steps = MOST_STEPS
        self._characters = MOST_CHARACTERS

    def step(self, n: int = 1) -> None:
        """n steps are taken."""
        self._steps -= n
        if self._steps < 0:
            raise BudgetError(f"it takes more than {MOST_STEPS} steps")

    def make(self, n: int) -> None:
        """A text of n characters is made, or looked at."""
        if n <= _SMALL:
            return
        if n > MOST_TEXT:
            raise BudgetError(f"it makes a text of more than {MOST_TEXT} characters")
        self._characters -= n
        if self._characters < 0:
            raise BudgetError(f"it makes texts of more than {MOST_CHARACTERS} characters")

    def make_list(self, n: int) -> None:
        """A list of n texts is made."""
        self.step(n // _PER_STEP)
        self._characters -= n * _PER_ELEMENT
        if self._characters < 0:
            raise BudgetError(f"it makes texts of more than {MOST_CHARACTERS} characters")

    def glance(self, value: object) -> None:
        """Something is gone through, but not what is in its elements."""
        if isinstance(value, str):
            self.make(len(value))
        elif isinstance(
            value, (list, tuple, Mapping, range, set, frozenset, ValuesView, KeysView, ItemsView)
        ):
            self.step(len(value) // _PER_STEP)

    def look(self, value: object) -> int:
        """Something is gone through with all that is in it; returns how many characters it is, about.

        What is there several times is counted as often: a comparison, or its text, would not end sooner.
        """
        if isinstance(value, str):
            self.make(len(value))
            return len(value)
        n = 0
        todo: list[Any] = [value]
        while todo:
            each = todo.pop()
            n += 8
            if isinstance(each, str):
                n += len(each)
            elif isinstance(each, Mapping):
                self.step(1 + len(each) // _PER_STEP)
                todo += each.keys()
                todo += each.values()
            elif isinstance(each, range):
                self.step(1 + len(each) // _PER_STEP)
                n += 8 * len(each)
            elif isinstance(each, (list, tuple, set, frozenset, ValuesView, KeysView, ItemsView)):
                self.step(1 + len(each) // _PER_STEP)
                todo += each
            if n > MOST_TEXT:
                raise BudgetError(f"it makes a text of more than {MOST_TEXT} characters")
        self.make(n)
        return n

    def counted(self, values: Iterable[V]) -> Iterator[V]:
        """The values, a step each."""
        for value in values:
            self.step()
            yield value
