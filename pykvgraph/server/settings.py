"""What a server was started with, beside its model and engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

REASONING_FORMATS = ("auto", "none", "deepseek", "deepseek-legacy")
CACHE_EDITS = ("off", "exact", "approximate")
FORGETFUL = ("window", "keydiff")  # policies that Window.forget takes
POOLING_NAMES = ("none", "mean", "cls", "last", "rank")  # in llama.cpp's order, by which files name them


@dataclass(frozen=True)
class Settings:
    """Set once, by the command line.

    aliases: names of the model; the first is told. n_slots: requests that are answered at a time. n_predict:
    most tokens of an answer to a request that says nothing of it; -1: as many as fit. defaults: other fields
    of such a request. tags: told beside the model's names. special: control tokens add their names to texts.
    api_keys: one of them must come with a request; none: everybody may ask.

    chat_template: Jinja, or a name; "": the model's own. jinja: False: the template is one of those that
    libllama has built in, and there are no tools. template_variables: what else templates get.
    reasoning_format: one of REASONING_FORMATS; all but "none" mean the same. reasoning_budget: most tokens of
    thoughts, of a request that says nothing of it; -1: as many as the model wants. reasoning_budget_message:
    what is said when they are more. parses_replies: False: thoughts and calls stay in the content. prefills:
    whether a last message of the assistant begins the answer. spm_infill: the suffix stands first in /infill.
    slot_save_path: the folder of saved slots; "": none are saved. context_shift: an answer that fills
    n_ctx_slot goes on, where the model allows it. forget: by which policy such an answer forgets tokens, in
    place of the oldest (Window.forget); "": none. n_keep: first tokens that it keeps then; -1: the prompt.
    spec_type: as --spec-type has it.
    run_token: what each request must bring, of a worker; "": nothing. first_slot: the number of its first
    slot.
    prepares_turns: whether what the next turn of a conversation begins with is decoded while nobody waits.
    cache_edit: one of CACHE_EDITS, for a request that says nothing of it; "off": none may be approximate.
    embeddings: whether there are any. pooling: one of POOLING_NAMES; "": the file's own. embd_normalize: see
    normalized().

    Limits: max_body: bytes of a request. body_seconds: in which it must have come. idle_seconds: that a
    connection may be open without a request. io_seconds: that a reader may take for what was sent.
    max_connections: those that are open. max_prompts: of a body, and answers that it asks for, n to a prompt.
    ping_seconds: between signs of life in a silent stream; 0: none.
    """

    model_path: str = ""
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ("127.0.0.1",)
    n_slots: int = 4
    n_ctx_slot: int = 0  # tokens that a request may have; 0: as many as the cache has cells
    n_predict: int = -1
    defaults: Mapping[str, Any] = field(default_factory=dict)
    special: bool = False
    api_keys: tuple[str, ...] = ()
    cache_prompt: bool = True
    cache_edit: str = "exact"
    prepares_turns: bool = True
    context_shift: bool = False
    forget: str = ""
    n_keep: int = 0
    spec_type: str = "none"
    embeddings: bool = False
    pooling: str = ""
    embd_normalize: int = 2
    chat_template: str = ""
    jinja: bool = True
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning_format: str = "auto"
    reasoning_budget: int = -1
    reasoning_budget_message: str = ""
    parses_replies: bool = True
    prefills: bool = True
    spm_infill: bool = False
    metrics: bool = False
    verbose: bool = False  # whether answers tell how they were made, unless a body says otherwise
    props: bool = False
    cors_origins: str = "*"  # pages of which origins may ask, as server.http.cors has it
    run_token: str = ""
    first_slot: int = 0
    slots: bool = True
    page: bool = True
    slot_save_path: str = ""
    max_body: int = 64 << 20
    body_seconds: float = 60.0
    idle_seconds: float = 60.0
    io_seconds: float = 3600.0
    max_connections: int = 4096
    max_prompts: int = 2048
    ping_seconds: float = 30.0

    @property
    def pooling_number(self) -> int:
        """llama.cpp's number of the pooling; -1: the file's own."""
        return POOLING_NAMES.index(self.pooling) if self.pooling else -1
