"""Logits to a token: greedy here, everything else by libllama's samplers, behind the grammar."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pykvgraph._native import libllama
from pykvgraph._native.fork import importing
from pykvgraph._native.handles import Handle
from pykvgraph.checks import INT32_MAX, Integers, instance, integer, integers, shown
from pykvgraph.errors import InvalidArgumentError, KVGraphError, NotCopied
from pykvgraph.model.tokenizer import Tokenizer
from pykvgraph.params.biases import Biases
from pykvgraph.params.params import MAX_SEED, SamplingParams, ThoughtLimit, params_of
from pykvgraph.sampling.chain import (
    has_dry,
    has_grammar,
    is_greedy,
    is_greedy_behind_biases,
    is_plainly_greedy,
    n_remembered,
    new_chain,
    remember,
)
from pykvgraph.sampling.thought_limit import Thoughts

if TYPE_CHECKING:
    from pykvgraph.sampling.grammar import Grammar


def likeliest(row: npt.NDArray[np.floating[Any]], n: int) -> list[tuple[int, float]]:
    """The n tokens with the highest values, each with its value; the highest first, of equals the highest id.

    row: (n_vocab,). n may be more than the row has.
    """
    n = min(n, len(row))
    if not n:
        return []
    some = _some_with_the_highest(row, n)
    candidates = some[np.argpartition(row[some], len(some) - n)[len(some) - n :]]
    ordered = sorted(((float(row[token]), int(token)) for token in candidates), reverse=True)
    return [(token, value) for value, token in ordered]


_RUN = 64  # neighbouring tokens


def _some_with_the_highest(row: npt.NDArray[np.floating[Any]], n: int) -> npt.NDArray[np.intp]:
    """Tokens among which are the n with the highest values: all, or those of n runs and a few more.

    The n runs whose highest values are the highest have them. To find these runs takes a sixth of the time
    that it takes to look for n tokens in a large vocabulary.
    """
    n_runs = len(row) // _RUN
    if n_runs < 4 * n:
        return np.arange(len(row))
    highest = row[: n_runs * _RUN].reshape(n_runs, _RUN).max(axis=1)
    runs = np.argpartition(highest, n_runs - n)[n_runs - n :]
    tokens = runs[:, None] * _RUN + np.arange(_RUN)
    return np.concatenate([tokens.ravel(), np.arange(n_runs * _RUN, len(row))])


_MOST_TOKENS = 1 << 24  # of a vocabulary


class Sampler(NotCopied):
    """Chooses a token from its logits, as SamplingParams says, where the arguments are explained.

    temperature 0 (greedy): the likeliest token, the lowest id among equals. Above 0: libllama's samplers.
    Either way logit_bias and the grammar come first, then what `samplers` says, in its order, and a random
    draw. Penalties, DRY and grammar follow what this sampler has chosen so far, so it is for one
    text.

    seed: 0 to 2^32 - 2, or None for a random seed. tokenizer: what a grammar and DRY need. Threads may share
    a sampler; they then take turns, and share its random numbers. Raises InvalidArgumentError, which
    names the bad argument.
    """

    def __init__(
        self,
        temperature: float = SamplingParams.temperature,
        top_k: int = SamplingParams.top_k,
        top_p: float = SamplingParams.top_p,
        min_p: float = SamplingParams.min_p,
        seed: int | None = SamplingParams.seed,
        *,
        typical_p: float = SamplingParams.typical_p,
        top_n_sigma: float = SamplingParams.top_n_sigma,
        xtc_probability: float = SamplingParams.xtc_probability,
        xtc_threshold: float = SamplingParams.xtc_threshold,
        dynatemp_range: float = SamplingParams.dynatemp_range,
        dynatemp_exponent: float = SamplingParams.dynatemp_exponent,
        repeat_penalty: float = SamplingParams.repeat_penalty,
        frequency_penalty: float = SamplingParams.frequency_penalty,
        presence_penalty: float = SamplingParams.presence_penalty,
        penalty_last_n: int = SamplingParams.penalty_last_n,
        dry_multiplier: float = SamplingParams.dry_multiplier,
        dry_base: float = SamplingParams.dry_base,
        dry_allowed_length: int = SamplingParams.dry_allowed_length,
        dry_penalty_last_n: int = SamplingParams.dry_penalty_last_n,
        dry_sequence_breakers: Iterable[str] = SamplingParams.dry_sequence_breakers,
        mirostat: int = SamplingParams.mirostat,
        mirostat_tau: float = SamplingParams.mirostat_tau,
        mirostat_eta: float = SamplingParams.mirostat_eta,
        min_keep: int = SamplingParams.min_keep,
        samplers: Iterable[str] = SamplingParams.samplers,
        adaptive_target: float = SamplingParams.adaptive_target,
        adaptive_decay: float = SamplingParams.adaptive_decay,
        logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] = SamplingParams.logit_bias,
        grammar: str | None = SamplingParams.grammar,
        json_schema: str | Mapping[str, Any] | None = SamplingParams.json_schema,
        thoughts: ThoughtLimit | None = SamplingParams.thoughts,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._init(params_of(SamplingParams, locals()), tokenizer)

    @property
    def params(self) -> SamplingParams:
        """What it was made with."""
        return self._params

    @classmethod
    def of(cls, params: SamplingParams, tokenizer: Tokenizer | None) -> Sampler:
        """The sampler of a generation. Raises InvalidArgumentError."""
        instance(params, SamplingParams, "params")
        sampler = cls.__new__(cls)
        sampler._init(params, tokenizer)
        return sampler

    def _init(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self._params = params
        self._tokenizer = tokenizer
        self._seed = _random_seed() if params.seed is None else params.seed
        self._takes_best = is_plainly_greedy(params)
        self._takes_best_biased = is_greedy_behind_biases(params)
        self._thoughts = self._new_thoughts()
        # whether nobody but the likeliest token is ever chosen
        self.greedy = self._takes_best and self._thoughts is None
        # whether the chain must be told what was chosen
        self._n_remembered = n_remembered(params)
        adapts = params.adaptive_target >= 0
        self._follows = self._n_remembered > 0 or adapts
        self._prompt = np.empty(0, np.int32)
        self._chain: Handle | None = None
        self._grammar: Grammar | None = None
        self._candidates = np.empty(0, [("id", np.int32), ("logit", np.float32), ("p", np.float32)])
        self._fresh = self._candidates
        self._n_left = 0  # candidates behind all samplers, the first ones
        if not self.greedy:
            self._llama = libllama.low_level()
            # what is wrong is said now, and what takes long done
            if has_grammar(params):
                self._grammar = self._new_grammar()
            if has_dry(params):
                self._new_chain(0 if tokenizer is None else tokenizer.n_vocab)

    def begin(self, prompt: Integers) -> None:
        """What comes before the first token that it chooses: penalties and DRY look at that, too.

        prompt: token ids. Raises InvalidArgumentError.
        """
        prompt = integers(prompt, "prompt")
        self._prompt = prompt[max(len(prompt) - self._n_remembered, 0) :]
        if self._chain is not None:
            self._chain.call(remember, self._prompt)

    def ready(self, seconds: float) -> bool:
        """Whether sample() needn't wait for the grammar; waits so long for that. Raises as sample() does."""
        return self._grammar is None or self._grammar.ready(seconds)

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        """Chooses a token id; logits: float32 (n_vocab,).

        Raises InvalidArgumentError unless logits is a one-dimensional array of floats, and KVGraphError when
        a logit is NaN or the largest is infinite. Because of a grammar: InvalidArgumentError when it allows
        no token or takes too long (sampling.grammar.MOST_SECONDS), KVGraphError when it has no process.
        """
        if not isinstance(logits, np.ndarray) or logits.dtype.kind != "f":
            raise InvalidArgumentError(f"logits must be an array of floats, got {shown(logits)}")
        if logits.ndim != 1 or logits.size == 0:
            raise InvalidArgumentError(
                f"logits must be (n_vocab,), got shape {logits.shape}: take one row, as in ctx.logits()[-1]"
            )
        best = int(logits.argmax())  # NaN counts as the largest
        if not math.isfinite(logits[best]):
            raise KVGraphError(f"the logits are broken: {logits[best]} for token {best}")
        thoughts = self._thoughts
        due = None if thoughts is None else thoughts.due
        token = best if self._takes_best and due is None else self._draw(logits, due)
        if token is None and thoughts is not None and due is not None:
            thoughts.give_up()
            token = self._draw(logits, None)
        if token is None:
            raise InvalidArgumentError(
                "no token may follow: the grammar or logit_bias allows none of this vocabulary's tokens here"
            )
        if thoughts is not None:
            thoughts.accept(token)
        return token

    def follow(self, token: int, n_vocab: int) -> bool:
        """Goes on as if it had chosen this token; False: the grammar allows it not, and it was not chosen.

        Raises InvalidArgumentError.
        """
        n_vocab = integer(n_vocab, "n_vocab", 1, _MOST_TOKENS)
        token = integer(token, "token", 0, n_vocab - 1)
        if not self._takes_best and self._draw(np.zeros(n_vocab, np.float32), token) is None:
            return False
        if self._thoughts is not None:
            self._thoughts.accept(token)
        return True

    def allowed(self) -> npt.NDArray[np.bool_] | None:
        """bool (n_vocab of the tokenizer,): the tokens that the grammar allows now; None: there is none.

        Raises as sample() does because of a grammar.
        """
        return None if self._grammar is None else self._grammar.allowed()

    def take(self, token: int) -> None:
        """The grammar goes on behind this token, which it allows; nothing else hears of it."""
        if self._grammar is not None and not (self._tokenizer and self._tokenizer.is_eog(token)):
            self._grammar.accept(token)

    def drawn_with(self, token: int, n: int) -> tuple[float, list[tuple[int, float]]]:
        """The log probability that the last token was drawn with; the n likeliest tokens, each with its own.

        Of candidates that no sampler has left out. Raises InvalidArgumentError for a token that is none of
        them, as before the first one is chosen.
        """
        token, n = integer(token, "token", 0, INT32_MAX), integer(n, "n", 0, INT32_MAX)
        if is_greedy(self._params):
            return 0.0, [(token, 0.0)][:n]
        left = self._candidates[: self._n_left]
        left = left[left["p"] > 0]
        logprobs = np.log(left["p"])
        own = logprobs[left["id"] == token]
        if len(own) != 1:
            raise InvalidArgumentError(f"token {token} was not among those that the last one was drawn from")
        return float(own[0]), [(int(left["id"][place]), logprob) for place, logprob in likeliest(logprobs, n)]

    def _draw(self, logits: npt.NDArray[np.float32], due: int | None) -> int | None:
        """None: no token may be said; due: the only one that may."""
        if self._takes_best_biased and due is None:
            return self._best_biased(logits)
        if self._grammar is not None and self._tokenizer is not None:
            logits = logits[: self._tokenizer.n_vocab]  # a model may have more rows
        chain = self._chain or self._new_chain(len(logits))
        return chain.call(self._apply, logits, due)

    def _best_biased(self, logits: npt.NDArray[np.float32]) -> int | None:
        """The likeliest token behind logit_bias, the lowest id among equals; None: none is possible.

        libllama's chain takes a list of all candidates: for 49,152 tokens 0.55 ms, this 0.04.
        """
        assert isinstance(self._params.logit_bias, Biases)
        native = self._params.logit_bias.native
        native = native[native["token"] < len(logits)]
        with np.errstate(over="ignore", invalid="ignore"):  # of F64 beyond F32
            biased = logits.astype(np.float32)  # a copy
            biased[native["token"]] += native["bias"]
        biased[native["token"][native["bias"] == -math.inf]] = -math.inf
        best = int(biased.argmax())
        return None if biased[best] == -math.inf else best

    def copy(self) -> Sampler:
        """Another one, which goes on as this one does, with its random numbers and its memory of tokens."""
        other = Sampler.__new__(Sampler)
        other.__dict__.update(self.__dict__)
        other._candidates = np.empty(0, self._candidates.dtype)  # the first draw makes its own
        if self._chain is not None:
            clone, free = self._llama.llama_sampler_clone, self._llama.llama_sampler_free
            other._chain = Handle.own(self._chain.call, clone, free=free, name="sampler")
        other._grammar = None if self._grammar is None else self._grammar.copy()
        other._thoughts = None if self._thoughts is None else self._thoughts.copy()
        return other

    def _new_thoughts(self) -> Thoughts | None:
        limit = self._params.thoughts
        if limit is None:
            return None
        if self._tokenizer is None:
            raise InvalidArgumentError(
                "the marks of thoughts are texts: give the Sampler its tokenizer=model.tokenizer"
            )
        return Thoughts(limit, self._tokenizer)

    def _new_grammar(self) -> Grammar:
        if self._tokenizer is None:
            raise InvalidArgumentError(
                "a grammar is about text: give the Sampler its tokenizer=model.tokenizer"
            )
        with importing:
            from pykvgraph.sampling.rules import rules_of
        return rules_of(self._params, self._tokenizer)

    def _new_chain(self, n_vocab: int) -> Handle:
        free = self._llama.llama_sampler_free
        arguments = self._params, self._seed, n_vocab, self._tokenizer
        self._chain = Handle.own(new_chain, *arguments, free=free, name="sampler")
        self._chain.call(remember, self._prompt)
        return self._chain

    def _apply(self, chain: int, logits: npt.NDArray[np.float32], due: int | None) -> int | None:
        llama = self._llama
        if len(self._candidates) != len(logits):
            self._fresh = np.zeros(len(logits), self._candidates.dtype)
            self._fresh["id"] = np.arange(len(logits))
            self._candidates = np.empty_like(self._fresh)
            self._data = self._candidates.ctypes.data_as(ctypes.POINTER(llama.llama_token_data))
        # samplers reorder them, so they are new for each draw
        self._candidates[:] = self._fresh
        self._candidates["logit"] = logits
        if self._grammar is not None:
            self._candidates["logit"][~self._grammar.allowed()] = -math.inf
        if due is not None:  # the samplers see it chosen, unless the grammar refuses it
            self._candidates["logit"][self._candidates["id"] != due] = -math.inf
        array = llama.llama_token_data_array(data=self._data, size=len(logits), selected=-1, sorted=False)
        llama.llama_sampler_apply(chain, ctypes.byref(array))
        if not 0 <= array.selected < array.size:
            raise KVGraphError(f"libllama's sampler chose candidate {array.selected} of {array.size}")
        self._n_left = array.size
        found = array.data[array.selected]
        if found.logit == -math.inf:
            return None
        if self._follows:
            llama.llama_sampler_accept(chain, found.id)
        self.take(int(found.id))
        return int(found.id)


def _random_seed() -> int:
    return int.from_bytes(os.urandom(8), "little") % (MAX_SEED + 1)
