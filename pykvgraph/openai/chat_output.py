"""What a sample of a chat says: content, thoughts and calls of tools, as they come."""

from __future__ import annotations

from pykvgraph.reply.delta import CallPart, Content, Delta, Reply, ToolCall
from pykvgraph.reply.parser import ReplyParser, new_id


class ChatOutput:
    """Text in, deltas out.

    parser: takes the text apart; None: all of it is content. prefill: how the answer begins, by the request.
    one_call: those after the first call are left out. called: the tool whose call the prefill begins.
    """

    def __init__(
        self,
        parser: ReplyParser | None = None,
        prefill: str = "",
        one_call: bool = False,
        called: str = "",
    ) -> None:
        self._parser = parser
        self._begin = prefill
        self._one_call = one_call
        self._called = called
        self._deltas: list[Delta] = []
        self._calls: list[str] = []  # ids

    def feed(self, text: str) -> list[Delta]:
        """What is certain by now."""
        text, self._begin = self._begin + text, ""
        if self._parser is None:
            return self._kept([Content(text)] if text else [])
        return self._kept(self._parser.feed(text))

    def end(self) -> list[Delta]:
        """What was held back: no more text comes."""
        deltas = self.feed("")
        return deltas if self._parser is None else deltas + self._kept(self._rest(self._parser.end()))

    def number(self, delta: ToolCall | CallPart) -> int:
        """Of the call that a delta belongs to, from 0 on."""
        return self._calls.index(delta.id)

    @property
    def reply(self) -> Reply:
        """All of it, so far."""
        return Reply.of(self._deltas)

    def finish_reason(self, reason: str | None) -> str | None:
        """As OpenAI calls it. reason: why the text ended."""
        return "tool_calls" if reason == "stop" and self._calls else reason

    def _rest(self, deltas: list[Delta]) -> list[Delta]:
        """The last ones; a call that breaks off before its arguments is known to be one by its beginning."""
        is_told = self._calls or any(isinstance(each, ToolCall) for each in deltas)
        return [ToolCall(new_id(), self._called)] if self._called and not is_told else deltas

    def _kept(self, deltas: list[Delta]) -> list[Delta]:
        kept: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ToolCall):
                if self._one_call and self._calls:
                    continue
                self._calls.append(delta.id)
            elif isinstance(delta, CallPart) and delta.id not in self._calls:
                continue
            kept.append(delta)
        self._deltas += kept
        return kept
