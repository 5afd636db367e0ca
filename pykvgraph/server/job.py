"""What a body asks of the engine: a text behind each of its prompts, or several."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Literal

from pykvgraph.engine import Engine, Request, Window
from pykvgraph.engine.listener import RequestListener
from pykvgraph.engine.types import Pin, PromptProgress
from pykvgraph.model.adapter import Active
from pykvgraph.openai.errors import no_room, unavailable
from pykvgraph.openai.form import MANY_PROBS
from pykvgraph.openai.sample import Sample
from pykvgraph.params.params import SamplingParams
from pykvgraph.server.requests.sampling import n_predict_of
from pykvgraph.server.slots import Slots, Text
from pykvgraph.tiers.peer import Peer
from pykvgraph.types import Piece

_COPY_SECONDS = 30.0  # in which the last copies must have come
# Prompts, at least, that the engine has at a time: the rest of a long list costs nothing if its client
# leaves, and keeps nobody waiting who comes later.
_AHEAD = 32
# no pieces: the sample has ended; None: more of its prompt is decoded
Said = tuple[Sample, list[Piece] | None]


class Job:
    """Its samples, and the engine's requests that answer them.

    The engine gets the first prompts at once, and each of the others when an answer has ended. Raises
    WireError when a prompt doesn't fit, and what Engine.submit() raises; nothing runs then.
    """

    def __init__(
        self,
        engine: Engine,
        slots: Slots,
        prompts: list[list[int]],
        params: SamplingParams,
        settings: dict[str, Any],
        *,
        n_ctx: int,
        salt: bytes = b"",
        edit: Literal["exact", "approximate"] = "exact",
        compressed: bool = False,
        session: str = "",
        adapters: Active = (),
        slot: int = -1,
        windows: Sequence[Window | None] = (),
        on_end: Callable[[Sample], None] = lambda sample: None,
        copies: Peer | None = None,
        only_reads: bool = False,
        tells: bool = False,
        tells_probs: bool = False,
        said: Sequence[int] = (),
        as_told: Callable[[Piece], Piece] | None = None,
        tells_progress: bool = False,
        hears_progress: bool = False,
        pins: Sequence[Pin] = (),
        edited: Text | None = None,
    ) -> None:
        """n_ctx: the most tokens of a prompt with its answer. settings: how it is sampled, to be told.

        edit, compressed, session: as Engine.submit() takes them. slot: the one that is wanted; -1: any.
        windows: of each prompt; none: answers end when n_ctx is full. A prompt that is longer needs one that
        forgets. copies: gets what is decoded.
        only_reads: the job has ended when that has come there. tells, said: as an Asker's; of a job with
        several samples, or with windows, tokens are neither told nor known. as_told: what becomes of each
        piece; None: it stays as it is. tells_progress: also how far prompts are. hears_progress: the samples
        know that before their first token. pins: of each prompt. edited: the text of a slot, whose cells the
        prompt goes on from.
        """
        self._slots = slots
        self._on_end = on_end
        self._as_told = as_told
        self._tells_progress = tells_progress
        self._hears_progress = tells_progress or hears_progress
        self._awaited = copies if only_reads else None
        is_single = len(prompts) == params.n == 1 and not any(windows)
        self.tells = tells and is_single
        # is told of each sample that has ended, unless its prompt has others
        self.then: Callable[[Sample], object] = lambda sample: None
        self._requests: list[Request] = []
        self.samples = [
            Sample(
                index=i * params.n + j,
                prompt=prompt,
                n_predict=n_predict_of(params),
                settings=settings,
                number=i,
                tells_probs=tells_probs,
                n_probs=params.top_logprobs,
                wanted_slot=slot if j == 0 else -1,
                salt=salt,
                adapters=adapters,
                edits=edited.edits if edited else b"",
                n_exact=edited.n_exact if edited else 0,
            )
            for i, prompt in enumerate(prompts)
            for j in range(params.n)
        ]
        for number, prompt in enumerate(prompts):
            window = windows[number] if windows else None
            if len(prompt) >= n_ctx and (window is None or window.forget is None):
                raise no_room(len(prompt), n_ctx)
        self._n_prompts, self._n = len(prompts), params.n
        own: dict[int, SamplingParams] = {}  # by max_tokens: it takes a while to check one

        def submit(number: int) -> Request:
            prompt, window = prompts[number], windows[number] if windows else None
            most = min(n_ctx - len(prompt), (engine.context.n_ctx - len(prompt)) // params.n_seqs + 1)
            n_most = params.max_tokens if window else min(params.max_tokens, most)
            for sample in self._samples_of(number):
                sample.n_most = n_most
            if n_most not in own:
                own[n_most] = dataclasses.replace(params, max_tokens=n_most)
            return engine.submit(
                prompt,
                own[n_most],
                salt=edited.salt_of_cells if edited else salt,
                edit=edit,
                compressed=compressed,
                session=session,
                window=window,
                adapters=adapters,
                copies=copies,
                said=said if is_single else (),
                pins=[pin._replace(n_tokens=min(pin.n_tokens, len(prompt))) for pin in pins],
            )

        def prepare(ids: Sequence[int], old: Sequence[int]) -> None:
            own_salt = edited.salt_of_cells if edited else salt
            engine.prepare(ids, instead_of=old, salt=own_salt, edit=edit, session=session, adapters=adapters)

        self._submit, self.prepare = submit, prepare
        try:
            for number in range(min(self._n_prompts, max(_AHEAD, 2 * slots.n))):
                self._requests.append(submit(number))
        except BaseException:
            self.cancel()
            raise

    def enter(self) -> None:
        """Its samples get slots, or wait for them; in the event loop's thread."""
        for sample in self.samples:
            self._slots.enter(sample)

    def cancel(self) -> None:
        """Ends what still runs, within a step of the engine."""
        for request in self._requests:
            request.cancel()
        for sample in self.samples:
            self._slots.leave(sample)

    async def said(self) -> AsyncIterator[Said]:
        """What is said, as it comes. Raises what ends a request, and what Engine.submit() raises."""
        listener = RequestListener(self._requests, hears_progress=self._hears_progress)
        async for number, pieces in listener.bunches():
            samples = self._samples_of(number)
            if isinstance(pieces, PromptProgress):
                samples[0].advance(pieces)  # the others wait for its prompt
                if self._tells_progress:
                    yield samples[0], None
                continue
            if not pieces:
                await self._end(self._requests[number], samples)
                if len(self._requests) < self._n_prompts:
                    self._requests.append(self._submit(len(self._requests)))
                    listener.add(self._requests[-1])
            if self._as_told is not None:
                pieces = list(map(self._as_told, pieces))
            for i, sample in enumerate(samples):
                own = pieces if self._n == 1 else [piece for piece in pieces if piece.seq == i]
                for part in _parts(own, sample.n_probs):
                    sample.add(part)
                    yield sample, part
                    if len(part) < len(own):
                        await asyncio.sleep(0)
                if not pieces:
                    yield sample, []

    def _samples_of(self, number: int) -> list[Sample]:
        """Of a prompt."""
        return self.samples[number * self._n : (number + 1) * self._n]

    async def _end(self, request: Request, samples: list[Sample]) -> None:
        """Each of the request's samples has ended."""
        if self._awaited is not None:
            await asyncio.to_thread(self._awaited.flush, _COPY_SECONDS)
        for sample, completion in zip(samples, request.results(), strict=True):
            if completion.finish_reason == "cancelled":
                raise unavailable("the server stops")
            sample.finish(completion)
            self._slots.leave(sample)
            self._on_end(sample)
        if len(samples) == 1:
            self.then(samples[0])


def _parts(pieces: list[Piece], n_probs: int) -> Iterator[list[Piece]]:
    """The pieces, so many at a time as may be told at once."""
    n = max(MANY_PROBS // n_probs, 1) if n_probs else max(len(pieces), 1)
    return (pieces[i : i + n] for i in range(0, len(pieces), n))
