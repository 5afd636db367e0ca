"""Ways to damage a GGUF file, drawn by seed: the same base and seed are the same file on every machine."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import gguf

from support import chance
from support.gguf_bytes import FLOAT32, STRING, UINT32, RawGguf
from support.gguf_parts import BOOL, INTEGERS, KINDS, Key, Parts, Scalar, Tensor

UINT16, INT32 = 2, 5
N_GGML_TYPES = 44
WEIGHT_TYPES = sorted(gguf.GGML_QUANT_SIZES)
ODD_INTEGERS = [
    0,
    1,
    2,
    3,
    7,
    255,
    2**15,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**48,
    2**63,
    2**64 - 1,
    -1,
]
ODD_FLOATS = [0.0, -0.0, -1.0, 1e-45, 1e-38, 1e38, 1e300, math.inf, -math.inf, math.nan]
ODD_TEXTS = [
    b"",
    b"\0",
    b"a\0b",
    b" ",
    b"  ",
    b"\n",
    b"a",
    b"\xff",
    b"\xc3",
    b"\xa9",
    b"\xf0\x9f",
    b"\xf7\xbf\xbf\xbf",
    b"\xed\xa0\x80",
    b"<0x",
    b"<0x0A>",
    b"<0xZZ>",
    b"<|im_end|>",
    b"<|return|>",
    b"</s>",
    b"%s%n%n",
    "\u2581".encode(),
    "\U0010ffff".encode(),
    b"x" * 5000,
    "\u4e2d".encode() * 30_000,
]
ARCHITECTURES = [b"llama", b"llama4", b"clip", b"(unknown)", b"gpt2", b"bert", b"mamba", b"", b"%s%s"]
TOKENIZERS = [
    *(b"llama", b"gpt2", b"bert", b"t5", b"rwkv", b"plamo2", b"gemma4", b"hybriddna", b"whitespace"),
    *(b"test", b"none", b"no_vocab", b"", b"GPT2"),
]
# one of each way to split a text, then what nobody knows
PRE_TOKENIZERS = [
    *(b"default", b"llama-bpe", b"jais-2", b"deepseek-llm", b"deepseek-v3", b"spark2_5", b"youtu"),
    *(b"deepseek-coder", b"falcon", b"starcoder", b"gpt-2", b"qwen2", b"qwen35", b"bloom", b"chatglm-bpe"),
    *(b"glm4", b"viking", b"tekken", b"chameleon", b"gpt-4o", b"granite-embed-multi-97m", b"tiny_aya"),
    *(b"kimi-k2", b"superbpe", b"bailingmoe", b"seed-coder", b"ufakzeka", b"grok-2", b"afmoe", b"laguna"),
    *(b"exaone-moe", b"gemma4", b"sarvam-moe", b"minicpm5", b"whitespace", b"jina-v2-de", b"modern-bert"),
    *(b"", b"of tomorrow", b"\xff\xfe"),
]
SPECIAL_TOKENS = [
    *("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "cls", "mask"),
    *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep", "prefix", "suffix", "middle"),
]
ARCH_COUNTS = [
    *("vocab_size", "expert_count", "expert_used_count", "expert_feed_forward_length"),
    *("attention.key_length", "attention.value_length", "attention.sliding_window"),
    *("attention.sliding_window_pattern", "rope.dimension_count", "rope.scaling.original_context_length"),
    *("attention.shared_kv_layers", "embedding_length_per_layer_input", "rope.dimension_count_swa"),
    *("attention.key_length_swa", "attention.value_length_swa", "attention.head_count_kv", "block_count"),
]
STATE_COUNTS = [
    *("ssm.conv_kernel", "ssm.state_size", "ssm.inner_size", "ssm.time_step_rank", "ssm.group_count"),
    *("full_attention_interval", "shortconv.l_cache", "nextn_predict_layers", "attention.recurrent_layers"),
    *("expert_shared_feed_forward_length", "leading_dense_block_count"),
]
ARCH_NUMBERS = [
    *("rope.scaling.factor", "rope.scaling.attn_factor", "rope.freq_base_swa"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
]
FLAGS = [
    *("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces"),
    *("normalizer.lowercase", "normalizer.strip_accents"),
]


def any_key(rng: random.Random, parts: Parts) -> Key:
    return rng.choice(parts.keys) if parts.keys else Key(b"none", UINT32, 0)


def any_tensor(rng: random.Random, parts: Parts) -> Tensor:
    return rng.choice(parts.tensors) if parts.tensors else Tensor(b"none", [1], 0, b"")


def items_of(parts: Parts, name: str) -> list[Scalar]:
    """An array of the vocabulary; what is no array (any more) is empty, and changing it does nothing."""
    key = parts.find(f"tokenizer.ggml.{name}")
    return key.value if key and isinstance(key.value, list) else []


def odd_value(rng: random.Random, kind: int) -> Scalar:
    if kind == STRING:
        return rng.choice(ODD_TEXTS)
    return rng.choice(ODD_INTEGERS if kind in INTEGERS or kind == BOOL else ODD_FLOATS)


# ---- keys ----


def drop_key(rng: random.Random, parts: Parts) -> str:
    key = any_key(rng, parts)
    parts.keys = [other for other in parts.keys if other is not key]
    return f"without {key.name!r}"


def repeat_key(rng: random.Random, parts: Parts) -> str:
    key = any_key(rng, parts)
    parts.keys.insert(rng.randrange(len(parts.keys) + 1), deepcopy(key))
    return f"{key.name!r} twice"


def rename_key(rng: random.Random, parts: Parts) -> str:
    key, before = any_key(rng, parts), b""
    before, key.name = (
        key.name,
        rng.choice([b"", b"\0", key.name + b"\0", key.name + b"\0x", b"k" * 70_000, b"\xff"]),
    )
    return f"{before!r} renamed to {key.name[:20]!r}"


def retype_key(rng: random.Random, parts: Parts) -> str:
    key = any_key(rng, parts)
    key.kind = rng.choice(KINDS)
    return f"{key.name!r} of type {key.kind}"


def array_or_scalar(rng: random.Random, parts: Parts) -> str:
    key = any_key(rng, parts)
    if not isinstance(key.value, list):
        key.value = [key.value] * rng.choice([0, 1, 2])
    elif key.value:
        key.value = key.value[0]
    return f"{key.name!r} as {'an array' if isinstance(key.value, list) else 'a scalar'}"


def odd_key(rng: random.Random, parts: Parts) -> str:
    key = any_key(rng, parts)
    value = odd_value(rng, key.kind)
    if isinstance(key.value, list):
        at = rng.randrange(len(key.value) + 1)
        key.value[at : at + 1] = [value]
        return f"{key.name!r}[{at}] = {value!r:.40}"
    key.value = value
    return f"{key.name!r} = {value!r:.40}"


def resize_array(rng: random.Random, parts: Parts) -> str:
    arrays = [key for key in parts.keys if isinstance(key.value, list)]
    if not arrays:
        return "no array to resize"
    key = rng.choice(arrays)
    assert isinstance(key.value, list)
    before = len(key.value)
    key.value = rng.choice([[], key.value[:-1], key.value[:1], key.value + key.value[-1:], key.value * 2])
    return f"{key.name!r} of {before} items now {len(key.value)}"


# ---- the vocabulary ----


def odd_token(rng: random.Random, parts: Parts) -> str:
    tokens, types = items_of(parts, "tokens"), items_of(parts, "token_type")
    if not tokens:
        return "no token to change"
    at = rng.randrange(len(tokens))
    tokens[at] = rng.choice([*ODD_TEXTS, rng.choice(tokens)])
    if at < len(types) and rng.random() < 0.7:
        types[at] = rng.randrange(7)
    return f"token {at} = {tokens[at]!r:.40}" + (f" of type {types[at]!r}" if at < len(types) else "")


def odd_token_types(rng: random.Random, parts: Parts) -> str:
    types = items_of(parts, "token_type")
    kind = rng.choice([0, 1, 2, 3, 4, 5, 6, None])
    types[:] = [rng.randrange(7) if kind is None else kind for _ in types]
    return f"all tokens of type {'any' if kind is None else kind}"


def no_byte_tokens(rng: random.Random, parts: Parts) -> str:
    tokens, types = items_of(parts, "tokens"), items_of(parts, "token_type")
    for at in range(min(len(tokens), len(types))):
        if types[at] == 6:
            tokens[at], types[at] = b"word%d" % at, 1
    cut_out = rng.choice([b"\xc3", b"\xa9", b"\xf0", b"e", "é".encode()])
    if cut_out not in tokens and len(tokens) > 21 and len(types) == len(tokens):
        tokens[20:22], types[20:22] = [cut_out, "é".encode()], [4, 1]
    return f"no byte tokens, and {cut_out!r} is cut out"


def odd_special_token(rng: random.Random, parts: Parts) -> str:
    name = rng.choice(SPECIAL_TOKENS)
    n = len(items_of(parts, "tokens"))
    value = rng.choice([0, n - 1, n, n + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 2])
    parts.set(f"tokenizer.ggml.{name}_token_id", rng.choice([UINT32, UINT32, UINT32, INT32, 10]), value)
    return f"{name} token = {value}"


def odd_flag(rng: random.Random, parts: Parts) -> str:
    name, value = rng.choice(FLAGS), rng.choice([0, 1, 1, 2, 255])
    parts.set(f"tokenizer.ggml.{name}", rng.choice([BOOL, BOOL, BOOL, UINT32, STRING]), value)
    if rng.random() < 0.5:
        parts.keys = [
            key for key in parts.keys if not key.name.endswith((b".bos_token_id", b".eos_token_id"))
        ]
    return f"{name} = {value}, bos and eos {'named' if parts.find('tokenizer.ggml.bos_token_id') else 'not'}"


def small_vocabulary(rng: random.Random, parts: Parts) -> str:
    """So few tokens that default ids are out of range; no longer the model's, but a vocabulary."""
    n = rng.choice([1, 2, 3, 10, 11, 12, 259])
    for name in ("tokens", "token_type", "scores"):
        del items_of(parts, name)[n:]
    return f"the first {n} tokens" + (", " + odd_flag(rng, parts) if rng.random() < 0.5 else "")


