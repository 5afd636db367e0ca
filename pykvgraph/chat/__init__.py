"""Conversations: how turns become tokens, and a text of turns that goes on when the cache is full."""

from __future__ import annotations

from pykvgraph.chat.conversation import Conversation
from pykvgraph.chat.turn_tokens import Discard, Turn

__all__ = ["Conversation", "Discard", "Turn"]
