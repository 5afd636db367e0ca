"""/infill: what comes between a prefix and a suffix, for models that were taught it."""

from __future__ import annotations

from typing import Any

from pykvgraph.openai.errors import invalid, unsupported
from pykvgraph.openai.vocabulary import Vocabulary
from pykvgraph.server.requests.fields import Fields

_NAMES = {"pre": "prefix", "suf": "suffix", "mid": "middle"}
_REPOSITORY = "myproject\n"
_FILE = "filename"
_BETWEEN = "\n\n--- snippet ---\n\n"  # files, where the model has no token for that


def infill_prompt(
    fields: Fields,
    vocabulary: Vocabulary,
    n_batch: int,
    n_predict: int,
    n_ctx: int,
    suffix_first: bool = False,
) -> list[int]:
    """The tokens of a body's input_prefix, input_suffix, input_extra and prompt, as llama-server puts them.

    The order is that of arXiv:2409.12186: repository, other files, prefix, suffix. Of prefix and suffix as
    much is taken as fits a batch, three parts to one; n_predict: the server's. suffix_first: before the
    prefix. Raises WireError.
    """
    pre, suf, mid = _require(vocabulary)
    for name in ("input_prefix", "input_suffix"):
        if name not in fields:
            raise invalid(f'"{name}" is required')
    prompt = vocabulary.tokenizer.encode(fields.text("prompt"), False, True) if fields.text("prompt") else []
    prefix = _plain(vocabulary, fields.text("input_prefix"))
    suffix = _plain(vocabulary, fields.text("input_suffix"))
    n_prefix = 3 * (n_batch // 4)
    n_suffix = max(n_batch // 4 - (2 + len(prompt)), 0)
    extra = _extra(vocabulary, fields.array("input_extra"))
    n_extra = max(n_ctx - n_batch - 2 * n_predict, 0)
    bos = vocabulary.tokenizer.bos
    front = [bos] if vocabulary.adds_bos and bos is not None else []
    prefix = prefix[-n_prefix:] if n_prefix else []
    extra = extra[-n_extra:] if n_extra else []
    before, behind = [pre, *prefix, *prompt], [suf, *suffix[:n_suffix]]
    parts = behind + before if suffix_first else before + behind
    return [*extra, *front, *parts, mid]


def _require(vocabulary: Vocabulary) -> list[int]:
    """The three tokens."""
    found = {name: vocabulary.fim(name) for name in _NAMES}
    missing = "".join(f"{_NAMES[name]} token is missing. " for name, token in found.items() if token is None)
    if missing:
        raise unsupported(f"Infill is not supported by this model: {missing}")
    return [token for token in found.values() if token is not None]


def _extra(vocabulary: Vocabulary, files: list[Any]) -> list[int]:
    rep, sep = vocabulary.fim("rep"), vocabulary.fim("sep")
    tokens = [] if rep is None else [rep, *_plain(vocabulary, _REPOSITORY)]
    for file in files:
        if not isinstance(file, dict) or not isinstance(file.get("text"), str):
            raise invalid('extra_context chunk must contain a "text" field with a string value')
        name = file.get("filename", "tmp")
        if not isinstance(name, str):
            raise invalid('extra_context chunk\'s "filename" field must be a string')
        head = _BETWEEN if sep is None else f"{name}\n"
        tokens += ([] if sep is None else [sep]) + _plain(vocabulary, head) + _plain(vocabulary, file["text"])
    return tokens if sep is None else [*tokens, sep, *_plain(vocabulary, f"{_FILE}\n")]


def _plain(vocabulary: Vocabulary, text: str) -> list[int]:
    """Text that names no control tokens."""
    return vocabulary.tokenizer.encode(text, False) if text else []
