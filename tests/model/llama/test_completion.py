"""Completions: token for token, and key for key, what llama-cpp-python says on the same file."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pykvgraph as kvg
from pykvgraph.llama import LlamaGrammar, LogitsProcessorList, StoppingCriteriaList

from .conftest import Pair, llama_cpp, plain

Same = Callable[..., Any]

PROMPTS = [
    "Once upon a time",
    "The big dog",
    "",
    "Lily and Tom",
    "One day, a little girl named Lucy",
    "In the park",
    'He said "',
    "Mom",
    "The sun was",
    "There was a cat",
    "A bird",
    "Ben",
    "She was very sad because",
    "It was",
    "Sara liked to",
    "They",
    "The red ball",
    "Tim",
    "Every day",
    "When the rain",
]
WAYS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "from all, as the model says": {"temperature": -1.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7, "top_k": 0},
    "min_p": {"min_p": 0.2, "top_k": 0},
    "typical_p": {"typical_p": 0.5},
    "repeat_penalty": {"repeat_penalty": 1.3},
    "frequency and presence": {"frequency_penalty": 0.5, "presence_penalty": 0.4},
    "mirostat 1": {"mirostat_mode": 1},
    "mirostat 2": {"mirostat_mode": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2},
}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy(same: Same, prompt: str) -> None:
    for more in ({}, {"echo": True}, {"stop": ["the", "."]}, {"stop": "\n", "repeat_penalty": 1.2}):
        same("create_completion", prompt, max_tokens=60, temperature=0.0, **more)


@pytest.mark.parametrize("way", WAYS)
def test_seeds(same: Same, way: str) -> None:
    texts = set()
    for seed, prompt in enumerate(PROMPTS):
        arguments = {"temperature": 0.9, **WAYS[way]}
        answer = same("create_completion", prompt, max_tokens=30, seed=seed, **arguments)
        texts.add(answer["choices"][0]["text"])
    assert len(texts) == len(PROMPTS)


def test_without_a_seed_the_next_one_is_drawn_from_the_last(both: Pair, same: Same) -> None:
    for llama in both:
        llama.set_seed(11)
    texts = [same("__call__", "The", max_tokens=20)["choices"][0]["text"] for _ in range(3)]
    assert len(set(texts)) == 3


@pytest.mark.parametrize("stop", [[], ["the dog", "."], ["zzz"], ["Tom and", " Tom"]], ids=str)
def test_streamed(same: Same, stop: list[str]) -> None:
    """Chunk for chunk; an empty prompt is for the test below."""
    for prompt in PROMPTS[:2] + PROMPTS[3:8]:
        chunks = same("create_completion", prompt, max_tokens=40, temperature=0.0, stop=stop, stream=True)
        assert chunks[-1]["choices"][0]["finish_reason"] is not None


def test_an_empty_stop_ends_at_once(same: Same) -> None:
    for stop in ("", ["zzz", ""]):
        for stream in (False, True):
            same(
                "create_completion",
                "Once upon a time",
                stop=stop,
                max_tokens=9,
                temperature=0.0,
                stream=stream,
            )


def test_an_empty_suffix_is_none(llm: kvg.Llama) -> None:
    """This model has no tokens to fill in with."""
    plain, empty = (llm("Once", suffix=suffix, max_tokens=5, temperature=0.0) for suffix in (None, ""))
    assert [choice["text"] for choice in empty["choices"]] == [choice["text"] for choice in plain["choices"]]
    assert empty["usage"] == plain["usage"]


@pytest.mark.parametrize("prompt", PROMPTS[:4])
def test_streamed_is_the_same_text(llm: kvg.Llama, prompt: str) -> None:
    for stop in ([], ["the"], ["he", "was a", "e"]):
        ways: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 5}]
        for arguments in ways:
            whole = llm(prompt, max_tokens=50, stop=stop, **arguments)
            chunks = list(llm(prompt, max_tokens=50, stop=stop, stream=True, **arguments))
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
            assert chunks[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]


def test_characters_of_several_tokens(same: Same, both: Pair) -> None:
    """The model is made to say them, byte by byte: no chunk has half of one."""
    tokens = both[0].tokenize("\u20ac \u00e9 \U0001f600".encode(), add_bos=False)
    said = itertools.cycle(tokens)

    def next_one(_ids: Any, scores: Any) -> Any:
        return np.where(np.arange(len(scores)) == next(said), 100.0, -100.0).astype(np.float32)

    for n in range(1, len(tokens) + 1):
        for stream in (False, True):
            said = itertools.cycle(tokens)
            ours = plain(_forced(both[0], next_one, n, stream))
            said = itertools.cycle(tokens)
            theirs = plain(_forced(both[1], next_one, n, stream))
            assert ours == theirs


def _forced(llama: Any, processor: Any, n: int, stream: bool) -> Any:
    processors = LogitsProcessorList([processor])
    answer = llama("a", max_tokens=n, temperature=0.0, logits_processor=processors, stream=stream)
    return list(answer) if stream else answer


def test_grammars(same: Same) -> None:
    for grammar in ('root ::= " " [0-9]+ " cats" | "dogs"', 'root ::= ("a" | "b"){3}'):
        for arguments in ({"temperature": 0.0}, {"seed": 3}, {"seed": 4, "mirostat_mode": 2}):
            theirs = LlamaGrammar.from_string(grammar, verbose=False)
            same("create_completion", "The", max_tokens=20, grammar=theirs, **arguments)
    schema = '{"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}'
    answer = same(
        "create_completion",
        "The",
        max_tokens=40,
        grammar=LlamaGrammar.from_json_schema(schema),
        temperature=0.0,
    )
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_logit_bias_and_processors(same: Same, both: Pair) -> None:
    token = both[0].tokenize(b" cat", add_bos=False)[-1]
    for bias in ({token: 8.0}, {str(token): 100.0}, {token: -100.0}):
        same("create_completion", "The", max_tokens=12, temperature=0.0, logit_bias=bias)
    halved = LogitsProcessorList([lambda _ids, scores: scores / np.float32(2)])
    same("create_completion", "The", max_tokens=12, seed=2, logits_processor=halved)
    long = StoppingCriteriaList([lambda ids, _scores: len(ids) > 9])
    same("create_completion", "The", max_tokens=30, temperature=0.0, stopping_criteria=long)


def test_logprobs(both_with_logits: Pair) -> None:
    for more in ({}, {"echo": True}, {"stream": True}, {"logprobs": 0}, {"stop": "little"}):
        arguments = {"max_tokens": 8, "temperature": 0.0, "logprobs": 3, **more}
        ours, theirs = (plain(llama("Once upon a time", **arguments)) for llama in both_with_logits)
        assert_close(ours, theirs)


def assert_close(ours: Any, theirs: Any) -> None:
    """Equal, but for the last digits of numbers."""
    if isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            assert_close(ours[key], theirs[key])
    elif isinstance(ours, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_close(one, other)
    elif isinstance(ours, float):
        assert ours == pytest.approx(float(theirs), abs=2e-4)
    else:
        assert ours == theirs


def test_scores(both_with_logits: Pair) -> None:
    ours, theirs = both_with_logits
    tokens = ours.tokenize(b"Once upon a time")
    for llama in both_with_logits:
        llama.reset()
        llama.eval(tokens[:3])
        llama.eval(tokens[3:])
    assert ours.n_tokens == theirs.n_tokens == len(tokens)
    assert ours._input_ids.tolist() == theirs._input_ids.tolist()
    assert np.allclose(ours._scores, theirs._scores, atol=1e-3)
    assert ours.sample(temp=0.0) == theirs.sample(temp=0.0)
    for idx in range(len(tokens)):
        assert ours.sample(temp=0.0, idx=idx) == int(theirs.scores[idx].argmax())


def test_eval_sample_generate(both: Pair) -> None:
    told = []
    for llama in both:
        llama.reset()
        tokens = llama.tokenize(b"Once upon a time")
        llama.eval(tokens)
        said = [llama.sample(temp=0.0)]
        llama.eval(said)
        said += itertools.islice(llama.generate([llama.sample(temp=0.0)], reset=False, temp=0.0), 6)
        said += itertools.islice(llama.generate([*tokens, *said[:3]], temp=0.0), 6)
        told.append((said, llama.n_tokens, llama._input_ids.tolist()))
    assert told[0] == told[1]


def test_tokens_sent_into_the_generator_are_decoded(llm: kvg.Llama) -> None:
    """llama-cpp-python samples after each of them, and ends the process where it has no logits."""
    more = llm.tokenize(b" cat", add_bos=False)
    generator = llm.generate(llm.tokenize(b"Once"), temp=0.0)
    first = next(generator)
    said = generator.send(more)
    assert llm._input_ids.tolist() == [*llm.tokenize(b"Once"), first, *more]
    llm.reset()
    assert said == next(llm.generate([*llm.tokenize(b"Once"), first, *more], temp=0.0))


def test_only_what_is_new_is_decoded(llm: kvg.Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    llm("Once upon a time there was", max_tokens=4, temperature=0.0)
    before = llm.kv.take_stats, llm.n_tokens
    counts = []
    decode = llm.context._decode_last

    def count(context: int, batch: kvg.Batch, copy: bool = True) -> Any:
        counts.append(len(batch))
        return decode(context, batch, copy)

    monkeypatch.setattr(llm.context, "_decode_last", count)
    llm("Once upon a time there was a", max_tokens=1, temperature=0.0)
    assert counts == [1]
    assert before[1] > llm.n_tokens - 1


def test_the_last_token_is_pending(llm: kvg.Llama) -> None:
    """What generate() goes on with is what one longer completion says."""
    whole = llm("Once upon a time", max_tokens=20, temperature=0.0)["choices"][0]["text"]
    text = llm("Once upon a time", max_tokens=8, temperature=0.0)["choices"][0]["text"]
    text += "".join(piece.text for piece in kvg.generate(llm.context, "", max_tokens=12))
    assert text == whole


def test_the_cache_may_be_edited(llm: kvg.Llama) -> None:
    """What was removed is decoded again."""
    first = llm("Once upon a time", max_tokens=20, temperature=0.0)["choices"][0]["text"]
    edits: list[Callable[[], None]] = [llm.kv.clear, lambda: llm.kv.seq_rm(0, 3, -1), llm.context.reset]
    for edit in edits:
        edit()
        assert llm("Once upon a time", max_tokens=20, temperature=0.0)["choices"][0]["text"] == first


def test_states(llm: kvg.Llama, stories: Path) -> None:
    """Tokens, cells, the pending token, and what the next seeds are drawn from."""
    llm.set_seed(7)
    llm("Once upon a time", max_tokens=10)
    state = llm.save_state()
    expected = [llm("Once upon", max_tokens=10)["choices"][0]["text"] for _ in range(2)]
    with kvg.Llama(str(stories), n_ctx=128) as other:
        other("A cat", max_tokens=5)
        for llama in (llm, other):
            llama.load_state(state)
            assert llama.kv.pending_token(0) == llama.kv.pending_token(0) is not None
            assert llama._input_ids.tolist() == state.input_ids[: state.n_tokens].tolist()
            assert [llama("Once upon", max_tokens=10)["choices"][0]["text"] for _ in range(2)] == expected
    with kvg.Llama(str(stories), n_ctx=8) as small, pytest.raises(ValueError, match="8 cells"):
        small.load_state(state)


def _count(calls: list[Any], function: Any, *arguments: Any) -> None:
    calls.append(arguments)
    function(*arguments)


def test_states_in_a_cache(stories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama-cpp-python's own."""
    cache, loads = llama_cpp.LlamaRAMCache(), list[Any]()
    with kvg.Llama(str(stories), n_ctx=64) as one, kvg.Llama(str(stories), n_ctx=64) as other:
        one.set_cache(cache)
        said = one("Once upon a time", max_tokens=6, temperature=0.0)
        other.set_cache(cache)
        monkeypatch.setattr(other, "load_state", functools.partial(_count, loads, other.load_state))
        assert plain(other("Once upon a time", max_tokens=6, temperature=0.0)) == plain(said)
    assert len(loads) == 1


@pytest.mark.parametrize(
    ("prompt", "arguments", "error", "told"),
    [
        ("cat " * 200, {}, ValueError, "exceed the context window of 128"),
        ("a", {"logprobs": 1}, ValueError, "logits_all"),
        ("a", {"suffix": "b"}, kvg.UnsupportedError, "suffix"),
        ("a", {"tfs_z": 0.5}, kvg.UnsupportedError, "tfs_z"),
        ("a", {"grammar": 5}, ValueError, "grammar"),
        ("a", {"grammar": "no grammar"}, ValueError, "grammar"),
        ([], {}, ValueError, "empty"),
        ([10**6], {}, ValueError, "ids"),
        ("a", {"temprature": 0.5}, TypeError, "temprature"),
        (b"a", {}, TypeError, "got bytes"),
    ],
    ids=str,
)
def test_refused(llm: kvg.Llama, prompt: Any, arguments: dict[str, Any], error: Any, told: str) -> None:
    with pytest.raises(error, match=told):
        llm(prompt, **arguments)
    assert llm("Once", max_tokens=2)["usage"]["completion_tokens"] == 2
