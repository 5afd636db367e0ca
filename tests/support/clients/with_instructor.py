"""instructor: the modes that force a form, on the packages of OpenAI and Anthropic that it wants."""

from __future__ import annotations

from typing import Any

import anthropic
import instructor
import openai
import pytest
from instructor import Mode
from instructor.core import IncompleteOutputException, InstructorRetryException

from support.clients.asked import HI, KEY, MODEL, SERVER, TOO_LONG, Weather

ASKED: Any = {"model": MODEL, "response_model": Weather, "max_tokens": 200, "max_retries": 0}
FORMS = pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA])


def client_of(mode: Mode, key: str = KEY, **settings: Any) -> Any:
    client = openai.OpenAI(base_url=f"{SERVER}/v1", api_key=key, max_retries=0, **settings)
    return instructor.from_openai(client, mode=mode)


@pytest.mark.client("instructor", "an answer by a schema")
@FORMS
def test_a_schema(mode: Mode) -> None:
    said, whole = client_of(mode).create_with_completion(messages=HI, **ASKED)
    assert isinstance(said, Weather) and whole.usage.completion_tokens > 3


@pytest.mark.client("instructor", "an answer by a schema")
@FORMS
def test_a_schema_in_a_stream(mode: Mode) -> None:
    """create_partial: the answer as far as it is said."""
    *_, last = client_of(mode).create_partial(messages=HI, **ASKED)
    Weather.model_validate(last.model_dump(), strict=True)


@pytest.mark.client("instructor", "`/v1/responses`")
def test_responses() -> None:
    asked = ASKED | {"max_output_tokens": 200}
    del asked["max_tokens"]
    assert isinstance(client_of(Mode.RESPONSES_TOOLS).responses.create(input="Hi", **asked), Weather)


@pytest.mark.client("instructor", "an answer by a schema")
def test_a_schema_by_messages() -> None:
    """/v1/messages: the answer is a call of a tool."""
    claude = anthropic.Anthropic(base_url=SERVER, api_key=KEY, max_retries=0)
    caller = instructor.from_anthropic(claude, mode=Mode.ANTHROPIC_TOOLS)
    assert isinstance(caller.create(messages=HI, **ASKED), Weather)


@pytest.mark.client("instructor", "errors as exceptions of the client's own")
def test_errors() -> None:
    with pytest.raises(InstructorRetryException, match="Invalid API Key"):
        client_of(Mode.TOOLS, key="wrong").create(messages=HI, **ASKED)
    with pytest.raises(InstructorRetryException, match="prompt is too long"):
        client_of(Mode.TOOLS).create(messages=TOO_LONG, **ASKED)
    with pytest.raises(IncompleteOutputException):
        client_of(Mode.TOOLS).create(messages=HI, **ASKED | {"max_tokens": 2})
