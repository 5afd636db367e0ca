"""What a client is told when something is wrong: llama-server's codes and types."""

from __future__ import annotations

from typing import Any

from pykvgraph.checks import shown
from pykvgraph.errors import (
    CacheFullError,
    InvalidArgumentError,
    KVGraphError,
    StateError,
    UnsupportedError,
)

INVALID = "invalid_request_error"
UNSUPPORTED = "not_supported_error"
SERVER = "server_error"
TOO_LONG = "exceed_context_size_error"
UNAVAILABLE = "unavailable_error"

_OPENAIS = ("/v1/", "/chat/", "/responses")  # how paths begin that OpenAI's interface has
_TOO_LONG_CODE = "context_length_exceeded"
# llama-server's kinds that Anthropic's interface has by another name
_ANTHROPICS = {TOO_LONG: INVALID, UNSUPPORTED: INVALID, SERVER: "api_error", UNAVAILABLE: "overloaded_error"}

NO_PICTURE = "[a picture, which this server can't show to the model]"


class WireError(Exception):
    """An answer of the server that is an error. code: of HTTP. kind: its type. more: other fields."""

    def __init__(self, code: int, kind: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.code = code
        self.kind = kind
        self.message = message
        self.more = more

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        return {"error": {"code": self.code, "message": self.message, "type": self.kind, **self.more}}


def invalid(message: str) -> WireError:
    """The request can't be understood."""
    return WireError(400, INVALID, message)


def too_many(what: str, most: int) -> WireError:
    """A body asks for more answers, or vectors, than one may."""
    return invalid(
        f"{what}, and a body may ask for {most}: send several bodies, or start the server with a larger "
        "--max-prompts"
    )


def unsupported(message: str) -> WireError:
    """The request can be understood, and this server can't do it."""
    return WireError(501, UNSUPPORTED, message)


def no_text(kind: str) -> WireError:
    """A part of a content is of another kind than text."""
    return invalid(f"{kind[:40]}: this server takes text alone")


def unavailable(message: str) -> WireError:
    """The request may be sent again later."""
    return WireError(503, UNAVAILABLE, message)


def not_found() -> WireError:
    """There is no such path."""
    return WireError(404, "not_found_error", "File Not Found")


def no_model(name: str) -> WireError:
    """There is no model of this name, as OpenAI's interface says so."""
    error = WireError(404, INVALID, f"The model {shown(name)} does not exist", param="model")
    error.more["code"] = "model_not_found"
    return error


def loading() -> WireError:
    """The model isn't there yet."""
    return unavailable("Loading model")


def no_room(
    n_prompt: int, n_ctx: int, is_least: bool = False, mend: str = "a larger -c or fewer -np"
) -> WireError:
    """The prompt is longer than a request may be.

    is_least: it may have more tokens than these. mend: what the server may be started with.

    Clients know this error by words of its message: "prompt is too long" is Anthropic's, "exceeds the
    available context size" and "too large" llama-server's.
    """
    n_told = f"at least {n_prompt}" if is_least else n_prompt
    return WireError(
        400,
        TOO_LONG,
        f"prompt is too long: it has {n_told} tokens and exceeds the available context size. It is too large "
        f"for a request, which may have {n_ctx} tokens with its answer. "
        f"Shorten it, or start the server with {mend}",
        n_prompt_tokens=n_prompt,
        n_ctx=n_ctx,
    )


def error_body(path: str, error: WireError) -> dict[str, Any]:
    """As the clients of a path know errors."""
    if path.startswith("/v1/messages"):
        return typed_error(error)
    body = error.body()
    if error.kind == TOO_LONG and path.startswith(_OPENAIS):
        body["error"]["code"] = _TOO_LONG_CODE
    return body


def typed_error(error: WireError) -> dict[str, Any]:
    """An error as Anthropic's interface has it; all but the kind within is llama-server's."""
    body = error.body()
    body["error"]["type"] = _ANTHROPICS.get(error.kind, error.kind)
    return {"type": "error", **body}


def as_wire(error: BaseException) -> WireError:
    """Any exception as the client hears of it."""
    if isinstance(error, WireError):
        return error
    if isinstance(error, CacheFullError):
        return WireError(400, TOO_LONG, str(error))
    if isinstance(error, (InvalidArgumentError, StateError)):
        return invalid(str(error))
    if isinstance(error, UnsupportedError):
        return unsupported(str(error))
    if isinstance(error, KVGraphError):
        return WireError(500, SERVER, str(error))
    return WireError(500, SERVER, f"the server failed: {type(error).__name__}")