def odd_merge(rng: random.Random, parts: Parts) -> str:
    merge = rng.choice(
        [b"", b" ", b"a", b"a ", b" a", b"a b c", b"  ", b"\xff \xff", b"\0 \0", b"aa aa", b"x" * 5000]
    )
    merges = items_of(parts, "merges")
    if not merges:
        parts.set("tokenizer.ggml.merges", STRING, [merge])
    else:
        merges[rng.randrange(len(merges))] = merge
    return f"a merge {merge!r:.40}"


def odd_kind(rng: random.Random, parts: Parts) -> str:
    name, values = rng.choice(
        [
            ("tokenizer.ggml.model", TOKENIZERS),
            ("tokenizer.ggml.pre", PRE_TOKENIZERS),
            ("tokenizer.ggml.pre", PRE_TOKENIZERS),
            ("general.architecture", ARCHITECTURES),
            ("general.name", [b"phi-3", b"a phi3 model", b"modern-bert", b"\xff", b"", b"%s%n"]),
            ("tokenizer.chat_template", [b"", b"{{", b"\xff", b"{% for"]),
        ]
    )
    value = rng.choice(values)
    parts.set(name, STRING, value)
    return f"{name} = {value!r}"


def odd_number(rng: random.Random, parts: Parts) -> str:
    key = parts.find("general.architecture")
    arch = key.value.decode("latin-1") if key is not None and isinstance(key.value, bytes) else "llama"
    has_states = any(b".ssm." in key.name or b".shortconv." in key.name for key in parts.keys)
    name, kind = rng.choice(
        [
            *((f"{arch}.{key}", UINT32) for key in STATE_COUNTS if has_states),
            ("split.count", UINT16),
            ("split.no", UINT16),
            ("general.alignment", UINT32),
            ("general.file_type", UINT32),
            ("tokenizer.ggml.token_type_count", UINT32),
            *((f"{arch}.{key}", UINT32) for key in ARCH_COUNTS),
            *((f"{arch}.{key}", FLOAT32) for key in ARCH_NUMBERS),
        ]
    )
    value = odd_value(rng, kind)
    parts.set(name, kind, value)
    return f"{name} = {value!r}"


