"""Texts whose blocks go to another engine as they are decoded: it has them without decoding."""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import chance
from support.soak import F32, are_likeliest

import pykvgraph as kvg
from pykvgraph.prefix import block
from pykvgraph.tiers.peer import Peer
from pykvgraph.tiers.peer_receiver import PeerReceiver
from pykvgraph.tiers.peers import Peers
from pykvgraph.tiers.record import FIXED_BYTES, MAGIC, Name, Record, pack

pytestmark = pytest.mark.usefixtures("decoding_is_slow")
TALK = kvg.SamplingParams(max_tokens=40, temperature=0)
READ = kvg.SamplingParams(max_tokens=1, temperature=0)


def ids_of(model: kvg.Model, n: int, seed: int) -> list[int]:
    rng = random.Random(chance.seed(seed))
    return [rng.randrange(model.n_vocab) for _ in range(n)]


def engine_of(model: kvg.Model, tiers: kvg.Tiers | None, **options: Any) -> kvg.Engine:
    return kvg.Engine(model, n_ctx=512, n_seq_max=2, tiers=tiers, **F32, **options)


@contextmanager
def two_engines(model: kvg.Model, folder: Path) -> Iterator[tuple[kvg.Engine, kvg.Engine, Peer]]:
    """An engine, another one, and the way from the one to the other."""
    token, tiers = secrets.token_hex(32), kvg.Tiers("64M")
    with engine_of(model, tiers) as one, engine_of(model, tiers) as other:
        receiver = PeerReceiver(
            f"unix:{folder / 'records'}", token, other.most_record_bytes, other.take_record
        )
        peers = Peers(token)
        try:
            yield one, other, peers.at(receiver.address)
        finally:
            peers.close()
            receiver.close()


def loaded(engine: kvg.Engine) -> int:
    stats = engine.stats().tiers
    assert stats is not None
    assert not any(stats.misses.values()), stats
    return stats.loaded_tokens


@pytest.mark.parametrize("n_prompt", [40, 150, 224])
def test_a_prompt_read_by_one_engine_is_not_decoded_by_another(
    model: kvg.Model, tmp_path: Path, n_prompt: int
) -> None:
    prompt = ids_of(model, n_prompt, n_prompt)
    with two_engines(model, tmp_path) as (one, other, peer):
        one.submit(prompt, READ, copies=peer).result()
        assert peer.flush(10)
        answer = other.submit(prompt, TALK).result()
        assert (answer.n_cached, loaded(other)) == (n_prompt - 1, n_prompt - 1)
    assert are_likeliest(model, prompt, answer.tokens)


def test_what_was_said_is_there_too(model: kvg.Model, tmp_path: Path) -> None:
    """While it talks: all but the last tokens, as a block goes when it is whole."""
    prompt = ids_of(model, 100, 1)
    tokenizer = model.tokenizer
    endless = {token: -math.inf for token in range(tokenizer.n_vocab) if tokenizer.is_eog(token)}
    params = kvg.SamplingParams(max_tokens=400, temperature=0, logit_bias=endless)
    with two_engines(model, tmp_path) as (one, other, peer):
        pieces = one.submit(prompt, params, copies=peer)
        text = prompt + [piece.token for piece, _ in zip(pieces, range(100), strict=False)]
        assert peer.flush(10)
        answer = other.submit([*text, *ids_of(model, 5, 2)], TALK).result()
        pieces.cancel()
        # states are kept at every 64th position, and blocks of 32 tokens: the text had 199 or more
        assert answer.n_cached >= 192, answer
        assert loaded(other) == answer.n_cached


def test_a_prefix_that_was_cached_goes_too(model: kvg.Model, tmp_path: Path) -> None:
    """The engine decodes only the second half; the other one gets all of it."""
    prompt = ids_of(model, 192, 3)
    with two_engines(model, tmp_path) as (one, other, peer):
        one.submit(prompt[:129], READ).result()
        assert one.submit(prompt, READ, copies=peer).result().n_cached >= 128
        assert peer.flush(10)
        assert other.submit(prompt, READ).result().n_cached == 191


