"""Tasks of `pykvgraph quality`: texts with something in them that is asked for afterwards.

Six are tasks of RULER (arXiv:2404.06654), by its definitions and in words of our own: niah_single_1,
niah_multikey_2 and niah_multikey_3 (one of many secrets), vt (variables that follow each other), cwe and fwe
(the commonest words). erase, chat and early are ours; erase is after KVEraser (arXiv:2606.17034).
"""

from __future__ import annotations

import itertools
import math
import re
import string
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from pykvgraph.demos.dialogue import draw_facts, small_talk
from pykvgraph.demos.passkey import JUNK
from pykvgraph.errors import InvalidArgumentError

NOISE = JUNK.strip()
LONG = 4096  # tokens from which on cwe repeats its words more often
_ZETA_2 = math.pi**2 / 6
_N_COMMON = 10  # words that cwe asks for
_N_HOPS = 4
_N_TURNS, _TOLD_AT, _TOLD_EARLY = 50, (4, 14, 24, 34, 44), (1, 3, 5, 7, 9)


@dataclass(frozen=True)
class Probe:
    """What is asked behind the text, and what an answer must have in it. wanted False: what it must not."""

    question: str
    answers: tuple[str, ...]
    wanted: bool = True

    def score(self, said: str) -> float:
        """The share of the answers that are in what was said, whatever the case of letters."""
        share = sum(each.lower() in said.lower() for each in self.answers) / len(self.answers)
        return share if self.wanted else 1.0 - share


@dataclass(frozen=True)
class TaskText:
    """A text, what is asked behind it, and how many tokens an answer has at most.

    cut: a sentence that is not in the text, and before which of its characters it stood: what `edit` erases.
    """

    text: str
    probes: tuple[Probe, ...]
    n_answer: int
    cut: tuple[int, str] | None = None


@dataclass(frozen=True)
class WordSource:
    """What texts are made of: words and sentences of the text that was given.

    Raises InvalidArgumentError for a text with too few of them.
    """

    words: tuple[str, ...]
    sentences: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> WordSource:
        """Words of 4 to 10 small letters, each once; sentences by their full stops and lines."""
        words = tuple(sorted(set(re.findall(r"(?<![^\s])[a-z]{4,10}(?![^\s])", text))))
        sentences = tuple(
            " ".join(each.split()) for each in re.split(r"(?<=[.!?])\s+|\n+", text) if each.strip()
        )
        return cls(words, sentences)

    def sample(self, rng: Random, n: int) -> list[str]:
        """n different words. Raises InvalidArgumentError when there are fewer."""
        if n > len(self.words):
            raise InvalidArgumentError(
                f"the text has {len(self.words)} different words of 4 to 10 small letters, and this task "
                f"needs {n}: give a longer text, or leave out the task"
            )
        return rng.sample(self.words, n)


Build = Callable[[WordSource, Random, int, int], TaskText]  # source, rng, number of pieces, length


def niah_single_1(source: WordSource, rng: Random, n: int, length: int) -> TaskText:
    """A number under a name, in noise."""
    key, value = _name(source, rng), _number(rng, 7)
    pieces = [NOISE] * n
    pieces.insert(rng.randrange(n), _secret("number", key, value))
    return _needle("number", pieces, key, value)


def niah_multikey_2(source: WordSource, rng: Random, n: int, length: int) -> TaskText:
    """A number under a name, among numbers under other names."""
    return _among(rng, n, "number", lambda: _name(source, rng), lambda: _number(rng, 7))


def niah_multikey_3(source: WordSource, rng: Random, n: int, length: int) -> TaskText:
    """A UUID under a UUID, among others."""
    return _among(rng, n, "code", lambda: _uuid(rng), lambda: _uuid(rng))


def vt(source: WordSource, rng: Random, n: int, length: int) -> TaskText:
    """Variables that got a value from one another, in noise; behind an example."""
    example, names = _chain(rng, 3, 5)
    text, wanted = _chain(rng, 5, n)
    task = f"{example} {' '.join(names)}\n\n{text}"
    context, question = task.rsplit("\nQuestion:", 1)
    return TaskText(context, (Probe(f"\nQuestion:{question}", tuple(wanted)),), 30)


