"""What all endpoints share: the engine, once it is there, and who is answered."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import logging
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from pykvgraph.engine import Engine, Window
from pykvgraph.engine.types import Pin
from pykvgraph.errors import InvalidArgumentError, UnsupportedError
from pykvgraph.openai.errors import invalid, loading, no_room, too_many, unavailable
from pykvgraph.openai.vocabulary import Vocabulary
from pykvgraph.params.params import SamplingParams
from pykvgraph.sampling.sampler import Sampler
from pykvgraph.server.adapter_scales import AdapterScales
from pykvgraph.server.http.asker import Asker
from pykvgraph.server.http.body import Bodies
from pykvgraph.server.job import Job
from pykvgraph.server.looks import Looks
from pykvgraph.server.metrics import Metrics
from pykvgraph.server.requests.cache_control import retention_of
from pykvgraph.server.requests.chat_template import ServerTemplate
from pykvgraph.server.requests.fields import Fields
from pykvgraph.server.requests.sampling import sampling_of, settings_of, wants_probs
from pykvgraph.server.settings import CACHE_EDITS, Settings
from pykvgraph.server.slots import Slots, Text
from pykvgraph.server.slow_work import SlowWork
from pykvgraph.tiers.peers import Peers
from pykvgraph.types import Piece

_log = logging.getLogger("pykvgraph.server")
_MOST_BIASES = 1 << 20  # of all samples of a body; each has its own, and tells them
_RULES = ("grammar", "json_schema")
# llama-server's begins with its number of builds, and clients look for the b
FINGERPRINT = f"b{importlib.metadata.version('pykvgraph')}-pykvgraph"


class Service:
    """One engine and its settings. Until ready() the engine isn't there, and asking for it is an error."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.slots = Slots(settings.n_slots, settings.spec_type != "none", settings.first_slot)
        self.metrics = Metrics(self.slots, lambda: self.engine if self.is_ready else None)
        self.looks = Looks(lambda: self.engine.look(), self.model_name)
        self.slow_work = SlowWork()
        self.bodies = Bodies(settings.max_body, settings.body_seconds)
        self.peers: Peers | None = None  # of a worker
        # a router hears of its requests that they are read now, True, or have been read
        self.tell_reading: Callable[[str, bool], None] = lambda name, begins: None
        # the engine embeds, or scores, one text at a time: who waits for that takes no thread from others
        self.embedder = ThreadPoolExecutor(1, "pykvgraph embedder")
        self._engine: Engine | None = None

    def ready(self, engine: Engine) -> None:
        """The engine is there. Raises what the chat template, a grammar and logit_bias raise.

        InvalidArgumentError for a context that has no room for the server's windows.
        UnsupportedError for a model that is no reranker, where that is what is to be served.
        """
        self.vocabulary = Vocabulary(engine.model)
        self.template = ServerTemplate(
            self.settings.chat_template, engine.model, self.vocabulary, self.settings.jinja
        )
        self.adapters = AdapterScales(engine.adapters)
        self._check_defaults()
        if self.settings.pooling == "rank" and not engine.model.n_classes:
            raise UnsupportedError(f"--reranking: {engine.model.path} is no reranker: it has no classifier")
        self._require_window(engine)
        self._engine = engine
        if self.settings.context_shift and not engine.can_shift:
            _log.warning("--context-shift: this model's cache can't be shifted; answers end when it is full")

    def _require_window(self, engine: Engine) -> None:
        """Every request would be refused for a context that is too small to go on in."""
        if self.settings.context_shift and engine.can_shift:
            try:
                Window(self._n_ctx_of(engine), forget=self.settings.forget or None)
            except InvalidArgumentError as error:
                option = "--forget" if self.settings.forget else "--context-shift"
                raise InvalidArgumentError(
                    f"{option}: of each request {error}: give a larger -c, or fewer slots (-np)"
                ) from None

    def _check_defaults(self) -> None:
        """What every request would be refused for, or a token that nobody has."""
        n_vocab, defaults = self.vocabulary.n_vocab, self.settings.defaults
        missing = [token for token, _ in defaults.get("logit_bias", ()) if token >= n_vocab]
        if missing:
            raise InvalidArgumentError(f"--logit-bias: {missing[0]} is no token of this model's {n_vocab}")
        if any(name in defaults for name in _RULES):
            Sampler.of(self.sampling(Fields({})), self.vocabulary.tokenizer)

    @property
    def is_ready(self) -> bool:
        """Whether the engine is there."""
        return self._engine is not None

    def close(self) -> None:
        """Ends the engine, if it is there."""
        self.slow_work.close()
        if self.peers is not None:
            self.peers.close()
        self.embedder.shutdown(wait=False, cancel_futures=True)
        if self._engine is not None:
            self._engine.close()

    @property
    def engine(self) -> Engine:
        """Raises WireError while the model is loaded, and when the engine has ended."""
        if self._engine is None:
            raise loading()
        if self._engine.closed:
            raise unavailable("the engine has ended: start the server again")
        return self._engine

    @property
    def model_name(self) -> str:
        """As answers tell it."""
        return self.settings.aliases[0] if self.settings.aliases else self.settings.model_path

    @property
    def n_ctx(self) -> int:
        """The most tokens of a prompt with its answer."""
        return self._n_ctx_of(self.engine)

    def _n_ctx_of(self, engine: Engine) -> int:
        n_cells = engine.context.n_ctx
        return min(self.settings.n_ctx_slot or n_cells, n_cells, engine.model.n_ctx_train)

    @property
    def most_of_prompt(self) -> int | None:
        """The most tokens of a prompt; None: of a longer one tokens are forgotten while it is read."""
        return None if self.settings.forget and self._shifts else self.n_ctx

    @property
    def _shifts(self) -> bool:
        """Whether an answer that has filled its context goes on."""
        return self.settings.context_shift and self.engine.can_shift

    def require_read(self, prompt: Sequence[int]) -> None:
        """Raises WireError for a text that is too long to be embedded or scored.

        An encoder reads a text by one decode.
        """
        n_batch = self.engine.context.n_batch
        if self.engine.model.encodes and n_batch < len(prompt):
            raise no_room(len(prompt), min(n_batch, self.n_ctx), mend="a larger -b and -c")
        if len(prompt) > self.n_ctx:
            raise no_room(len(prompt), self.n_ctx)

    def sampling(self, fields: Fields) -> SamplingParams:
        """How a body wants its answer sampled. Raises WireError and InvalidArgumentError."""
        whole = self._whole(fields)
        params = sampling_of(whole, self.vocabulary, self.settings.n_slots, self.settings.n_predict)
        return dataclasses.replace(params, special=True) if self.settings.special else params

    def _whole(self, fields: Fields) -> Fields:
        """A body, and the server's defaults. A grammar or a schema takes the place of the server's own."""
        defaults = self.settings.defaults
        if any(name in fields for name in _RULES):
            defaults = {name: value for name, value in defaults.items() if name not in _RULES}
        return fields.over(defaults)

    def tells_probs(self, fields: Fields) -> bool:
        """Whether the answer to a body has the probability of each token. Raises WireError."""
        return wants_probs(self._whole(fields))

    def told(self, params: SamplingParams, fields: Fields) -> dict[str, Any]:
        """What llama-server tells of how the answer to a body is made."""
        told = {"speculative.types": self.settings.spec_type}
        return settings_of(params) | told | {"ignore_eos": self._whole(fields).flag("ignore_eos")}

    def job(
        self,
        prompts: list[list[int]],
        fields: Fields,
        asker: Asker,
        params: SamplingParams | None = None,
        pins: Sequence[Pin] = (),
        hears_progress: bool = False,
        **told: Any,
    ) -> Job:
        """A job for the engine; from any thread. told: settings that the sampling doesn't have.

        pins, hears_progress: as Job has them; nothing is pinned where nothing is cached.
        Raises WireError, and what Engine.submit() raises.
        """
        engine = self.engine
        params = params or self.sampling(fields)
        if asker.only_reads:
            params = dataclasses.replace(params, max_tokens=1, n=1)
        self.require_few(len(prompts), params)
        adapters = self.adapters.of(fields)
        told = {"lora": fields.array("lora"), **told}
        told = {"stream": fields.flag("stream"), **told}
        keeps = {
            "n_keep": fields.integer("n_keep", self.settings.n_keep, -1),
            "n_discard": fields.integer("n_discard", 0, 0),
        }
        slot, salt = self._slot(fields), self.salt(fields, asker.key)
        return Job(
            engine,
            self.slots,
            prompts,
            params,
            self.told(params, fields) | told | keeps,
            n_ctx=self.n_ctx,
            salt=salt,
            edit=self._edit(fields),
            compressed=fields.flag("cache_compressed"),
            session=fields.text("session") or fields.text("prompt_cache_key"),
            adapters=adapters,
            slot=slot,
            edited=self._edited(slot, prompts, salt),
            windows=self._windows(prompts, **keeps) if params.n == 1 else (),
            on_end=self.metrics.add,
            copies=self.peers.at(asker.copy_to) if self.peers and asker.copy_to else None,
            only_reads=asker.only_reads,
            tells=asker.tells,
            tells_probs=self.tells_probs(fields),
            said=asker.said,
            as_told=self._with_end if self.settings.special else None,
            tells_progress=fields.flag("return_progress") and fields.flag("stream"),
            hears_progress=hears_progress,
            pins=self._pins(prompts, fields, asker, pins),
        )

    def _edit(self, fields: Fields) -> Literal["exact", "approximate"]:
        """Whether the prompts may be earlier ones with other tokens in their midst."""
        own = self.settings.cache_edit
        wanted = fields.choice("cache_edit", own, CACHE_EDITS)
        if wanted == "approximate" and own == "off":
            raise invalid("Field 'cache_edit': this server was started with --cache-edit off")
        return "approximate" if wanted == "approximate" else "exact"

    def _edited(self, slot: int, prompts: list[list[int]], salt: bytes) -> Text | None:
        """The text of the slot that a body names, if it was edited and a single prompt goes on from it."""
        if slot < 0 or len(prompts) > 1:
            return None
        text = self.slots.last_text(slot)
        return text if text.has_begun(prompts[0], salt) else None

    def _pins(self, prompts: list[list[int]], fields: Fields, asker: Asker, pins: Sequence[Pin]) -> list[Pin]:
        """With that of the whole prompt, if a body of OpenAI's interface wants it."""
        seconds = retention_of(fields)
        of_all = [Pin(max(map(len, prompts)), seconds)] if seconds else []
        is_cached = fields.flag("cache_prompt", self.settings.cache_prompt) and not asker.only_reads
        return [*pins, *of_all] if is_cached else []

    def require_few(self, n_prompts: int, params: SamplingParams) -> None:
        """Raises WireError for more answers, or biases of all of them, than a body may ask for."""
        n, n_biases, most = n_prompts * params.n, len(tuple(params.logit_bias)), self.settings.max_prompts
        if n > most:
            raise too_many(f"{n_prompts} prompts with {params.n} answers each are {n}", most)
        if n > 1 and n * n_biases > _MOST_BIASES:
            raise invalid(
                f"Field 'logit_bias': {n_biases} tokens for each of {n} answers are over {_MOST_BIASES}: "
                "send fewer prompts in a body"
            )

    def _with_end(self, piece: Piece) -> Piece:
        """A piece; the token that ends a text adds its name, too."""
        tokenizer = self.vocabulary.tokenizer
        if piece.token >= tokenizer.n_vocab or not tokenizer.is_eog(piece.token):
            return piece
        return dataclasses.replace(piece, text=piece.text + self.vocabulary.text([piece.token]))

    def _slot(self, fields: Fields) -> int:
        ids = self.slots.ids
        slot = fields.integer("id_slot", -1, -1, ids[-1])
        if slot not in (-1, *ids):
            raise invalid(f"id_slot must be -1, or from {ids[0]} to {ids[-1]}, got {slot}")
        return slot

    def _windows(self, prompts: list[list[int]], n_keep: int, n_discard: int) -> list[Window]:
        """How the answers go on when they have filled their context; none where they end then."""
        if not self._shifts:
            return []
        n_front = int(self.vocabulary.adds_bos)

        def n_kept(prompt: list[int]) -> int:
            if len(prompt) < self.n_ctx:
                return len(prompt) if n_keep < 0 else n_keep
            return min(max(n_keep, 0), self.n_ctx // 2)  # the rest is read in what is left

        forget = self.settings.forget or None
        return [Window(self.n_ctx, n_kept(prompt) + n_front, n_discard, forget) for prompt in prompts]

    def salt(self, fields: Fields, key: bytes) -> bytes:
        """Who shares prefixes: requests under the same key; nobody, when a request wants none cached."""
        if not fields.flag("cache_prompt", self.settings.cache_prompt):
            return secrets.token_bytes(16)
        return salt_of(key)


@functools.lru_cache(maxsize=1024)
def salt_of(key: bytes) -> bytes:
    """Under which the prefixes of those are shared who have this API key; b"": there are no keys."""
    return hashlib.sha256(key).digest() if key else b""
