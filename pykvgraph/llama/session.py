"""The session of a Llama: tokens in, tokens out, which of them the cache has, and saved states."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pykvgraph._native.fork import importing
from pykvgraph.checks import Integers
from pykvgraph.context.batch import Batch
from pykvgraph.context.common_length import common_length
from pykvgraph.context.context import Context, LastOutput
from pykvgraph.errors import InvalidArgumentError, UnsupportedError
from pykvgraph.kv_cache.cache import KVCache
from pykvgraph.llama.sampling import LlamaSampler
from pykvgraph.llama.state import LlamaState
from pykvgraph.llama.vocabulary import LlamaVocabulary
from pykvgraph.model.model import Model
from pykvgraph.model.tokenizer import Tokenizer
from pykvgraph.sampling.sampler import Sampler
from pykvgraph.sequence.decode_text import decode_text
from pykvgraph.sequence.sequence import TokenSequence, earlier_texts

if TYPE_CHECKING:
    from pykvgraph.llama.cache import KeptPrefixes


class LlamaSession:
    """A context, its vocabulary, and one text in its sequence 0: what Llama is made of.

    n_tokens: how many tokens of the text are decoded. input_ids: int32 (n_ctx,), of which these are the
    first. scores: float32 (n_ctx, n_vocab) with logits_all, the logits after each token; else nothing is
    written there.
    """

    last_n_tokens_size: int
    n_batch: int
    tokenizer_: Any  # which tokenize() and detokenize() ask
    _tokenizer: Tokenizer
    _vocabulary: LlamaVocabulary

    def __init__(self, seed: int, logits_all: bool) -> None:
        self.cache: Any = None
        self._kept: KeptPrefixes | None = None  # by a cache of ours
        self.n_tokens = 0
        self._seed = seed
        self._logits_all = logits_all
        self._last: LastOutput | None = None  # of the token at n_tokens - 1, while it can be sampled from
        self._context: Context | None = None
        self._sampling: LlamaSampler | None = None  # of the generation that waits to go on
        self._saved: Sampler | None = None  # of the state that was loaded, until other tokens come

    def _begin(self, context: Context, n_vocab: int) -> None:
        self._context = context
        self._earlier = None if self._logits_all else earlier_texts(context)
        self._text = TokenSequence(context, 0, earlier=self._earlier)
        self._batch = Batch()
        self.n_batch = min(context.n_batch, context.n_ctx)  # a cache that fits may be smaller
        self.input_ids: npt.NDArray[np.int32] = np.zeros(context.n_ctx, np.int32)
        rows = context.n_ctx if self._logits_all else self.n_batch
        # pages that nobody touches take no memory
        self.scores: npt.NDArray[np.float32] = np.zeros((rows, n_vocab), np.float32)

    @property
    def context(self) -> Context:
        """The context. Raises InvalidArgumentError with vocab_only."""
        if self._context is None:
            raise InvalidArgumentError("this Llama has a vocabulary only: open it without vocab_only")
        return self._context

    @property
    def kv(self) -> KVCache:
        """The cache. The text is in sequence 0; what is removed there is decoded again when it is needed."""
        return self.context.kv

    @property
    def model(self) -> Model:
        """The model. Raises InvalidArgumentError with vocab_only."""
        return self.context.model

    # The vocabulary

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Token ids of a text in UTF-8. special: control tokens may be spelled in it."""
        ids: list[int] = self.tokenizer_.tokenize(text, add_bos, special)
        return ids

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: list[int] | None = None, special: bool = False
    ) -> bytes:
        """The bytes of tokens. special: with the names of control tokens."""
        data: bytes = self.tokenizer_.detokenize(list(tokens), prev_tokens=prev_tokens, special=special)
        return data

    def tokenizer(self) -> LlamaVocabulary:
        """The tokenizer, with llama-cpp-python's methods."""
        return self._vocabulary

    def n_vocab(self) -> int:
        """Number of tokens."""
        return self._tokenizer.n_vocab

    def n_ctx(self) -> int:
        """Cells of the cache."""
        return self.context.n_ctx

    def n_embd(self) -> int:
        """Size of a hidden state."""
        return self.model.n_embd

    def token_bos(self) -> int:
        """The token that begins a text; -1: none."""
        return self._vocabulary.bos

    def token_eos(self) -> int:
        """The token that ends a text; -1: none."""
        return self._vocabulary.eos

    def token_nl(self) -> int:
        """The token of a new line; -1: none."""
        return self._vocabulary.special("nl")

    # The text

    @property
    def _input_ids(self) -> npt.NDArray[np.int32]:
        return self.input_ids[: self.n_tokens]

    @property
    def _scores(self) -> npt.NDArray[np.float32]:
        return self.scores[: self.n_tokens]

    @property
    def eval_tokens(self) -> list[int]:
        """The tokens that are decoded."""
        return [*map(int, self._input_ids)]

    @property
    def eval_logits(self) -> list[list[float]]:
        """The logits of the decoded tokens with logits_all, else none."""
        return self._scores.tolist() if self._logits_all else []

    def set_cache(self, cache: Any) -> None:
        """Where completions keep their texts: a LlamaRAMCache or LlamaDiskCache; None: nowhere.

        What else has llama-cpp-python's protocol, such as its own classes, gets whole states, by tokens.
        Raises UnsupportedError with logits_all, as logits are not kept, and OSError when the model's file
        can't be read any more.
        """
        with importing:
            from pykvgraph.llama.cache import KeptPrefixes, PrefixCache
        kept = None
        if isinstance(cache, PrefixCache):
            if self._logits_all:
                raise UnsupportedError(
                    "set_cache: logits are not kept; with logits_all use llama_cpp's caches"
                )
            kept = KeptPrefixes(self.context, cache)
        if kept is not None or self._kept is not None:
            if self._earlier is not None:
                self._earlier.clear()
            self._earlier = kept.earlier if kept else earlier_texts(self.context)
            self._tell(self._text.ids)
        self.cache, self._kept = cache, kept

    def _keep(self, ids: list[int]) -> None:
        """The cache has the text from now on, which the caller has as these tokens."""
        if self._kept is not None:
            self._kept.save(self._text.ids.tolist())
        elif self.cache is not None:
            self.cache[ids] = self.save_state()

    def _recall(self, prompt: list[int]) -> None:
        """The text becomes what the cache has of a prompt, if that is more than the present text has."""
        if self._kept is not None:
            n = self._kept.load(prompt, common_length(self._text.ids, prompt))
            if n:
                self.reset()
                self._tell(np.array(prompt[:n], np.int32))
        elif self.cache is not None:
            try:
                state = self.cache[prompt]
            except KeyError:
                return
            known = common_length(state.input_ids[: state.n_tokens], prompt)
            if known > common_length(self._input_ids, prompt):
                self.load_state(state)

    def _tell(self, ids: npt.NDArray[np.int32]) -> None:
        """Sequence 0 has these tokens."""
        self._text = TokenSequence(self.context, 0, earlier=self._earlier)
        self._text.record(ids)

    def set_seed(self, seed: int) -> None:
        """The seed of the next generation."""
        self._seed = seed
        self._saved = None

    def reset(self) -> None:
        """Forgets the text. Its cells stay until other tokens take their place, if these begin alike."""
        self.n_tokens = 0
        self._last = self._saved = None

    def eval(self, tokens: Sequence[int]) -> None:
        """Decodes tokens behind the n_tokens that are there; cells beyond these are removed before.

        Raises what Context.decode raises.
        """
        self._eval(list(tokens))

    def _eval(self, tokens: list[int], copy_logits: bool = True) -> None:
        known = self.n_tokens
        if len(tokens) == 1 and not self._logits_all and known == len(self._text) < len(self.input_ids):
            self._last = self._text.append(tokens[0], copy_logits=copy_logits)
            self.input_ids[known] = tokens[0]
            self.n_tokens = known + 1
        elif tokens:
            self._read([*self._input_ids.tolist(), *tokens])

    def _read(self, ids: list[int]) -> None:
        """Makes the text exactly these tokens; what the cache has of them stays."""
        if len(ids) > self.context.n_ctx:
            raise InvalidArgumentError(
                f"{len(ids)} tokens exceed the context window of {self.context.n_ctx}: use a larger n_ctx"
            )
        self._last = None
        if self._logits_all:
            self._read_all(ids)
        else:
            self._last = self._text.set(ids).last
        self.input_ids[: len(ids)] = ids
        self.n_tokens = len(ids)

    def _read_all(self, ids: list[int]) -> None:
        """As _read, and keeps the logits of every token."""
        known = min(common_length(self._input_ids, ids), len(ids) - 1)
        begin = self.kv.rewind(0, known)
        self.n_tokens = begin
        for start in range(begin, len(ids), self.n_batch):
            part = ids[start : start + self.n_batch]
            self._batch.clear()
            self._batch.extend(part, start, logits="all")
            self.context.decode(self._batch, scores=True)
            self.scores[start : start + len(part)] = self.context.logits_view()
        found = self.context.scores()
        scored = int(found.best[-1]), float(found.best_logprob[-1]), float(found.log_sum[-1])
        self._last = LastOutput(*scored, self.scores[len(ids) - 1])
        self._text = TokenSequence(self.context, 0)
        self._text.record(ids)

    def sample(
        self,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_eta: float = 0.1,
        mirostat_tau: float = 5.0,
        penalize_nl: bool = True,
        logits_processor: Any = None,
        grammar: Any = None,
        idx: int | None = None,
    ) -> int:
        """A token after the last one that was decoded, or with logits_all after the one at `idx`.

        Raises InvalidArgumentError when nothing was decoded, or the logits of that token are not kept.
        """
        wanted = {name: value for name, value in locals().items() if name not in ("self", "idx")}
        sampler = self._sampler(**wanted)
        return sampler.sample(self._input_ids, self._logits_at(idx))

    def _sampler(self, **wanted: Any) -> LlamaSampler:
        """Takes the seed that is set now."""
        return LlamaSampler(self._tokenizer, self._seed, self.last_n_tokens_size, **wanted)

    def _logits_at(self, idx: int | None) -> npt.NDArray[np.float32]:
        at = self.n_tokens - 1 if idx is None else idx
        if self.n_tokens and at == self.n_tokens - 1 and self._last is not None:
            return self._last.logits if len(self._last.logits) else self.context.logits()[-1]
        if self._logits_all and 0 <= at < self.n_tokens:
            row: npt.NDArray[np.float32] = self.scores[at]
            return row
        raise InvalidArgumentError(
            f"there are no logits of token {at}: eval() comes first, and only logits_all=True keeps those of "
            "tokens before the last one"
        )

    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        grammar: Any = None,
    ) -> Generator[int, Sequence[int] | None, None]:
        """Decodes tokens, then samples one after another, each decoded when the next one is asked for.

        reset: the tokens are all of the text, of which only what is new is decoded; False: they follow what
        is there, and no tokens stand for the pending one. After load_state() of a state that was saved in the
        midst of a generation, one with reset=False and the same arguments draws the tokens that the other did
        from there on. Whoever sends tokens into the generator has them decoded behind the last one.
        It goes on for ever, unless stopping_criteria(ids, logits) is true.
        """
        left_out = ("self", "tokens", "reset", "stopping_criteria")
        wanted = {name: value for name, value in locals().items() if name not in left_out}
        sampler = self._sampler(**wanted)
        if not reset:
            sampler.go_on_as(self._saved)
        return self._generated([int(token) for token in tokens], sampler, reset, stopping_criteria)

    def _generated(
        self, tokens: list[int], sampler: LlamaSampler, reset: bool, stopping_criteria: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        pending = self.kv._pending
        if reset and tokens:
            self._read(tokens)
        else:
            before = self.kv.pending_token(0)
            self._eval(tokens if tokens or before is None else [before])
        if self._last is None:
            raise InvalidArgumentError("there is nothing to go on from: the tokens are empty")

        def say(last: LastOutput) -> int | None:
            token = sampler.choose(self._input_ids, last)
            if stopping_criteria is not None and stopping_criteria(self._input_ids, self._logits_at(None)):
                return None
            pending.put(0, token)
            self._sampling = sampler
            return token

        def append(token: int, more: Sequence[int] | None) -> LastOutput | None:
            self._sampling = None
            self._eval([token] if more is None else [token, *more], copy_logits=not sampler.greedy)
            return self._last

        try:
            yield from decode_text(self._last, say, append)
        finally:
            self._sampling = None

    def save_state(self) -> LlamaState:
        """The text, its cells, its pending token, its seed, and in the midst of a generation its sampler."""
        blob = self.kv.save(0)
        rows = self._scores if self._logits_all else self.scores[:0]
        sampler = self._saved if self._sampling is None else self._sampling.going_on()
        ids = self.input_ids.copy()
        return LlamaState(ids, rows.copy(), self.n_tokens, blob, len(blob), self._seed, sampler)

    def load_state(self, state: LlamaState) -> None:
        """Goes back to what save_state() returned, of this or another Llama of the same model.

        Raises what kv.load raises, and InvalidArgumentError when this one's context is too small.
        """
        if state.n_tokens > self.context.n_ctx:
            raise InvalidArgumentError(
                f"the state has {state.n_tokens} tokens, and this context {self.context.n_ctx} cells"
            )
        self.reset()
        if self._earlier is not None:
            self._earlier.clear()  # the state may need the cells
        self.kv.load(state.llama_state, seq=0)
        self.n_tokens = state.n_tokens
        self.input_ids[: self.n_tokens] = state.input_ids[: self.n_tokens]
        self._tell(self._input_ids)
        if self._logits_all and len(state.scores) == self.n_tokens:
            self.scores[: self.n_tokens] = state.scores
        self._sampling = None  # it was of the text before
        self._seed, self._saved = state.seed, state.sampler

    def _next_seed(self, seed: int | None) -> None:
        """A given seed, or one that is drawn from the last."""
        self.set_seed(random.Random(self._seed).randint(0, 2**32) if seed is None else seed)

    @staticmethod
    def logits_to_logprobs(
        logits: npt.NDArray[np.float32] | list[Any], axis: int = -1
    ) -> npt.NDArray[np.float32]:
        """Natural logarithms of the probabilities that logits stand for."""
        array = np.asarray(logits, np.float32)
        largest = array.max(axis=axis, keepdims=True)
        shifted = array - np.where(np.isfinite(largest), largest, 0)
        with np.errstate(divide="ignore"):
            result: npt.NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))
        return result

    @staticmethod
    def longest_token_prefix(a: Integers, b: Integers) -> int:
        """With how many tokens both begin."""
        return common_length(a, b)
