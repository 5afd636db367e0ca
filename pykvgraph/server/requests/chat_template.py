"""The chat template of a server: the model's own, one that was given, or ChatML."""

from __future__ import annotations

import copy
import datetime
import json
from typing import Any, NamedTuple

from pykvgraph.chat.chat_template import ChatTemplate
from pykvgraph.errors import InvalidArgumentError, UnsupportedError
from pykvgraph.model.gguf_file import TEMPLATE_KEY
from pykvgraph.model.model import Model
from pykvgraph.openai.vocabulary import Vocabulary
from pykvgraph.reply.format import Format
from pykvgraph.reply.formats import format_of
from pykvgraph.server.requests.accepted_messages import rendered
from pykvgraph.server.requests.built_in_template import BuiltInTemplate

CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
_NAMED = {"chatml": CHATML}
_DATES = {"date_string": "%d %b %Y", "datetime": "%b %d %Y"}


class ChatPrompt(NamedTuple):
    """text: up to where the answer begins. prefill: its beginning, which the request gave."""

    text: str
    prefill: str

    @property
    def whole(self) -> str:
        """What the model goes on from."""
        return self.text + self.prefill


class ServerTemplate:
    """Messages to the text of a prompt. source: Jinja, a name, or "" for the model's own.

    jinja: False: libllama's own code writes the prompt; it knows more names. format: how a model with this
    template writes its replies.

    Raises UnsupportedError for an unknown name, InvalidArgumentError for a template that can't be read.
    """

    def __init__(self, source: str, model: Model, vocabulary: Vocabulary, jinja: bool = True) -> None:
        own = model._value(TEMPLATE_KEY)
        if jinja and source and "{" not in source:
            if source not in _NAMED:
                raise UnsupportedError(
                    f"--chat-template {source}: only {', '.join(_NAMED)} is known by name; give a Jinja "
                    "template, or a file of one by --chat-template-file"
                )
            source = _NAMED[source]
        self.source = source or (own if isinstance(own, str) and own else CHATML)
        self.format = format_of(self.source) if jinja else Format()
        tokenizer = vocabulary.tokenizer
        self._bos = tokenizer._name(tokenizer.bos)
        self._adds_bos = vocabulary.adds_bos
        names = {"bos_token": self._bos, "eos_token": tokenizer._name(tokenizer.eos)}
        self._template: ChatTemplate | BuiltInTemplate = (
            ChatTemplate(self.source, **names) if jinja else BuiltInTemplate(self.source)
        )
        self._wants_objects = self._probe()

    def prompt(
        self,
        messages: list[dict[str, Any]],
        begun: dict[str, Any] | None = None,
        opens: bool = True,
        /,
        **variables: Any,
    ) -> ChatPrompt:
        """The prompt, without the BOS that tokens begin with anyway. begun: the answer's beginning.

        opens: whether it ends with what opens the assistant's answer. Templates may ask for the date, as
        llama-server's may.

        Messages that the template refuses are written as it takes them, where that is possible. Raises
        InvalidArgumentError where it isn't.
        """
        messages = self._with_roles(self._with_arguments(messages))

        def render(messages: list[dict[str, Any]]) -> str:
            return self._template.render(messages, add_generation_prompt=opens, **variables)

        today = datetime.date.today()
        variables = {name: today.strftime(form) for name, form in _DATES.items()} | variables

        text = rendered(messages, render)
        text = text.removeprefix(self._bos) if self._adds_bos else text
        return ChatPrompt(text, self._prefill(text, begun) if begun else "")

    def _prefill(self, prompt: str, begun: dict[str, Any]) -> str:
        """Thoughts that the prompt opens, or that are given, end where the content begins."""
        content, thought = str(begun["content"]), str(begun.get("reasoning_content") or "")
        thinking = self.format.thinking
        if thinking is None:
            return content
        if not thought:
            thought, content = thinking.parted(content)
        opened = thinking.is_open(prompt)
        if not (opened or thought):
            return content
        front = ("" if opened else thinking.open) + thought
        return front + thinking.close + content if content else front

    def _with_roles(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A developer's words are a system's, to templates that know no developer."""
        if "developer" in self.source:
            return messages
        return [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]

    def _with_arguments(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Arguments of tool calls as this template wants them: objects, or their JSON."""
        if not any("tool_calls" in message for message in messages):
            return messages
        messages = copy.deepcopy(messages)
        for message in messages:
            for call in message.get("tool_calls") or ():
                function = call["function"]
                function["arguments"] = self._argument(function.get("arguments", {}))
        return messages

    def _argument(self, value: Any) -> Any:
        """Clients say null or "" for none, and keep what broke off: neither may end the conversation."""
        value = {} if value in (None, "", "null") else value
        if not self._wants_objects:
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        try:
            found = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            found = None
        return found if isinstance(found, dict) else {"INVALID_JSON": value}

    def _probe(self) -> bool:
        """Whether the template writes the JSON of an object rightly, and that of a text twice."""
        return _WANTED in self._rendered({"probe": 1}) or _WANTED not in self._rendered('{"probe": 1}')

    def _rendered(self, arguments: Any) -> str:
        call = {"id": "call", "type": "function", "function": {"name": "probe", "arguments": arguments}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            return self._template.render([{"role": "user", "content": "probe"}, said])
        except InvalidArgumentError:
            return ""


_WANTED = '"probe": 1'
