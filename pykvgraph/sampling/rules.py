"""What a text must follow: a grammar in GBNF for libllama, a schema or a grammar in Lark for llguidance."""

from __future__ import annotations

from pykvgraph.model.tokenizer import Tokenizer
from pykvgraph.params.params import SamplingParams
from pykvgraph.sampling.grammar import Grammar, GrammarKind, host_of
from pykvgraph.sampling.grammar_text import refuse_dangerous
from pykvgraph.sampling.guide_text import guide_of_schema, is_lark


def rules_of(chosen: SamplingParams, tokenizer: Tokenizer) -> Grammar:
    """Of SamplingParams with a grammar or a schema. Raises InvalidArgumentError."""
    grammar, schema = chosen.grammar, chosen.json_schema
    host = host_of(tokenizer)
    if grammar is None:
        assert isinstance(schema, str)
        return Grammar(guide_of_schema(schema), host, GrammarKind.SCHEMA)
    if is_lark(grammar):
        return Grammar(grammar, host, GrammarKind.LARK)
    refuse_dangerous(grammar)
    return Grammar(grammar, host, GrammarKind.GBNF)