# ---- tensors ----


def odd_tensor(rng: random.Random, parts: Parts) -> str:
    tensor = any_tensor(rng, parts)
    what = rng.randrange(6)
    if what == 0:
        tensor.shape = rng.choice(
            [[], [0], tensor.shape * 3, tensor.shape[::-1], [*tensor.shape, 1], [2**33, 2**33]]
        )
        return f"{tensor.name!r} of shape {tensor.shape}"
    if what == 1 and tensor.shape:
        tensor.shape[rng.randrange(len(tensor.shape))] = rng.choice(ODD_INTEGERS)
        return f"{tensor.name!r} of shape {tensor.shape}"
    if what == 2:
        tensor.kind = rng.choice([*range(N_GGML_TYPES), 1000, 2**31, 2**32 - 1])
        return f"{tensor.name!r} of type {tensor.kind}"
    if what == 3:
        tensor.shift = rng.choice([1, 4, 32, -32, 2**31, 2**63, -1])
        return f"{tensor.name!r} moved by {tensor.shift}"
    if what == 4:
        before, other = tensor.name, any_tensor(rng, parts).name
        tensor.name = rng.choice(
            [b"", b"\0", before + b"\0", other, b"t" * 63, b"t" * 64, b"blk.99.attn_q.weight"]
        )
        return f"{before!r} renamed to {tensor.name!r:.40}"
    parts.tensors = [other for other in parts.tensors if other is not tensor]
    return f"without {tensor.name!r}"


