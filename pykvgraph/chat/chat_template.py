"""Chat templates: Jinja in a sandbox, with what Hugging Face's templates expect to find there."""

from __future__ import annotations

import copy
import datetime
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from pykvgraph.chat.template_budget import MOST_TEXT, Budget, BudgetError
from pykvgraph.chat.template_sandbox import Sandbox
from pykvgraph.errors import InvalidArgumentError

_LONGEST_SOURCE = 1 << 20  # characters; the longest of llama.cpp's collection has 30,000
_LONGEST_INDENT = 64


class MessagesRefusedError(InvalidArgumentError):
    """The template itself says that it doesn't take these messages."""


class ChatTemplate:
    """A chat template, as GGUF files have it in `tokenizer.chat_template`.

    It runs in Jinja's sandbox: it can't reach Python's internals, and works on a copy of what it is given.
    Where templates rely on llama.cpp's engine, it does as that one does: what is missing adds no text, and
    lists can grow and shrink. Raises InvalidArgumentError for a template that can't be read.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source
        self.bos_token = bos_token
        self.eos_token = eos_token
        self._sandbox = environment = Sandbox(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=_Missing,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = functools.partial(_tojson, environment)
        environment.filters["safe"] = environment.shown  # nothing is escaped here
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        if len(source) > _LONGEST_SOURCE:
            raise InvalidArgumentError(
                f"the chat template can't be read: it has {len(source)} characters, over {_LONGEST_SOURCE}"
            )
        try:
            with environment.spending():  # what is constant is found out now
                self._template = environment.from_string(source)
        except Exception as error:  # RecursionError, SyntaxError for 20 loops in each other, and Jinja's own
            raise InvalidArgumentError(f"the chat template can't be read: {error}") from error

    def render(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation.

        add_generation_prompt: with the beginning of the assistant's answer. variables: what else the template
        may ask for, such as tools. Raises InvalidArgumentError with the template's own words when it refuses
        the messages (MessagesRefusedError), and when it fails.
        """
        given = {"bos_token": self.bos_token, "eos_token": self.eos_token, **variables}
        given |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            with self._sandbox.spending() as budget:
                return self._render(copy.deepcopy(given), budget)
        except BudgetError as error:
            raise InvalidArgumentError(
                f"the chat template takes too much: {error}; shorten the messages, or give another template"
            ) from error
        except _RefusalError as refusal:
            raise MessagesRefusedError(f"the chat template refuses the messages: {refusal}") from refusal
        except Exception as error:  # a template is a program of others
            raise InvalidArgumentError(f"the chat template failed: {error!r}") from error

    def _render(self, given: dict[str, Any], budget: Budget) -> str:
        parts, n = [], 0
        for part in self._template.root_render_func(self._template.new_context(given)):
            n += len(part)
            parts.append(part)
            if n > MOST_TEXT:
                budget.make(n)
        return "".join(parts)


class _Missing(jinja2.ChainableUndefined):
    """A variable or a key that isn't there."""

    def __add__(self, other: Any) -> Any:
        return other

    __radd__ = __add__

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what a model learns from; here it is what stands in it."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own way

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _RefusalError(Exception):
    """What a template raised by raise_exception."""


def _raise(message: str) -> NoReturn:
    raise _RefusalError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    sandbox: Sandbox,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Not Jinja's own, which escapes what HTML would."""
    budget = sandbox.budget
    budget.look(value)
    if indent is not None and not (isinstance(indent, int) and indent <= _LONGEST_INDENT):
        raise BudgetError(f"it indents JSON by more than {_LONGEST_INDENT}")
    if separators is not None and sum(map(len, separators)) > _LONGEST_INDENT:
        raise BudgetError(f"it parts JSON by more than {_LONGEST_INDENT} characters")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_plain,
    )
    if indent is None:
        text = encoder.encode(value)
        budget.make(len(text))
        return text
    parts, n = [], 0
    for part in encoder.iterencode(value):  # deep in lists, each element has a long line
        n += len(part)
        parts.append(part)
        if n > MOST_TEXT:
            budget.make(n)
    budget.make(n)
    return "".join(parts)


def _plain(value: Any) -> Any:
    """What a filter such as `map` leaves behind, as a list."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"a {type(value).__name__} has no JSON")