def test_other_salts_find_nothing(model: kvg.Model, tmp_path: Path) -> None:
    prompt = ids_of(model, 100, 4)
    with two_engines(model, tmp_path) as (one, other, peer):
        one.submit(prompt, READ, salt="mine", copies=peer).result()
        assert peer.flush(10)
        assert other.submit(prompt, READ).result().n_cached == 0
        assert other.submit(prompt, READ, salt="mine").result().n_cached == 99


def test_who_is_gone_changes_nothing(model: kvg.Model, tmp_path: Path, caplog: Any) -> None:
    prompt, peers = ids_of(model, 100, 5), Peers("token")
    with engine_of(model, kvg.Tiers("64M")) as engine:
        peer = peers.at(f"unix:{tmp_path / 'nobody'}")
        answer = engine.submit(prompt, TALK, copies=peer).result()
        assert not peer.flush(10)
        assert "copies of texts can't be sent" in caplog.text
    assert are_likeliest(model, prompt, answer.tokens)


def test_a_damaged_copy_is_decoded_instead(model: kvg.Model) -> None:
    prompt = ids_of(model, 100, 6)
    records = []

    class Kept:
        def save(self, name: Any, n_bytes: int, make: Any) -> None:
            records.append(make())

    with engine_of(model, kvg.Tiers("64M")) as one, engine_of(model, kvg.Tiers("64M")) as other:
        one.submit(prompt, READ, copies=Kept()).result()
        for record in records:
            rows = bytearray(record.rows)
            rows[-1] ^= 1
            other.take_record(record._replace(rows=bytes(rows)))
        answer = other.submit(prompt, TALK).result()
        stats = other.stats().tiers
        assert stats is not None
        assert (answer.n_cached, stats.misses["damaged"]) == (0, 1)
    assert are_likeliest(model, prompt, answer.tokens)


def test_without_tiers_it_says_so(model: kvg.Model) -> None:
    with engine_of(model, None) as engine:
        with pytest.raises(kvg.UnsupportedError, match="tiers=Tiers"):
            engine.submit([1, 2, 3], READ, copies=Peer(lambda: pytest.fail("nothing is sent")))
        with pytest.raises(kvg.UnsupportedError, match="tiers=Tiers"):
            engine.most_record_bytes  # noqa: B018


SAMPLINGS = [
    kvg.SamplingParams(max_tokens=40, temperature=0),
    kvg.SamplingParams(max_tokens=40, temperature=0, repeat_penalty=1.3, logit_bias={5: 2.0}),
    kvg.SamplingParams(max_tokens=40, temperature=0, grammar="root ::= [a-z ] root"),  # which never ends
]


@pytest.mark.parametrize("params", SAMPLINGS, ids=["greedy", "penalties", "grammar"])
@pytest.mark.parametrize("n_said", [1, 17, 39, 40])
def test_an_answer_goes_on_behind_what_is_known(
    model: kvg.Model, params: kvg.SamplingParams, n_said: int
) -> None:
    """All pieces come again, and what follows is what would have followed."""
    prompt = ids_of(model, 50, 7)
    with engine_of(model, None) as engine:
        whole = engine.submit(prompt, params).result()
    with engine_of(model, None) as engine:
        request = engine.submit(prompt, params, said=whole.tokens[:n_said])
        pieces = list(request)
        answer, stats = request.result(), engine.stats()
    assert [piece.token for piece in pieces] == [*whole.tokens]
    assert (answer.tokens, answer.text, answer.n_said) == (whole.tokens, whole.text, 40)
    assert answer.finish_reason == "length"
    # what is known is decoded with the prompt, and the last token never
    assert stats.decoded_tokens == (0 if n_said == 40 else 50 + 39)
    assert stats.steps <= 40 - n_said + 3


