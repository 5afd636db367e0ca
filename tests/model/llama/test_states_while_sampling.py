"""A state that is saved in the midst of a sampled text goes on with the tokens that the text went on with."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest

import pykvgraph as kvg

WAYS: dict[str, dict[str, Any]] = {
    "temperature": {"temp": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "the defaults": {},
    "penalties": {"temp": 1.0, "repeat_penalty": 1.5, "frequency_penalty": 0.5},
    "mirostat 1": {"mirostat_mode": 1, "temp": 1.2},
    "mirostat 2": {"mirostat_mode": 2, "temp": 1.2},
    "grammar": {"temp": 1.5, "grammar": 'root ::= ("a" | "b" | "c" | " "){60}'},
    "greedy": {"temp": 0.0},
}


def begun(llm: kvg.Llama, n: int, way: dict[str, Any]) -> tuple[Any, list[int]]:
    """A generation after its first n tokens, and these."""
    generator = llm.generate(llm.tokenize(b"Once upon"), **way)
    return generator, list(itertools.islice(generator, n))


@pytest.mark.parametrize("way", WAYS)
def test_it_goes_on_alike(llm: kvg.Llama, way: str) -> None:
    llm.set_seed(5)
    generator, _ = begun(llm, 12, WAYS[way])
    state = llm.save_state()
    rest = list(itertools.islice(generator, 20))
    for _ in range(2):
        llm.load_state(state)
        assert list(itertools.islice(llm.generate([], reset=False, **WAYS[way]), 20)) == rest
    if way != "greedy":  # the first tokens of the seed are others
        llm.load_state(state)
        llm.set_seed(5)
        assert list(itertools.islice(llm.generate([], reset=False, **WAYS[way]), 20)) != rest


def test_a_seed_of_chance(llm: kvg.Llama, stories: Path) -> None:
    """In another Llama, when the first one is closed, whose vocabulary a grammar reads."""
    for way in (WAYS["temperature"], WAYS["grammar"]):
        with kvg.Llama(str(stories), n_ctx=128) as first:
            generator, _ = begun(first, 8, way)
            state = first.save_state()
            rest = list(itertools.islice(generator, 20))
            generator.close()
        del first, generator
        llm.load_state(state)
        assert list(itertools.islice(llm.generate([], reset=False, **way), 20)) == rest


def test_in_the_midst_of_a_stream(llm: kvg.Llama) -> None:
    """What create_completion streams is a generation, too."""
    stream: Any = llm("Once upon", max_tokens=30, temperature=1.5, seed=3, stream=True)
    for _ in range(5):
        next(stream)
    state = llm.save_state()
    rest = "".join(chunk["choices"][0]["text"] for chunk in stream)
    llm.load_state(state)
    more = itertools.islice(llm.generate([], reset=False, temp=1.5), 30)
    assert len(rest) > 20
    assert b"".join(map(llm._vocabulary.piece, more)).decode("utf-8", "ignore").startswith(rest)


def test_a_state_of_a_state(llm: kvg.Llama) -> None:
    generator, _ = begun(llm, 8, {"temp": 1.5})
    state = llm.save_state()
    rest = list(itertools.islice(generator, 20))
    llm.load_state(state)
    llm.load_state(llm.save_state())
    assert list(itertools.islice(llm.generate([], reset=False, temp=1.5), 20)) == rest


def test_a_pickled_state_has_the_seed(llm: kvg.Llama) -> None:
    begun(llm, 8, {"temp": 1.5})[0].close()
    generator, _ = begun(llm, 8, {"temp": 1.5})
    state = llm.save_state()
    assert state.sampler is not None
    copy = pickle.loads(pickle.dumps(state))
    assert copy.sampler is None and copy.seed == state.seed
    llm.load_state(copy)
    assert llm.kv.pending_token(0) is not None
    assert len(list(itertools.islice(llm.generate([], reset=False, temp=1.5), 5))) == 5
    generator.close()


def test_after_a_generation_there_is_only_the_seed(llm: kvg.Llama) -> None:
    llm("Once upon", max_tokens=5)
    assert llm.save_state().sampler is None
