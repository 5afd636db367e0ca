"""Llama: a model, its context and one text, with llama-cpp-python's arguments, methods and dictionaries."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pykvgraph._native.fork import importing, renew_cached_properties_in_child
from pykvgraph.checks import several, shown
from pykvgraph.context.context import Context
from pykvgraph.context.pooling import POOLINGS, RANK, number_of, pooling_of
from pykvgraph.errors import InvalidArgumentError, UnsupportedError
from pykvgraph.llama import arguments, chat, completion, embedding
from pykvgraph.llama.request import CompletionRequest
from pykvgraph.llama.session import LlamaSession
from pykvgraph.llama.vocabulary import LlamaVocabulary
from pykvgraph.model.model import Model
from pykvgraph.model.tokenizer import Tokenizer


class Llama(LlamaSession):
    """llama-cpp-python's Llama: the same constructor, methods, defaults and dictionaries, on pykvgraph.

    What is more: `kv` is the cache (KVCache), `context` the context, `model` the model. What llama-cpp-python
    takes and pykvgraph doesn't raises UnsupportedError, which names it; an argument that neither knows raises
    TypeError. A missing file raises an error that is a FileNotFoundError and a ValueError.

    n_ctx "auto": as many cells as the model was trained on, or as the free memory has room for. kv_tier,
    device_layers: as Context takes them.

    A prompt that begins as the text before it decodes only the rest (TokenSequence). flash_attn False means
    "auto", n_threads None as many as Context chooses. verbose changes nothing: there is no log.
    """

    def __init__(
        self,
        model_path: str,
        *,
        n_gpu_layers: int = 0,
        split_mode: int = 1,
        main_gpu: int = 0,
        tensor_split: list[float] | None = None,
        vocab_only: bool = False,
        use_mmap: bool = True,
        use_mlock: bool = False,
        kv_overrides: dict[str, bool | int | float | str] | None = None,
        seed: int = arguments.RANDOM_SEED,
        n_ctx: int | Literal["auto"] = 512,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        rope_scaling_type: int | None = -1,
        pooling_type: int = -1,
        attention_type: int = -1,
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
        yarn_ext_factor: float = -1.0,
        yarn_attn_factor: float = 1.0,
        yarn_beta_fast: float = 32.0,
        yarn_beta_slow: float = 1.0,
        yarn_orig_ctx: int = 0,
        logits_all: bool = False,
        embedding: bool = False,
        offload_kqv: bool = True,
        flash_attn: bool = False,
        op_offload: bool | None = None,
        swa_full: bool | None = None,
        no_perf: bool = False,
        last_n_tokens_size: int = 64,
        lora_base: str | None = None,
        lora_scale: float = 1.0,
        lora_path: str | None = None,
        numa: bool | int = False,
        chat_format: str | None = None,
        chat_handler: Callable[..., Any] | None = None,
        draft_model: Any = None,
        tokenizer: Any = None,
        type_k: int | str | None = None,
        type_v: int | str | None = None,
        spm_infill: bool = False,
        verbose: bool = True,
        kv_tier: Literal["device", "host", "auto"] = "device",
        device_layers: int = 2,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        arguments.refuse_unsupported(given)
        self._given = given
        self.model_path = arguments.existing(model_path)
        self.verbose = verbose
        self.spm_infill = spm_infill
        self.last_n_tokens_size = last_n_tokens_size
        self.chat_handler = arguments.a_function(chat_handler, "chat_handler")
        super().__init__(seed or arguments.RANDOM_SEED, bool(logits_all))
        self._embedding = bool(embedding)
        self._open(given)
        self._vocabulary = LlamaVocabulary(self._tokenizer)
        self.tokenizer_ = self._vocabulary if tokenizer is None else tokenizer
        self.metadata = self._vocabulary.metadata()
        self._pooling_type = pooling_type
        self._chat_handlers = chat.handlers_of(self.metadata, self._vocabulary)

    @functools.cached_property
    def chat_format(self) -> str | None:
        """The name of the format that makes a conversation's prompt; it may be set to another one."""
        given = self._given
        return chat.format_of(given["chat_format"], given["chat_handler"], self.metadata, self._chat_handlers)

    def _open(self, given: dict[str, Any]) -> None:
        if given["vocab_only"]:
            self._tokenizer = Tokenizer.from_file(self.model_path, kv_overrides=given["kv_overrides"])
            return
        names = ("n_gpu_layers", "tensor_split", "kv_overrides")
        model = Model(self.model_path, **arguments.of_model(*(given[name] for name in names)))
        self._tokenizer = model.tokenizer
        n_ctx = given["n_ctx"] or model.n_ctx_train
        if n_ctx == "auto" and self._logits_all:
            raise InvalidArgumentError(
                'n_ctx="auto" plans no room for logits_all, which keeps n_vocab floats for each token: '
                "give n_ctx as a number"
            )
        n_batch = min(model.n_ctx_train if n_ctx == "auto" else n_ctx, given["n_batch"])
        context = Context(
            model,
            n_ctx=n_ctx,
            n_batch=n_batch,
            n_ubatch=min(n_batch, given["n_ubatch"]),
            n_seq_max=embedding.n_together(model, self._embedding),
            type_k=arguments.cache_type(given["type_k"], "type_k"),
            type_v=arguments.cache_type(given["type_v"], "type_v"),
            flash_attn="on" if given["flash_attn"] else "auto",
            n_threads=given["n_threads"] or None,
            n_threads_batch=given["n_threads_batch"] or None,
            offload_kqv=given["offload_kqv"],
            swa_full=given["swa_full"] is not False,  # libllama's default
            kv_tier=given["kv_tier"],
            device_layers=given["device_layers"],
            adapters=arguments.adapters(model, given["lora_path"], given["lora_scale"]),
        )
        self.n_threads, self.n_threads_batch = context.n_threads, context.n_threads_batch
        self._begin(context, model.n_vocab)

    def pooling_type(self) -> int:
        """How embed() makes one vector of a text. 0: it doesn't; 1: the mean, 2: the first, 3: the last.

        4: rank() scores texts, and embed() raises UnsupportedError.
        """
        number = number_of(self._pooling_type, self.metadata)
        return RANK if number == RANK else POOLINGS.index(pooling_of(number, self.metadata))

    # Completions

    def create_completion(
        self,
        prompt: str | list[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float = 0.8,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | list[str] | None = [],  # noqa: B006  # llama-cpp-python's default; it isn't changed
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        top_k: int = 40,
        stream: bool = False,
        seed: int | None = None,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        stopping_criteria: Any = None,
        logits_processor: Any = None,
        grammar: Any = None,
        logit_bias: Mapping[int, float] | None = None,
    ) -> Any:
        """Continues a prompt: a dictionary of OpenAI's interface, or with stream an iterator of such.

        Raises InvalidArgumentError (a ValueError) when the prompt exceeds the context, and for logprobs
        without logits_all.
        """
        wanted = {name: value for name, value in locals().items() if name != "self"}
        request = CompletionRequest(**{**wanted, "model": model or self.model_path})
        answer = completion.complete(self, request, self.spm_infill)
        return answer if stream else next(answer)

    def __call__(
        self,
        prompt: str,
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float = 0.8,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | list[str] | None = [],  # noqa: B006  # llama-cpp-python's default; it isn't changed
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        top_k: int = 40,
        stream: bool = False,
        seed: int | None = None,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        stopping_criteria: Any = None,
        logits_processor: Any = None,
        grammar: Any = None,
        logit_bias: Mapping[int, float] | None = None,
    ) -> Any:
        """create_completion()."""
        wanted = {name: value for name, value in locals().items() if name != "self"}
        return self.create_completion(**wanted)

    def create_chat_completion(
        self,
        messages: list[Any],
        functions: list[Any] | None = None,
        function_call: Any = None,
        tools: list[Any] | None = None,
        tool_choice: Any = None,
        temperature: float = 0.2,
        top_p: float = 0.95,
        top_k: int = 40,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        stream: bool = False,
        stop: str | list[str] | None = [],  # noqa: B006  # llama-cpp-python's default; it isn't changed
        seed: int | None = None,
        response_format: Any = None,
        max_tokens: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        logits_processor: Any = None,
        grammar: Any = None,
        logit_bias: Mapping[int, float] | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
    ) -> Any:
        """Answers a conversation, whose prompt chat_handler or chat_format makes; as create_completion.

        tool_choice with a function's name: the answer is a call of it, its arguments follow its schema.
        response_format {"type": "json_object"}, perhaps with "schema": the answer is such JSON.
        """
        wanted = {name: value for name, value in locals().items() if name != "self"}
        handler = chat.handler_of(self.chat_handler, self.chat_format, self._chat_handlers)
        return handler(llama=self, **wanted)

    def create_chat_completion_openai_v1(self, *args: Any, **kwargs: Any) -> Any:
        """create_chat_completion() as objects of the package openai. Raises ImportError without it."""
        types = importlib.import_module("openai.types.chat")
        answer = self.create_chat_completion(*args, **kwargs)
        if kwargs.get("stream", False):
            return (types.ChatCompletionChunk(**chunk) for chunk in answer)
        return types.ChatCompletion(**answer)

    # Embeddings

    def embed(
        self,
        input: str | list[str],
        normalize: bool = False,
        truncate: bool = True,
        return_count: bool = False,
    ) -> Any:
        """The hidden states of one text or of several: a vector each with pooling, else one for each token.

        Several texts are decoded together, as many as n_batch has room for. truncate: a text longer than
        n_batch, or in an encoder than what it was trained for, is cut; False: it raises InvalidArgumentError.
        return_count: (embeddings, number of tokens). Forgets the text. Raises RuntimeError without
        embedding=True.
        """
        if not self._embedding:
            raise RuntimeError("embed: open the Llama with embedding=True")
        texts = [input] if isinstance(input, str) else list(input)
        pooling = pooling_of(self._pooling_type, self.metadata)
        found, n_tokens = embedding.embed(self, texts, pooling, normalize, truncate)
        vectors = found[0] if isinstance(input, str) else found
        return (vectors, n_tokens) if return_count else vectors

    def create_embedding(self, input: str | list[str], model: str | None = None) -> dict[str, Any]:
        """embed(), as a dictionary of OpenAI's interface."""
        texts = input if isinstance(input, list) else [input]
        vectors, n_tokens = self.embed(texts, return_count=True)
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "embedding": vector, "index": index}
                for index, vector in enumerate(vectors)
            ],
            "model": self.model_path if model is None else model,
            "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        }

    def rank(self, query: str, documents: list[str]) -> list[float]:
        """How well each document answers the query, as a reranker's classifier says: greater is better.

        Documents are decoded together, as embed() does it. Forgets the text. Raises RuntimeError without
        embedding=True, UnsupportedError for a model that is no reranker, and InvalidArgumentError for a
        document that is longer with the query than n_batch.
        """
        if not self._embedding:
            raise RuntimeError("rank: open the Llama with embedding=True")
        given = None if isinstance(documents, str) else several(documents)
        if given is None:
            raise InvalidArgumentError(f"documents must be a list of texts, got {shown(documents)}")
        return embedding.rank(self, query, given)

    # Its life

    def close(self) -> None:
        """Frees the model and the cache. A second call does nothing."""
        if self._kept is not None:
            self.cache.flush()
        if self._context is not None:
            self._context.close()
            self._context.model.close()

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """A copy opens the same file again, and has no text yet."""
        return {**self._given, "seed": self._seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None,
        additional_files: list[str] | None = None,
        local_dir: str | None = None,
        local_dir_use_symlinks: bool | str = "auto",
        cache_dir: str | None = None,
        **kwargs: Any,
    ) -> Llama:
        """Opens a file of a repository on Hugging Face, downloaded unless it is there; needs huggingface_hub.

        filename, additional_files: names or patterns, each of exactly one file of the repository. Raises
        InvalidArgumentError when a pattern doesn't match exactly one.
        """
        if local_dir_use_symlinks not in ("auto", False):
            raise UnsupportedError("local_dir_use_symlinks: huggingface_hub has no such links any more")
        with importing:
            from pykvgraph.download import hub
        path = hub.download(repo_id, filename, additional_files or (), local_dir, cache_dir)
        return cls(model_path=path, **kwargs)


renew_cached_properties_in_child(Llama)
