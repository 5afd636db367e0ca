"""create_chat_completion: which handler a conversation goes to, and the handler of chat templates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from pykvgraph._native import libllama
from pykvgraph._native.fork import importing
from pykvgraph.errors import InvalidArgumentError, UnsupportedError
from pykvgraph.llama import responses
from pykvgraph.llama.vocabulary import LlamaVocabulary
from pykvgraph.model.gguf_file import TEMPLATE_KEY

if TYPE_CHECKING:
    from pykvgraph.chat.chat_template import ChatTemplate

Handler = Callable[..., Any]
_DEFAULT = "chat_template.default"
_FALLBACK = "llama-2"  # of a file without a template, as in llama-cpp-python


def handlers_of(metadata: Mapping[str, str], vocabulary: LlamaVocabulary) -> dict[str, Handler]:
    """The templates of a file, by the name that chat_format may give."""
    sources = {
        key.removeprefix("tokenizer."): source
        for key, source in metadata.items()
        if key.startswith(f"{TEMPLATE_KEY}.")
    }
    if TEMPLATE_KEY in metadata:
        sources[_DEFAULT] = metadata[TEMPLATE_KEY]
    return {name: TemplateHandler(source, vocabulary) for name, source in sources.items()}


def format_of(
    chat_format: str | None, chat_handler: Any, metadata: Mapping[str, str], handlers: Mapping[str, Handler]
) -> str | None:
    """A given format's name, that of the file's template when it is well known, or the file's own."""
    if chat_format is not None or chat_handler is not None:
        return chat_format
    if _DEFAULT not in handlers:
        return _FALLBACK
    formats = libllama.package("llama_chat_format")
    guessed: str | None = formats.guess_chat_format_from_gguf_metadata(dict(metadata))
    return guessed or _DEFAULT


def handler_of(given: Handler | None, name: str | None, templates: Mapping[str, Handler]) -> Handler:
    """A given handler, a template's, or the one that llama-cpp-python has under this name.

    Raises UnsupportedError for handlers of pictures, InvalidArgumentError for an unknown name.
    """
    formats = libllama.package("llama_chat_format")
    if isinstance(given, (formats.Llava15ChatHandler, formats.MTMDChatHandler)):
        raise UnsupportedError(
            "chat_handler: pictures are not supported, as libmtmd works on libllama's context"
        )
    if given is not None:
        return given
    assert name is not None
    if name in templates:
        return templates[name]
    try:
        named: Handler = formats.get_chat_completion_handler(name)
    except formats.LlamaChatCompletionHandlerNotFoundException as error:
        raise InvalidArgumentError(
            f"chat_format {name!r} is unknown, to llama-cpp-python and to the file: {', '.join(templates)}"
        ) from error
    return named


class Completes(Protocol):
    """What a handler needs of a Llama."""

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Token ids of a text in UTF-8."""

    @property
    def create_completion(self) -> Callable[..., Any]:
        """Continues a prompt."""


class TemplateHandler:
    """Answers a conversation whose prompt a chat template makes."""

    def __init__(self, source: str, vocabulary: LlamaVocabulary) -> None:
        self._source = source
        self._bos, self._eos = vocabulary.text_of(vocabulary.bos), vocabulary.text_of(vocabulary.eos)
        self._template: ChatTemplate | None = None

    def __call__(
        self,
        *,
        llama: Completes,
        messages: list[Any],
        functions: list[Any] | None = None,
        function_call: Any = None,
        tools: list[Any] | None = None,
        tool_choice: Any = None,
        response_format: Any = None,
        stop: str | list[str] | None = None,
        grammar: Any = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
        **arguments: Any,
    ) -> Any:
        """The rest of the arguments is create_completion's."""
        prompt = self.template.render(
            messages,
            functions=functions,
            function_call=function_call,
            tools=tools,
            tool_choice=tool_choice,
        )
        stops = [stop] if isinstance(stop, str) else list(stop or [])
        if response_format is not None and response_format.get("type") == "json_object":
            grammar = _grammar_of_format(response_format)
        tool = _chosen_tool(functions, function_call, tools, tool_choice)
        if tool is not None:
            grammar = _grammar_of(tool.get("parameters", {}))
        answer = llama.create_completion(
            prompt=llama.tokenize(prompt.encode(), add_bos=False, special=True),
            stop=[*stops, self._eos] if self._eos else stops,
            grammar=grammar,
            logprobs=top_logprobs if logprobs else None,
            **arguments,
        )
        name = None if tool is None else tool["name"]
        if not arguments.get("stream", False):
            return responses.chat(answer, name)
        return responses.chat_chunks(answer) if name is None else responses.call_chunks(answer, name)

    @property
    def template(self) -> ChatTemplate:
        """Read on first use: a broken one is no reason not to open the file."""
        if self._template is None:
            with importing:
                from pykvgraph.chat.chat_template import ChatTemplate
            self._template = ChatTemplate(self._source, bos_token=self._bos, eos_token=self._eos)
        return self._template


def _chosen_tool(
    functions: list[Any] | None, function_call: Any, tools: list[Any] | None, tool_choice: Any
) -> dict[str, Any] | None:
    """The function that must be called, if the choice names one; functions and function_call: older names."""
    if functions is not None:
        tools = [{"type": "function", "function": function} for function in functions]
    if isinstance(function_call, dict) and "name" in function_call:
        tool_choice = {"type": "function", "function": {"name": function_call["name"]}}
    elif isinstance(function_call, str):
        tool_choice = function_call
    if not isinstance(tool_choice, dict) or tools is None:
        return None
    name = tool_choice["function"]["name"]
    for tool in tools:
        if tool["function"]["name"] == name:
            return dict(tool["function"])
    raise InvalidArgumentError(f"tool_choice names {name!r}, which is none of the tools")


def _grammar_of_format(response_format: Mapping[str, Any]) -> str:
    """Of a JSON object, and of one that follows a schema."""
    return _grammar_of(response_format["schema"]) if "schema" in response_format else _any_json()


def _grammar_of(schema: Any) -> str:
    """The grammar of a schema. Raises InvalidArgumentError for a schema beyond the limits."""
    with importing:
        from pykvgraph.sampling.guide_text import lark_of_schema
    return lark_of_schema(schema)


def _any_json() -> str:
    """llama-cpp-python's own, so that it has the same white space and the same answers."""
    return str(libllama.package("llama_grammar").JSON_GBNF)
