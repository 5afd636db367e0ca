"""The fields of a body, with the types that they must have. A field that is null counts as missing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pykvgraph.checks import INT32_MAX, INT32_MIN, shown
from pykvgraph.openai.errors import WireError, invalid

# of a field: they are looked for, told, or gone through, for each token or answer, while others wait
_MOST_TEXTS, _MOST_CHARACTERS = 1024, 1 << 16


class Fields:
    """The JSON object of a body. Its methods raise WireError, which names the field."""

    def __init__(self, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise invalid(f"the body must be a JSON object, got {shown(value)}")
        self._value = value

    def __contains__(self, name: str) -> bool:
        return self._value.get(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        """The value, whatever it is."""
        value = self._value.get(name)
        return default if value is None else value

    def over(self, defaults: Mapping[str, Any]) -> Fields:
        """These fields, and others where they say nothing."""
        return Fields(
            {**defaults, **{name: value for name, value in self._value.items() if value is not None}}
        )

    def replaced(self, **values: Any) -> Fields:
        """These fields, but for some."""
        return Fields({**self._value, **values})

    def integer(self, name: str, default: int, low: int = INT32_MIN, high: int = INT32_MAX) -> int:
        """A number without its fraction."""
        value = self._number(name)
        if value is None:
            return default
        if isinstance(value, float) and not math.isfinite(value):  # it takes no integer beyond 1e308
            raise _wrong(name, "a number", value)
        if not low <= int(value) <= high:
            raise invalid(f"Field '{name}': must be from {low} to {high}, got {shown(int(value))}")
        return int(value)

    def real(self, name: str, default: float, low: float = -1e30, high: float = 1e30) -> float:
        """A number; what is beyond a limit becomes that limit."""
        value = self._number(name)
        return default if value is None else float(min(max(value, low), high))

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise _wrong(name, "true or false", value)
        return value

    def text(self, name: str, default: str = "") -> str:
        """A string."""
        value = self.get(name, default)
        if not isinstance(value, str):
            raise _wrong(name, "a string", value)
        return value

    def choice(self, name: str, default: str, choices: Sequence[str]) -> str:
        """One of these strings."""
        value = self.text(name, default)
        if value not in choices:
            raise _wrong(name, f"one of {', '.join(choices)}", value)
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A string or several, up to 1,024 with 65,536 characters together; empty ones are left out."""
        value = self.get(name, [])
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
            raise _wrong(name, "a string or an array of strings", value)
        n, n_characters = len(values), sum(map(len, values))
        if n > _MOST_TEXTS or n_characters > _MOST_CHARACTERS:
            raise invalid(
                f"Field '{name}': {n} strings with {n_characters} characters are over the limit of "
                f"{_MOST_TEXTS} with {_MOST_CHARACTERS} together"
            )
        return tuple(filter(None, values))

    def array(self, name: str) -> list[Any]:
        """An array."""
        value = self.get(name, [])
        if not isinstance(value, list):
            raise _wrong(name, "an array", value)
        return value

    def object(self, name: str) -> dict[str, Any]:
        """An object."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise _wrong(name, "an object", value)
        return value

    def _number(self, name: str) -> float | None:
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
            raise _wrong(name, "a number", value)
        return value


def _wrong(name: str, wanted: str, value: Any) -> WireError:
    return invalid(f"Field '{name}': must be {wanted}, got {shown(value)}")
