# ruff: noqa: RUF001  # marks of models have fullwidth bars
"""The formats of models, by what their chat templates say: two tables, and the search in them."""

from __future__ import annotations

from pykvgraph.reply.format import Calls, Format, Headers, Thinking
from pykvgraph.reply.readers import (
    bare_keys,
    json_calls,
    json_pairs,
    named_json,
    named_or_json_calls,
    python_calls,
    tagged,
)
from pykvgraph.reply.tag_reader import Tags

# The first whose signs are in the template
THINKING = (
    Thinking("<seed:think>", "</seed:think>"),
    Thinking("<mm:think>", "</mm:think>"),
    Thinking("<think:opensource>", "</think:opensource>", (":opensource",)),
    Thinking("<|START_THINKING|>", "<|END_THINKING|>"),
    Thinking("<|open|>think<|sep|>", "<|close|>think<|sep|>", ("<|open|>", "<|sep|>")),
    Thinking("<|channel>thought", "<channel|>"),
    Thinking("[THINK]", "[/THINK]"),
    Thinking("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    Thinking("Here is my thought process:", "Here is my response:"),
    Thinking("<|think|>", "<|end|>", ("<|think|>", "<|tool_call:begin|>")),
    Thinking("<think>", "</think>"),
)

_FUNCTION = r"(?P<name>[^>\s]+)>"
_INVOKE = r'(?P<name>[^"]+)">'
_KEY = r'(?P<key>[^"]+)">'

# The first all of whose signs are in the template
CALLS = (
    Calls(
        "gpt-oss",
        ("<|channel|>analysis<|message|>",),
        (),
        "",
        named_json(
            r"(?:(?!to=).)*to=(?:functions\.)?(?P<name>[^\s<]+)(?=[\s<])(?:(?!<\|message\|>).)*<\|message\|>"
        ),
        headers=Headers(
            ("<|channel|>", "<|start|>"),
            "<|message|>",
            ("<|end|>", "<|return|>", "<|call|>"),
            first="to=",
            reasoning=("analysis",),
            calls=("to=functions.",),
        ),
    ),
    Calls(
        "muse",
        ("<atem:invoke",),
        ('<atem:invoke name="',),
        "</atem:invoke>",
        tagged(Tags(_INVOKE, '<atem:parameter name="', _KEY, "</atem:parameter>")),
        silent=("<atem:function_calls>", "</atem:function_calls>"),
        headers=Headers(
            ("<|start|>",), "<|message|>", ("<|eom|>", "<|eot|>"), first="to=", reasoning=("to=self",)
        ),
    ),
    Calls(
        "functionary-v3.2",
        (">>>all\\n",),
        (),
        "",
        named_json(r"(?:>>>)?(?P<name>[^\n]+)\n"),
        headers=Headers((">>>",), "\n", (), content=("all\n",), calls=("",)),
    ),
    Calls(
        "solar",
        ("<|tool_call:begin|>",),
        ("<|tool_call:begin|>",),
        "<|tool_call:end|>",
        named_json(r"(?P<id>[^<]*)<\|tool_call:name\|>(?P<name>[^<]*)<\|tool_call:args\|>"),
        silent=("<|tool_calls|>", "<|calls|>"),
        around=("<|begin|>assistant", "<|content|>", "<|end|>"),
    ),
    Calls(
        "kimi-k3",
        ("<|open|>", "<|sep|>"),
        ("<|open|>call ",),
        "<|close|>call<|sep|>",
        tagged(
            Tags(
                r'tool="(?P<name>[^"]+)"[^<]*<\|sep\|>',
                '<|open|>argument key="',
                r'(?P<key>[^"]+)" type="(?P<string>\w+)"<\|sep\|>',
                "<|close|>argument<|sep|>",
            )
        ),
        silent=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        around=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    Calls(
        "kimi-k2",
        ("<|tool_call_begin|>",),
        ("<|tool_call_begin|>",),
        "<|tool_call_end|>",
        named_json(r"(?P<id>(?:functions\.)?(?P<name>[^:<\s]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>"),
        silent=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    Calls(
        "deepseek-dsml",
        ("｜DSML｜",),
        ('<｜DSML｜invoke name="',),
        "</｜DSML｜invoke>",
        tagged(
            Tags(
                _INVOKE,
                '<｜DSML｜parameter name="',
                r'(?P<key>[^"]+)"(?: string="(?P<string>\w+)")?>',
                "</｜DSML｜parameter>",
            )
        ),
        silent=tuple(
            f"<{slash}｜DSML｜{name}>" for name in ("function_calls", "tool_calls") for slash in ("", "/")
        ),
    ),
    Calls(
        "deepseek",
        ("<｜tool▁call▁begin｜>",),
        ("<｜tool▁call▁begin｜>",),
        "<｜tool▁call▁end｜>",
        named_json(r"(?:function<｜tool▁sep｜>)?(?P<name>[^\s<{]+)(?:<｜tool▁sep｜>)?(?:\s*```json)?"),
        silent=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    Calls(
        "minimax-m3",
        ("]<]minimax[>[", "<invoke"),
        (']<]minimax[>[<invoke name="',),
        "]<]minimax[>[</invoke>",
        tagged(
            Tags(
                _INVOKE,
                "]<]minimax[>[<",
                r"(?P<key>[^<>/\s]+)>",
                "]<]minimax[>[</%k>",
                nests="]<]minimax[>[",
            )
        ),
        silent=("]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>"),
    ),
    Calls(
        "minimax-m2",
        ("minimax:tool_call", "<invoke name="),
        ('<invoke name="',),
        "</invoke>",
        tagged(Tags(_INVOKE, '<parameter name="', _KEY, "</parameter>")),
        silent=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    Calls(
        "minicpm5",
        ('<function name="', '<param name="'),
        ('<function name="',),
        "</function>",
        tagged(Tags(_INVOKE, '<param name="', _KEY, "</param>", covers=True)),
    ),
    Calls(
        "hunyuan",
        (":opensource",),
        ("<tool_call:opensource>",),
        "</tool_call:opensource>",
        tagged(
            Tags(
                r"(?P<name>[^\s<]+)<tool_sep:opensource>",
                "<arg_key:opensource>",
                r"(?P<key>[^<]*)</arg_key:opensource>\s*<arg_value:opensource>",
                "</arg_value:opensource>",
            )
        ),
        silent=("<tool_calls:opensource>", "</tool_calls:opensource>"),
    ),
    Calls(
        "seed",
        ("<seed:tool_call>",),
        ("<function=",),
        "</function>",
        tagged(Tags(_FUNCTION, "<parameter=", "(?P<key>[^>]+)>", "</parameter>")),
        silent=("<seed:tool_call>", "</seed:tool_call>"),
    ),
    Calls(
        "glm",
        ("<arg_key>",),
        ("<tool_call>",),
        "</tool_call>",
        tagged(
            Tags(
                r"(?P<name>[^\s<]+)",
                "<arg_key>",
                r"(?P<key>[^<]*)</arg_key>\s*<arg_value>",
                "</arg_value>",
            )
        ),
    ),
    Calls(
        "qwen3-coder",
        ("<function=", "<parameter="),
        # models forget <tool_call>, but not this
        ("<function=",),
        "</function>",
        tagged(Tags(_FUNCTION, "<parameter=", "(?P<key>[^>]+)>", "</parameter>", trims=True)),
        silent=("<tool_call>", "</tool_call>"),
    ),
    Calls(
        "functionary-v3.1",
        ("<function=",),
        ("<function=",),
        "</function>",
        named_json(r"(?P<name>[^>]+)>"),
    ),
    Calls(
        "gemma",
        ("<|tool_call>",),
        ("<|tool_call>",),
        "<tool_call|>",
        bare_keys('<|"|>'),
        silent=("<|tool_response>",),
    ),
    Calls(
        "function-gemma",
        ("<start_function_call>",),
        ("<start_function_call>",),
        "<end_function_call>",
        bare_keys("<escape>"),
    ),
    Calls("lfm2", ("List of tools: ",), ("<|tool_call_start|>",), "<|tool_call_end|>", python_calls),
    Calls(
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]"),
        ("[TOOL_CALLS]",),
        "",
        named_or_json_calls(r"(?P<name>[\w.-]+)(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?"),
    ),
    Calls("mistral-list", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), "", json_calls()),
    Calls("nemotron", ("<TOOLCALL>",), ("<TOOLCALL>",), "</TOOLCALL>", json_calls()),
    Calls("apertus", ("<|tools_prefix|>",), ("<|tools_prefix|>",), "<|tools_suffix|>", json_pairs),
    Calls(
        "command-r7b",
        ("<|START_ACTION|>",),
        ("<|START_ACTION|>",),
        "<|END_ACTION|>",
        json_calls(),
        around=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    Calls(
        "command-r-plus",
        ("Action:\\n```json",),
        (),
        "```",
        json_calls(prefix=r"Action:\s*```json\s*"),
        first=("Action:",),
    ),
    Calls("gigachat3.1", ("<|function_call|>",), ("<|function_call|>",), "<|message_sep|>", json_calls()),
    Calls(
        "gigachat3",
        ("function call", "<|role_sep|>", "<|message_sep|>"),
        ("function call<|role_sep|>",),
        "<|message_sep|>",
        json_calls(),
        silent=("<|message_sep|>",),
    ),
    Calls(
        "firefunction",
        (" functools",),
        (" functools[",),
        "",
        json_calls(prefix=r"(?:functools\s*)?"),
        first=("functools",),
    ),
    Calls("tool_calls", ("<tool_calls>",), ("<tool_calls>",), "</tool_calls>", json_calls()),
    Calls("hermes", ("<tool_call>",), ("<tool_call>",), "</tool_call>", json_calls()),
    Calls("granite", ("<|tool_call|>",), ("<|tool_call|>",), "", json_calls()),
    Calls(
        "llama-3",
        ("ipython", '"parameters"'),
        ("<|python_tag|>",),
        "",
        json_calls(known=True),
        first=("{",),
    ),
)


def format_of(template: str) -> Format:
    """How the model of this chat template writes its replies; where nothing is recognised, as plain text."""
    thinking = next((each for each in THINKING if _has(template, each.signs or (each.close,))), None)
    calls = next((each for each in CALLS if _has(template, each.signs)), None)
    return Format(thinking, calls, None if calls is None else calls.headers)


def _has(template: str, signs: tuple[str, ...]) -> bool:
    return all(sign in template for sign in signs)