def cwe(source: WordSource, rng: Random, n: int, length: int) -> TaskText:
    """The ten commonest words of a numbered list; behind an example."""
    few, many = ((40, 10, 3), (30, 3)) if length >= LONG else ((20, 3, 1), (6, 1))
    example, found = _numbered(source, rng, *few)
    text, wanted = _numbered(source, rng, _N_COMMON + n, *many)
    answer = " ".join(f"{i}. {word}" for i, word in enumerate(found, 1))
    task = "Some words of this list occur more often than others.\n"
    question = (
        "\nQuestion: Which ten words occur most often in the list?\nAnswer: The ten commonest words are"
    )
    return TaskText(
        f"{task}{example}{question} {answer}\n\n{task}{text}", (Probe(question, tuple(wanted)),), 120
    )


def fwe(source: WordSource, rng: Random, n: int, length: int) -> TaskText:
    """The three commonest words of a code, by a zeta distribution; dots are commoner and don't count."""
    n_words = max(length // 50, 4)
    code: list[str] = []
    while len(code) < n_words:
        word = "".join(rng.choices(string.ascii_lowercase, k=6))
        code += [word] * (word not in code)
    code[0] = "..."
    found = [word for rank, word in enumerate(code, 1) for _ in range(int(10 * n / rank**2 / _ZETA_2))]
    rng.shuffle(found)
    question = (
        "\nQuestion: Which three words, dots aside, are commonest?\nAnswer: The three commonest words are"
    )
    return TaskText(f"A text in code words:\n{' '.join(found)}", (Probe(question, tuple(code[1:4])),), 50)


def erase(source: WordSource, rng: Random, n: int, length: int) -> TaskText:
    """Two pass keys in sentences of the text; one of them is to be erased."""
    begin = rng.randrange(len(source.sentences))  # the same for every n
    kept, gone = ((name, _number(rng, 5)) for name in source.sample(rng, 2))
    sentences = list(itertools.islice(itertools.cycle(source.sentences), begin, begin + n))
    sentences.insert(rng.randint(0, len(sentences)), _pass_key(*kept))
    at = len(" ".join(sentences[: rng.randint(1, len(sentences))]))
    probes = (_ask(*kept), _ask(*gone, wanted=False))
    return TaskText(" ".join(sentences), probes, 16, (at, f" {_pass_key(*gone)}"))


def chat(source: WordSource, rng: Random, n: int, length: int) -> TaskText:
    """Fifty turns of small talk, in five of which the user tells something; that is asked for."""
    return _talk(rng, _TOLD_AT, small_talk)


def early(source: WordSource, rng: Random, n: int, length: int) -> TaskText:
    """The same, told in the first ten turns; in the others the user says n words of the text."""
    words = Random(rng.random())  # of its own: n must not change what else is said
    return _talk(rng, _TOLD_EARLY, lambda rng: (f"{' '.join(source.sample(words, n))}.", small_talk(rng)[1]))


def _talk(rng: Random, told_at: Sequence[int], other: Callable[[Random], tuple[str, str]]) -> TaskText:
    """Turns of a user and an assistant, and questions for what the user told in some of them."""
    facts = dict(zip(told_at, draw_facts(rng, len(told_at)), strict=True))
    turns = [
        (facts[i].told(rng), "I will remember that.") if i in facts else other(rng) for i in range(_N_TURNS)
    ]
    text = "\n".join(f"User: {said}\nAssistant: {answer}" for said, answer in turns)
    probes = []
    for fact in facts.values():
        begun = fact.kind.answer.partition(" {v}")[0]  # else a small model only says what it said before
        asked = f"\nUser: {rng.choice(fact.kind.questions)}\nAssistant: {begun}"
        probes.append(Probe(asked, (fact.value,)))
    return TaskText(text, tuple(probes), 8)


TASKS: dict[str, Build] = {
    each.__name__: each
    for each in (niah_single_1, niah_multikey_2, niah_multikey_3, vt, cwe, fwe, erase, chat, early)
}
_FIXED = ("chat",)  # which have as many pieces as they have


def fitted(
    name: str, source: WordSource, seed: str, length: int, n_tokens: Callable[[TaskText], int]
) -> TaskText:
    """The longest text of a task whose tokens, with the answer's, are at most `length`.

    n_tokens: of a text, with its longest question and its answer. Raises InvalidArgumentError when `length`
    is too short for the task.
    """
    build = TASKS[name]

    def made(n: int) -> TaskText:
        return build(source, Random(seed), n, length)

    def fits(n: int) -> bool:
        try:
            return n_tokens(made(n)) <= length
        except InvalidArgumentError:  # too few words for so many pieces
            return False

    low, high = 0, 1  # that fits, and that doesn't
    while name not in _FIXED and fits(high) and high < length:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    text = made(max(low, 1))
    made(low + 1)  # raises where it is words that are too few for the length
    if n_tokens(text) > length:
        raise InvalidArgumentError(
            f"{name} needs {n_tokens(text)} tokens or more, and the length is {length}: raise it, or leave "
            "out the task"
        )
    return text


def _among(
    rng: Random, n: int, kind: str, draw_key: Callable[[], str], draw_value: Callable[[], str]
) -> TaskText:
    pairs = [(draw_key(), draw_value()) for _ in range(n + 1)]
    key, value = pairs[rng.randrange(len(pairs))]
    return _needle(kind, [_secret(kind, *pair) for pair in pairs], key, value)


def _needle(kind: str, pieces: Iterable[str], key: str, value: str) -> TaskText:
    task = f"There are secret {kind}s in this text, each under a name. Remember them.\n"
    question = f"\nQuestion: What is the secret {kind} of {key}?\nAnswer: The secret {kind} of {key} is"
    return TaskText(task + "\n".join(pieces), (Probe(question, (value,)),), 128)


def _secret(kind: str, key: str, value: str) -> str:
    return f"The secret {kind} of {key} is {value}."


def _chain(rng: Random, n_letters: int, n: int) -> tuple[str, list[str]]:
    """Noise with a chain of variables in it, and the question for them; the names of all of them."""
    names = ["".join(rng.choices(string.ascii_uppercase, k=n_letters)) for _ in range(_N_HOPS + 1)]
    value = _number(rng, 5)
    lines = [f"{names[0]} = {value}."] + [f"{b} = {a}." for a, b in itertools.pairwise(names)]
    pieces = [NOISE] * max(n, len(lines))
    for i, place in enumerate(sorted(rng.sample(range(len(pieces)), len(lines)))):
        pieces.insert(place + i, lines[i])
    return (
        "Variables get values in this text. Remember them.\n"
        + "\n".join(pieces)
        + f"\nQuestion: Which {len(names)} variables have the value {value}?"
        + f"\nAnswer: The {len(names)} variables with the value {value} are",
        names,
    )


def _numbered(source: WordSource, rng: Random, n: int, n_common: int, n_other: int) -> tuple[str, list[str]]:
    """A list of n words, of which ten come n_common times and the others n_other times; and these ten."""
    words = source.sample(rng, n)
    found = words[:_N_COMMON] * n_common + words[_N_COMMON:] * n_other
    rng.shuffle(found)
    return " ".join(f"{i}. {word}" for i, word in enumerate(found, 1)), words[:_N_COMMON]


def _pass_key(name: str, value: str) -> str:
    return f"The pass key of {name} is {value}. Remember it. {value} is the pass key of {name}."


def _ask(name: str, value: str, wanted: bool = True) -> Probe:
    return Probe(f"\nWhat is the pass key of {name}? The pass key of {name} is", (value,), wanted)


def _name(source: WordSource, rng: Random) -> str:
    return "-".join(source.sample(rng, 2))


def _number(rng: Random, n_digits: int) -> str:
    return str(rng.randrange(10 ** (n_digits - 1), 10**n_digits))


def _uuid(rng: Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
