"""A chat on its way to the engine: its prompt, the grammar of its answer, and what reads the answer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from pykvgraph.engine.types import Pin
from pykvgraph.errors import InvalidArgumentError
from pykvgraph.openai.chat_output import ChatOutput
from pykvgraph.openai.errors import invalid
from pykvgraph.params.params import ThoughtLimit
from pykvgraph.reply.forced import WRITTEN, ForcedCall, forced_call, forced_json
from pykvgraph.reply.format import Format
from pykvgraph.reply.parser import ReplyParser
from pykvgraph.sampling.spelling import spelled
from pykvgraph.sampling.token_ends import settled
from pykvgraph.server.http.asker import Asker
from pykvgraph.server.job import Job
from pykvgraph.server.next_turn import NextTurn
from pykvgraph.server.requests.chat_request import ChatRequest, chat_request_of, with_response_format
from pykvgraph.server.requests.chat_template import ChatPrompt
from pykvgraph.server.requests.fields import Fields
from pykvgraph.server.requests.prompts import require_room, text_tokens
from pykvgraph.server.service import Service

NewOutput = Callable[[], ChatOutput]


class ChatJob(NamedTuple):
    """new_output: for each sample, what divides its text into content, thoughts and calls."""

    job: Job
    new_output: NewOutput


class _Asked(NamedTuple):
    """What a body asks. tokens: of the prompt, and of what every answer begins with."""

    chat: ChatRequest
    prompt: ChatPrompt
    forced: ForcedCall
    tokens: list[int]


def chat_job(
    service: Service,
    fields: Fields,
    asker: Asker,
    pins_of: Callable[[list[int]], Sequence[Pin]] = lambda tokens: (),
    *,
    hears_progress: bool = False,
) -> ChatJob:
    """Of a body as OpenAI's interface has it. Raises WireError, and what Engine.submit() raises.

    pins_of: which beginnings of the prompt's tokens are to stay in the cache. hears_progress: as Job has it.
    """
    chat, prompt, forced, tokens = _asked(service, fields, n_ctx=service.most_of_prompt)
    format, parses = forced.format, service.settings.parses_replies
    tools = chat.tools if chat.may_call and parses else []
    special = service.settings.special or service.vocabulary.has_control(format.texts())
    thoughts = _thought_limit(chat, service, prompt)
    own: dict[str, Any] = {"special": special, "thoughts": thoughts}
    if forced.grammar or chat.schema is not None:
        schema = None if forced.grammar else chat.schema
        own |= {"grammar": forced.grammar or None, "json_schema": schema}
    params = dataclasses.replace(service.sampling(with_response_format(fields)), **own)
    job = service.job([tokens], fields, asker, params, pins_of(tokens), hears_progress)
    # where there is nothing to tell apart, text needs no parser
    parser = functools.partial(ReplyParser, format, tools, prompt.text, reasoning=chat.reasons)
    is_plain = not tools and not (chat.reasons and format.thinking) and format.calls is None

    begin = (_left_in(chat, format, prompt) if parses else "") + prompt.prefill + forced.begun

    def new_output() -> ChatOutput:
        return ChatOutput(None if is_plain else parser(), begin, chat.one_call, forced.called)

    is_cached = fields.flag("cache_prompt", service.settings.cache_prompt)
    if service.settings.prepares_turns and is_cached and not asker.only_reads:
        turn = NextTurn(service, job, chat, new_output)
        job.then = lambda sample: service.slow_work.later(functools.partial(turn.prepare, sample))
    return ChatJob(job, new_output)


def begun_tokens(service: Service, fields: Fields) -> list[int]:
    """Of the prompt of a body with which a conversation begins; [] where that can be no prompt."""
    settings = dataclasses.replace(service.settings, prefills=False)  # its last message may be anybody's
    chat = chat_request_of(fields.replaced(add_generation_prompt=False), settings)
    try:
        text = chat.prompt(service.template).whole
    except InvalidArgumentError:
        return []
    return text_tokens(text, service.vocabulary.tokenizer)


def tokens_without(service: Service, fields: Fields, numbers: Collection[int]) -> list[int]:
    """Of the prompt of a body without these of its messages. Raises WireError."""
    messages = fields.array("messages")
    unknown = [number for number in numbers if not 0 <= number < len(messages)]
    if unknown:
        raise invalid(f"message {unknown[0]}: the conversation has {len(messages)}, from 0 on")
    left = [message for number, message in enumerate(messages) if number not in numbers]
    return _asked(service, fields.replaced(messages=left)).tokens


def count_tokens(service: Service, fields: Fields, n_ctx: int | None = None) -> int:
    """Of the prompt that a body becomes. n_ctx: as text_tokens() takes it. Raises WireError."""
    return len(_asked(service, fields, n_ctx).tokens)


def _asked(service: Service, fields: Fields, n_ctx: int | None = None) -> _Asked:
    """n_ctx: as text_tokens() takes it."""
    chat = chat_request_of(fields, service.settings)
    prompt, tokenizer = chat.prompt(service.template), service.vocabulary.tokenizer
    require_room(prompt.whole, tokenizer, n_ctx)
    forced = _ruled(chat, service, prompt)
    tokens = text_tokens(prompt.whole + forced.begun, tokenizer, n_ctx=n_ctx)
    return _Asked(chat, prompt, forced, tokens)


def _thought_limit(chat: ChatRequest, service: Service, prompt: ChatPrompt) -> ThoughtLimit | None:
    thinking = service.template.format.thinking
    if chat.most_thoughts < 0 or thinking is None:
        return None
    mark, close, tokenizer = thinking.open.strip(), thinking.close.strip(), service.vocabulary.tokenizer
    begun = prompt.whole[prompt.text.rindex(mark) :] if thinking.is_open(prompt.text) else prompt.prefill
    _, opened, thought = begun.rpartition(mark)
    n_begun = None
    if opened and close not in thought:
        n_mark = len(text_tokens(mark, tokenizer, False))
        n_begun = max(len(text_tokens(mark + thought, tokenizer, False)) - n_mark, 0)
    return ThoughtLimit(chat.most_thoughts, mark, close, chat.end_of_thoughts, n_begun)


def _left_in(chat: ChatRequest, format: Format, prompt: ChatPrompt) -> str:
    """The mark of thoughts that the prompt ends with, where they are a part of the content."""
    thinking = format.thinking
    return thinking.open if thinking and not chat.reasons and thinking.is_open(prompt.text) else ""


def _ruled(chat: ChatRequest, service: Service, prompt: ChatPrompt) -> ForcedCall:
    """The grammar of the answer, "" for none, and the format in which it is to be read."""
    format = service.template.format
    if not chat.must_call and chat.schema is None:
        return ForcedCall("", format)
    thinking = format.thinking
    if thinking and not chat.thinks and not thinking.is_open(prompt.whole):
        format = format.without_thinking()
    tokenizer = service.vocabulary.tokenizer
    spell = functools.partial(spelled, tokenizer)
    # where calls are not told apart, their text is the answer, and the client wants all of it
    cuts = functools.partial(settled, tokenizer) if service.settings.parses_replies else None
    if chat.must_call:
        return forced_call(format, chat.tools, chat.function, prompt.whole, spell=spell, settled=cuts)
    assert chat.schema is not None
    if chat.may_call and format.name in WRITTEN:
        return forced_call(format, chat.tools, None, prompt.whole, chat.schema, spell=spell, settled=cuts)
    json = forced_json(format, chat.schema, prompt.whole, spell=spell) if format.thinking else ""
    return ForcedCall(json, format)
