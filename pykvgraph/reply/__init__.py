"""What a chat model says, taken apart: content, reasoning, calls of tools; and grammars that force a call.

`format_of` finds in a chat template how its model writes; `ReplyParser` takes the text as it comes.
"""
