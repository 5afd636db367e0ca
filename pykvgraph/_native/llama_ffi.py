"""libllama's functions that are called here: tokenizer, chat templates, samplers.

llama_cpp declares all of libllama, and its import takes as long as a small model's first token. This module
imports nothing of pykvgraph: the processes of grammars, which don't either, run it from its file.
tests/native/test_llama_ffi.py holds it to llama_cpp's own declarations.
"""

from __future__ import annotations

import ctypes
import types

LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class OverrideValue(ctypes.Union):
    _fields_ = (
        ("val_i64", ctypes.c_int64),
        ("val_f64", ctypes.c_double),
        ("val_bool", ctypes.c_bool),
        ("val_str", ctypes.c_char * 128),
    )


class ModelKvOverride(ctypes.Structure):
    _fields_ = (("tag", ctypes.c_int), ("key", ctypes.c_char * 128), ("value", OverrideValue))


class LlamaModelParams(ctypes.Structure):
    _fields_ = (
        ("devices", ctypes.c_void_p),
        ("tensor_buft_overrides", ctypes.c_void_p),
        ("n_gpu_layers", ctypes.c_int32),
        ("split_mode", ctypes.c_int),
        ("load_mode", ctypes.c_int),
        ("lazy_mode", ctypes.c_int),
        ("main_gpu", ctypes.c_int32),
        ("tensor_split", ctypes.c_void_p),
        ("progress_callback", ctypes.c_void_p),
        ("progress_callback_user_data", ctypes.c_void_p),
        ("kv_overrides", ctypes.POINTER(ModelKvOverride)),
        ("vocab_only", ctypes.c_bool),
        ("check_tensors", ctypes.c_bool),
        ("use_extra_bufts", ctypes.c_bool),
        ("no_host", ctypes.c_bool),
        ("no_alloc", ctypes.c_bool),
        ("load_mtp", ctypes.c_bool),
    )


class TokenData(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int32), ("logit", ctypes.c_float), ("p", ctypes.c_float))


class TokenDataArray(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.POINTER(TokenData)),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    )


class LogitBias(ctypes.Structure):
    _fields_ = (("token", ctypes.c_int32), ("bias", ctypes.c_float))


class SamplerChainParams(ctypes.Structure):
    _fields_ = (("no_perf", ctypes.c_bool),)


class ChatMessage(ctypes.Structure):
    _fields_ = (("role", ctypes.c_char_p), ("content", ctypes.c_char_p))


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "llama_model_kv_override": ModelKvOverride,
    "llama_model_params": LlamaModelParams,
    "llama_token_data": TokenData,
    "llama_token_data_array": TokenDataArray,
    "llama_logit_bias": LogitBias,
    "llama_sampler_chain_params": SamplerChainParams,
    "llama_chat_message": ChatMessage,
}

# One letter each; a pointer to anything but text is "p".
_TYPES = {
    "v": None,
    "b": ctypes.c_bool,
    "i": ctypes.c_int32,
    "u": ctypes.c_uint32,
    "n": ctypes.c_size_t,
    "f": ctypes.c_float,
    "z": ctypes.c_char_p,
    "p": ctypes.c_void_p,
    "M": LlamaModelParams,
    "S": SamplerChainParams,
}

# what a function returns, then its arguments
FUNCTIONS = {
    "llama_log_set": "vpp",
    "llama_model_default_params": "M",
    "llama_model_load_from_file": "pzM",
    "llama_model_free": "vp",
    "llama_model_get_vocab": "pp",
    "llama_model_meta_count": "ip",
    "llama_model_meta_key_by_index": "ipizn",
    "llama_model_meta_val_str_by_index": "ipizn",
    "llama_vocab_n_tokens": "ip",
    "llama_vocab_bos": "ip",
    "llama_vocab_eos": "ip",
    "llama_vocab_sep": "ip",
    "llama_vocab_nl": "ip",
    "llama_vocab_fim_pre": "ip",
    "llama_vocab_fim_suf": "ip",
    "llama_vocab_fim_mid": "ip",
    "llama_vocab_fim_rep": "ip",
    "llama_vocab_fim_sep": "ip",
    "llama_vocab_get_add_bos": "bp",
    "llama_vocab_get_add_eos": "bp",
    "llama_vocab_get_add_sep": "bp",
    "llama_vocab_is_eog": "bpi",
    "llama_vocab_get_attr": "ipi",
    "llama_vocab_get_text": "zpi",
    "llama_tokenize": "ipzipibb",
    "llama_token_to_piece": "ipiziib",
    "llama_chat_apply_template": "izpnbzi",
    "llama_sampler_chain_default_params": "S",
    "llama_sampler_chain_init": "pS",
    "llama_sampler_chain_add": "vpp",
    "llama_sampler_chain_get": "ppi",
    "llama_sampler_chain_n": "ip",
    "llama_sampler_clone": "pp",
    "llama_sampler_free": "vp",
    "llama_sampler_name": "zp",
    "llama_sampler_accept": "vpi",
    "llama_sampler_apply": "vpp",
    "llama_sampler_init_adaptive_p": "pffu",
    "llama_sampler_init_dist": "pu",
    "llama_sampler_init_dry": "ppffiipn",
    "llama_sampler_init_grammar": "ppzz",
    "llama_sampler_init_greedy": "p",
    "llama_sampler_init_infill": "pp",
    "llama_sampler_init_logit_bias": "piip",
    "llama_sampler_init_min_p": "pfn",
    "llama_sampler_init_mirostat": "piuffi",
    "llama_sampler_init_mirostat_v2": "puff",
    "llama_sampler_init_penalties": "piifff",
    "llama_sampler_init_temp": "pf",
    "llama_sampler_init_temp_ext": "pfff",
    "llama_sampler_init_top_k": "pi",
    "llama_sampler_init_top_n_sigma": "pf",
    "llama_sampler_init_top_p": "pfn",
    "llama_sampler_init_typical": "pfn",
    "llama_sampler_init_xtc": "pffnu",
}


def declared(library: ctypes.CDLL) -> types.SimpleNamespace:
    """The structs and functions by libllama's names. Raises AttributeError: which function it hasn't."""
    functions = {}
    for name, letters in FUNCTIONS.items():
        function = functions[name] = getattr(library, name)
        function.restype, *function.argtypes = (_TYPES[letter] for letter in letters)
    return types.SimpleNamespace(**STRUCTS, **functions)