def odd_weights(rng: random.Random, parts: Parts) -> str:
    tensor = any_tensor(rng, parts)
    fill = rng.choice(
        [struct.pack("<f", value) for value in (math.nan, math.inf, -math.inf, 3e38, 0.0)] + [None]
    )
    size = len(tensor.data)
    tensor.data = rng.randbytes(size) if fill is None else (fill * (size // 4 + 1))[:size]
    return f"{tensor.name!r} full of {'noise' if fill is None else struct.unpack('<f', fill)[0]}"


# ---- bytes ----


def odd_header(rng: random.Random, raw: RawGguf) -> str:
    what = rng.randrange(4)
    if what == 0:
        raw.version = rng.choice([0, 1, 2, 4, 0x3000000, 2**32 - 1])
    elif what == 1:
        raw.magic = rng.choice([b"GGML", b"FUGG", b"\0\0\0\0"])
    elif what == 2:
        raw.n_keys = rng.choice([0, len(raw.keys) - 1, len(raw.keys) + 1, 2**31, 2**32, 2**63, 2**64 - 1])
    else:
        raw.n_tensors = rng.choice([0, len(raw.tensors) - 1, len(raw.tensors) + 1, 2**31, 2**62, 2**64 - 1])
    return f"header {raw.magic!r}, version {raw.version}, {raw.n_keys} keys, {raw.n_tensors} tensors"


def odd_bytes(rng: random.Random, data: bytearray, n_directory: int) -> str:
    """Bits, bytes, integers; mostly in the directory, where they matter."""
    where = n_directory if rng.random() < 0.9 else len(data)
    changes = []
    for _ in range(rng.choice([1, 1, 1, 2, 4, 8])):
        at = rng.randrange(min(where, len(data)))
        what = rng.randrange(6)
        if what <= 1:
            data[at] ^= 1 << rng.randrange(8)
        elif what == 2:
            data[at] = rng.randrange(256)
        elif what == 3:
            size = rng.choice([4, 8])
            data[at : at + size] = (rng.choice(ODD_INTEGERS) % 2 ** (8 * size)).to_bytes(size, "little")
        elif what == 4:
            del data[at : at + rng.choice([1, 4, 8, 64, 1024])]
        else:
            data[at:at] = rng.randbytes(rng.choice([1, 4, 8, 64]))
        changes.append(f"{['a bit', 'a bit', 'a byte', 'a number', 'a cut', 'an insertion'][what]} at {at}")
    return ", ".join(changes)


def truncation(rng: random.Random, data: bytearray, n_directory: int) -> str:
    length = rng.randrange(n_directory if rng.random() < 0.7 else len(data))
    del data[length:]
    return f"cut off at {length}"


PARTS: list[Callable[[random.Random, Parts], str]] = [
    *(drop_key, repeat_key, rename_key, retype_key, array_or_scalar, odd_key, odd_key, resize_array),
    *(odd_token, odd_token, odd_token, odd_token_types, no_byte_tokens, odd_special_token, odd_special_token),
    *(odd_flag, odd_flag, small_vocabulary, odd_merge, odd_kind, odd_kind, odd_number),
    *(odd_tensor, odd_tensor, odd_weights),
]
BYTES = [odd_bytes, odd_bytes, odd_bytes, truncation]


def write_mutant(parts: Parts, base: str, index: int, path: Path) -> str:
    """Damages the file that `parts` is of, in one to three ways, and tells how. `parts` is changed, too."""
    rng = random.Random(chance.seed(f"{base}-{index}"))
    what = rng.random()
    changes = []
    if what < 0.65:
        changes += [rng.choice(PARTS)(rng, parts) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    raw = parts.raw()
    if 0.65 <= what < 0.7:
        changes.append(odd_header(rng, raw))
    raw.write(path)
    if what >= 0.7:
        data = bytearray(path.read_bytes())
        changes.append(rng.choice(BYTES)(rng, data, len(data) - len(raw.data)))
        path.write_bytes(data)
    return "; ".join(changes)


def write_retyped(parts: Parts, _base: str, index: int, path: Path) -> str:
    """All matrices of one of WEIGHT_TYPES, full of noise; rows must be a multiple of 256."""
    rng, kind = random.Random(index), WEIGHT_TYPES[index]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    for tensor in parts.tensors:
        if len(tensor.shape) == 2:
            tensor.kind = kind
            tensor.data = rng.randbytes(math.prod(tensor.shape) // elements * size)
    parts.raw().write(path)
    return f"matrices of type {kind.name}"


def write_resplit(parts: Parts, _base: str, index: int, path: Path) -> str:
    """Another of PRE_TOKENIZERS."""
    parts.set("tokenizer.ggml.pre", STRING, PRE_TOKENIZERS[index])
    parts.raw().write(path)
    return f"pre-tokenizer {PRE_TOKENIZERS[index]!r}"
