"""Token ids of real text beside libllama's, by vocabularies of 49,152 and 262,144."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import real

import pykvgraph as kvg
from pykvgraph.bench.libllama import LibllamaModel

SCRIPTS = [
    "Все люди рождаются свободными и равными в своём достоинстве и правах.",  # noqa: RUF001
    "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.",  # noqa: RUF001
    "يولد جميع الناس أحراراً متساوين في الكرامة والحقوق.",
    "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם.",
    "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता प्राप्त है।",
    "人人生而自由,在尊严和权利上一律平等。",
    "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
    "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền.",
    "👩‍👩‍👧‍👦 🇳🇴🏳️‍🌈 👍🏽 ☕️ e\u0301 n\u0303 \u200b\ufeff\u00a0\U0001d54f \U0001f9ff",
]
ODD = ["", " ", "  a", "a  ", "\n\n\t \r\n", "1234567890 3.14 1e-9", "it's I'LL we'd", "a" * 300, "\0"]
NAMES = {
    "smollm2": ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<file_sep>"],
    "gemma3": ["<start_of_turn>", "<end_of_turn>", "<bos>", "<eos>", "<pad>", "<unused3>"],
}


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[kvg.Tokenizer, LibllamaModel]]:
    """Our tokenizer, and a model of the same file in libllama."""
    theirs = LibllamaModel(real.FOLDER / f"{request.param}.gguf", extra_buffers=False)
    yield request.getfixturevalue(request.param).tokenizer, theirs
    theirs.close()


def texts() -> list[str]:
    code = [path.read_text(encoding="utf-8") for path in sorted(Path(kvg.__file__).parent.glob("*.py"))]
    return [*real.articles(), *code, *SCRIPTS, *ODD]


def test_ids_are_those_of_libllama(pair: tuple[kvg.Tokenizer, LibllamaModel]) -> None:
    ours, theirs = pair
    for text in [*texts(), "▁a▁"]:  # SentencePiece's own mark of a space
        assert ours.encode(text) == theirs.encode(text), text[:80]


def test_a_text_comes_back(pair: tuple[kvg.Tokenizer, LibllamaModel]) -> None:
    ours, _ = pair
    for text in texts():
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("parse_special", [True, False])
def test_names_of_control_tokens(
    pair: tuple[kvg.Tokenizer, LibllamaModel], parse_special: bool, request: pytest.FixtureRequest
) -> None:
    """Whole ones, cut ones, and what stands beside them."""
    ours, theirs = pair
    rng, names = random.Random(0), NAMES[request.node.callspec.params["pair"]]
    pieces = [*names, *(name[: len(name) // 2] for name in names), *(name[1:] for name in names)]
    pieces += ["\n", " ", "user\n", "assistant", *SCRIPTS[::3], *(each[:40] for each in real.articles()[:9])]
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=rng.randrange(1, 12)))
        assert ours.encode(text, parse_special=parse_special) == theirs.encode(
            text, parse_special=parse_special
        ), text
    ids = [ours.encode(name, False, parse_special) for name in names]
    assert all((len(each) == 1) == parse_special for each in ids)