def test_known_tokens_that_the_grammar_refuses_are_chosen_anew(model: kvg.Model) -> None:
    params = kvg.SamplingParams(max_tokens=8, temperature=0, grammar="root ::= [a-z]+")
    prompt = ids_of(model, 20, 8)
    with engine_of(model, None) as engine:
        whole = engine.submit(prompt, params).result()
        wrong = next(token for token in range(model.n_vocab) if model.tokenizer.decode([token]) == "#")
        answer = engine.submit(prompt, params, said=[*whole.tokens[:3], wrong]).result()
    assert answer.tokens == whole.tokens


def test_a_known_token_may_end_the_answer(model: kvg.Model) -> None:
    eos = model.tokenizer.eos
    assert eos is not None
    with engine_of(model, None) as engine:
        answer = engine.submit([5, 6, 7], TALK, said=[9, 10, eos, 11]).result()
        assert (answer.finish_reason, answer.tokens) == ("stop", (9, 10))
        assert engine.stats().steps == 0


def test_what_can_not_be_known(model: kvg.Model) -> None:
    two = kvg.SamplingParams(max_tokens=4, n=2)
    with engine_of(model, None) as engine:
        with pytest.raises(kvg.InvalidArgumentError, match="said: it is for one sample"):
            engine.submit([1, 2], two, said=[3])
        for wrong in ([-1], [model.n_vocab], ["a"]):
            with pytest.raises(kvg.InvalidArgumentError, match="said"):
                engine.submit([1, 2], TALK, said=wrong)  # type: ignore[arg-type]


class Broken:
    """Gets copies, and can't."""

    def save(self, *_: object) -> None:
        raise ValueError("no room")


def test_whoever_gets_copies_and_fails_harms_nobody(
    model: kvg.Model, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = ids_of(model, 100, 3)
    with engine_of(model, kvg.Tiers("64M")) as engine:
        with pytest.raises(kvg.InvalidArgumentError, match="copies"):
            engine.submit(prompt, TALK, copies=5)  # type: ignore[arg-type]
        other = engine.submit(ids_of(model, 60, 4), TALK)
        answer = engine.submit(prompt, TALK, copies=Broken()).result()
        assert len(other.result().tokens) == 40
    assert are_likeliest(model, prompt, answer.tokens)
    assert caplog.text.count("no room") == 1


@pytest.mark.parametrize("record", [None, 5, b"x", Record(b"front", None), Record("front", b"rows")])  # type: ignore[arg-type]
def test_what_is_no_record_is_refused(model: kvg.Model, record: Any) -> None:
    with engine_of(model, kvg.Tiers("64M")) as engine, pytest.raises(kvg.InvalidArgumentError, match="ecord"):
        engine.take_record(record)


@pytest.mark.parametrize(("kind", "n_tokens"), [(b"\7", 32), (block.TOKENS, 31)])
def test_records_that_nobody_can_keep(model: kvg.Model, tmp_path: Path, kind: bytes, n_tokens: int) -> None:
    """They are left out; what is kept later goes to the disk as ever."""
    good = pack(Name(block.TOKENS, bytes(32), bytes(128), 0), b"rows")
    wrong = bytearray(good.header)
    at = wrong.index(block.TOKENS, len(MAGIC))
    wrong[at : at + 1] = kind
    wrong = wrong[:FIXED_BYTES] + bytes(4 * n_tokens) if kind == block.TOKENS else wrong
    with engine_of(model, kvg.Tiers("64M", disk="64M", path=tmp_path)) as engine:
        engine.take_record(Record(bytes(wrong), b"rows"))
        engine.take_record(good)
        end = time.monotonic() + 10
        while not list(tmp_path.rglob("*.block")) and time.monotonic() < end:
            time.sleep(0.01)
    assert len(list(tmp_path.rglob("*.block"))) == 1
