"""The examples, as people run them, on the 260K model."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support import chance
from support.architectures import ArchSpec
from support.gguf_parts import take_apart
from support.models import ModelSpec, WeightType, write_model
from support.vocabularies import of_kind

import pykvgraph as kvg
from pykvgraph.models import embedded_model

EXAMPLES = Path(__file__).parents[3] / "examples"
SHIFT = re.compile(
    r"\[?(?:shift|context full): (\d+) positions discarded, (\d+) cells shifted, (\d+) moved, \d+\.\d ms\]?"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def run(name: str, *arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "80"}
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=env, timeout=120)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shifts(text: str) -> list[tuple[int, int, int]]:
    """(discarded, shifted, moved) of every line that tells of a shift."""
    found = (SHIFT.fullmatch(line) for line in text.splitlines())
    return [(int(m[1]), int(m[2]), int(m[3])) for m in found if m]


def test_llama(stories: Path) -> None:
    """Each way, on a model that can fill in nothing."""
    said = run("llama.py", "-m", stories, "-p", "Once upon a time")
    text = json.loads(said.stdout)["choices"][0]["text"]
    assert text.startswith("Once upon a time") and len(text) > 20
    chunks = run("llama.py", "-m", stories, "--stream", "-p", "Once upon a time").stdout.splitlines()
    assert json.loads(chunks[-1])["choices"][0]["finish_reason"] in ("stop", "length")
    chat = json.loads(run("llama.py", "-m", stories, "--chat").stdout)
    assert chat["choices"][0]["message"]["role"] == "assistant"
    vectors = json.loads(run("llama.py", "-m", stories, "--embed", "-p", "Hello").stdout)["data"][0][
        "embedding"
    ]
    assert {len(vector) for vector in vectors} == {64}
    refused = run("llama.py", "-m", stories, "--infill", "a", "b")
    assert refused.returncode == 1 and refused.stderr.startswith("llama.py: suffix: ")


def test_documents_for_an_answer(
    stories: Path, architecture: Callable[[ArchSpec], Path], tmp_path: Path
) -> None:
    """The nearest ones are read; a reranker has its own opinion of four times as many."""
    plain = ArchSpec("bert", head_dim=16, n_head_kv=4, pooling=1)
    encoder, reranker = tmp_path / "encoder.gguf", tmp_path / "reranker.gguf"
    for path, spec in ((encoder, plain), (reranker, replace(plain, pooling=4, n_classes=1))):
        of_kind(take_apart(architecture(spec).read_bytes()), b"bert").raw().write(path)
    documents = ["hello there", "the cat sat", "a", "there sat the cat", "hello"]
    listed = tmp_path / "documents.txt"
    listed.write_text("\n".join(documents), encoding="utf-8")
    given = ("rag.py", "-m", stories, "-e", encoder, "-f", listed, "-n", "8", "-ngl", "0")
    said = run(*given, "-k", "2", "the cat sat", "hello")
    assert said.returncode == 0, said.stderr
    read = [line[1:-1] for line in said.stderr.splitlines()]
    assert [read[0], read[2]] == ["the cat sat", "hello"] and len(set(read[:2])) == 2
    assert said.stdout.strip()
    reranked = run(*given, "-r", reranker, "-k", "1", "the cat sat")
    with kvg.Model(reranker, device="cpu") as model, kvg.Engine(model, n_ctx=64, background=False) as engine:
        scores = engine.rank("the cat sat", documents)
    ranked = [documents[i] for i in sorted(range(len(documents)), key=lambda i: -scores[i])]
    assert reranked.stderr.splitlines()[0][1:-1] in ranked[:2]  # one of five was not among the four
    refused = run(*given[:3], "-e", "nothing.gguf", "-f", listed, "cat")
    assert refused.returncode == 1 and refused.stderr.startswith("rag.py: ")


def test_documents_that_are_read_once(stories: Path) -> None:
    """What is decoded, by hand: two documents a question, or each document once."""
    arguments = ("--documents", "3", "--questions", "5", "--part", "60", "--repair", "0", "8", "-t", "1")
    said = run("documents.py", "-m", stories, *arguments)
    assert said.returncode == 0, said.stderr
    found = [int(n) for n in re.findall(r"(\d+) prompt tokens decoded", said.stdout)]
    assert len(found) == 3
    full, unrepaired, repaired = found
    assert repaired == unrepaired + 5 * 8

    example, rng = load("documents"), random.Random(1)
    facts = [example.Fact(thing, str(rng.randint(10000, 99999))) for thing in rng.sample(example.THINGS, 3)]
    pairs = [rng.sample(range(3), 2) for _ in range(5)]
    with kvg.Model(stories, device="cpu") as model:
        texts = example.documents(model.tokenizer, example.NOISE, facts, 60, rng)
        assert all(fact.value in text for fact, text in zip(facts, texts, strict=True))

        def n(text: str) -> int:
            return len(model.tokenizer.encode(text, add_special=False, add_space_prefix=False))

        n_system, parts = len(model.tokenizer.encode(example.SYSTEM)), [n(text) for text in texts]
    things = [fact.thing for fact in facts]
    asked = [
        n(f"\nQuestion: What is the {things[a]}, and what is the {things[b]}?\nAnswer: The {things[a]} is")
        for a, b in pairs
    ]
    assert full == sum(n_system + parts[a] + parts[b] for a, b in pairs) + sum(asked)
    assert unrepaired == 4 * n_system + sum(parts) + sum(asked)
    refused = run("documents.py", "-m", "nothing.gguf")
    assert refused.returncode == 1 and refused.stderr.startswith("documents.py: ")


def greedy_text(stories: Path, prompt: str, n: int) -> str:
    """The prompt and the n likeliest tokens behind it, of one process."""
    with kvg.Model(stories) as model, kvg.Context(model, n_ctx=256) as ctx:
        text = model.tokenizer.encode(prompt)
        logits = [ctx.append(token) for token in text][-1]
        for _ in range(n):
            text.append(int(logits.argmax()))
            logits = ctx.append(text[-1])
        return model.tokenizer.decode(text)


def test_prompts_here_and_answers_there(stories: Path) -> None:
    said = run("disaggregated.py", "-m", stories, "-n", "60")
    assert said.stdout == greedy_text(stories, "Once upon a time", 60) + "\n", said.stderr


def test_the_first_token_of_two_processes(stories: Path) -> None:
    said = run("disaggregated.py", "-m", stories, "-n", "1", "--measure", "100")
    assert re.fullmatch(r"100 tokens, .* s in one process, .* s in two; by turns \d+\.\d+ x\n", said.stdout)
    refused = run("disaggregated.py", "-m", "nothing.gguf")
    assert refused.returncode == 1 and refused.stderr.startswith("disaggregated.py: ")


@pytest.mark.parametrize("kill_after", [0, 20])
def test_a_text_that_outlives_its_process(stories: Path, kill_after: int) -> None:
    said = run("failover.py", "-m", stories, "-n", "60", "--kill-after", str(kill_after))
    assert said.stdout == greedy_text(stories, "Once upon a time", 60) + "\n", said.stderr
    found = re.findall(r"\[killed; (\d+) tokens decoded here, the next one after \d+ ms\]", said.stderr)
    assert [int(n) in (1, 2) for n in found] == [True] * (kill_after > 0)


@pytest.mark.slow
def test_one_model_in_several_processes(stories: Path) -> None:
    expected = greedy_text(stories, "Once upon a time", 40) + "\n"
    said = run("pipeline.py", "-m", stories, "-n", "40", "--stages", "3")
    assert said.stdout == expected, said.stderr
    with kvg.Model(stories) as model:
        n_tokens, n_embd = len(model.tokenizer.encode("Once upon a time")) + 40, model.n_embd
    n_bytes = 41 * 29 + n_tokens * (14 + 4 * n_embd)  # of a frame, of a token
    assert f"[{n_tokens} tokens: {n_bytes:,} bytes from each of 3 stages to the next]" in said.stderr


LLAMA = ArchSpec("llama", 12, 64, 2, 1, 32, 64, weights=WeightType.Q8_0)
MORE = [
    ArchSpec("gemma3", 12, 64, 2, 1, 32, 64, window=8),
    ArchSpec("qwen35", n_layer=12, period=4, state_heads=4),
]


@pytest.mark.slow
@pytest.mark.parametrize("spec", [LLAMA, *(MORE if chance.THOROUGH else [])], ids=lambda spec: spec.arch)
def test_a_stage_is_killed(architecture: Callable[[ArchSpec], Path], spec: ArchSpec) -> None:
    """By SIGKILL: the text goes on from what was saved, in three stages where two were before."""
    asked = ("pipeline.py", "-m", architecture(spec), "-p", "the cat", "-n", "30")
    killed = run(*asked, "--stages", "2", "--kill-after", "20", "--then", "3")
    assert re.search(r"\[a stage was killed; \d+ tokens were saved, and go on in 3\]", killed.stderr)
    assert killed.stdout == run(*asked, "--stages", "1").stdout, killed.stderr
    assert killed.returncode == 0 and len(killed.stdout) > 30


@pytest.mark.slow
def test_a_model_that_no_process_has_room_for(tmp_path: Path, stories: Path) -> None:
    """Under `ulimit -v`: with all layers it is refused, and three stages answer."""
    spec = ModelSpec(n_layer=12, n_embd=512, n_head=8, n_head_kv=8, n_ff=2048)  # 16 MiB a layer
    path = write_model(spec, tmp_path)
    measured = "import resource, sys; import pykvgraph as kvg; from support.limits import read_size; "
    measured += "ctx = kvg.Context(kvg.Model(sys.argv[1]), n_ctx=64); ctx.append(1); "
    measured += "ctx.model.tokenizer.encode('a'); print(read_size('VmPeak') >> 10)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    base = int(subprocess.run([sys.executable, "-c", measured, stories], capture_output=True, env=env).stdout)
    room = base + (path.stat().st_size >> 10) * 2 // 3
    command = [sys.executable, str(EXAMPLES / "pipeline.py"), "-m", str(path), "-n", "8", "-c", "64"]

    def limited(n_stages: int, kib: int | str) -> subprocess.CompletedProcess[str]:
        script = [f'ulimit -v {kib}; exec "$@"', "-", *command, "--stages", str(n_stages)]
        return subprocess.run(["sh", "-c", *script], capture_output=True, text=True, env=env, timeout=120)

    refused = limited(1, room)
    assert refused.returncode == 1 and "pipeline.py: " in refused.stderr
    expected = limited(1, "unlimited")
    answered = limited(3, room)
    assert answered.returncode == 0 and answered.stdout == expected.stdout, answered.stderr


def test_story_goes_on_and_on(stories: Path) -> None:
    result = run("chat.py", "--story", "-m", stories, "-c", "256", "--n-keep", "4")
    assert result.returncode == 0
    # half of 252 cells goes, the other half moves into its place; 4 contexts take at least this many shifts
    lines = result.stderr.splitlines()
    assert shifts(result.stderr) == [(126, 126, 126)] * len(lines)
    assert (4 * 256 - 256) // 126 <= len(lines) <= 10
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert result.stdout.startswith("Once upon a time, ")


def test_story_is_readable(stories: Path, golden_story: str) -> None:
    text = run("chat.py", "--story", "-m", stories).stdout
    words = re.findall(r"[a-z']+", text.lower())
    assert len(words) > 700
    assert "\ufffd" not in text
    # no loop: a model that lost its thread says the same thing for ever
    phrases = Counter(zip(*(words[i:] for i in range(6)), strict=False))
    assert phrases.most_common(1)[0][1] < 0.03 * len(words)
    # no scraps of words: what is common in the published story is common here
    common = {word for word, _ in Counter(re.findall(r"[a-z']+", golden_story.lower())).most_common(20)}
    assert sum(word in common for word in words) > 0.3 * len(words)


def test_story_is_the_same_each_time_and_another_by_seed(stories: Path) -> None:
    arguments = ("chat.py", "--story", "-m", stories, "-n", "60", "--seed")
    assert run(*arguments, "5").stdout == run(*arguments, "5").stdout != run(*arguments, "6").stdout


def test_chat_answers_each_line_beyond_its_context(stories: Path) -> None:
    arguments = ("chat.py", "-m", stories, "-c", "64", "-n", "60")
    talk = ["Hello.\n", "Who is Lily?\n", "And then?\n", "Why?\n"]
    printed = ""
    for n_lines in (0, 1, 4):
        result = run(*arguments, stdin="".join(talk[:n_lines]))
        assert result.returncode == 0
        assert result.stdout.startswith(printed)
        assert len(result.stdout.splitlines()) >= n_lines
        printed = result.stdout
    # the questions alone are more than 64 tokens
    assert shifts(result.stderr)
    assert len(shifts(result.stderr)) == len(result.stderr.splitlines())


def test_chat_turns_add_up_to_the_template() -> None:
    """What is decoded in two turns and the answer between them is what the template makes of the talk."""
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    model: Any = SimpleNamespace(
        metadata={"tokenizer.chat_template": CHATML, "tokenizer.ggml.tokens": ["<unk>", "<|im_end|>"]},
        tokenizer=SimpleNamespace(eos=1),
    )
    turn, stop = load("chat").chat_format(model)
    talk: list[Any] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "And?"},
    ]
    whole = Jinja2ChatFormatter(CHATML, eos_token="<|im_end|>", bos_token="")(messages=talk).prompt
    assert turn("Hi", True) + "Hello!" + turn("And?", False) == whole
    assert stop == []


def test_chat_without_a_template_takes_turns() -> None:
    model: Any = SimpleNamespace(metadata={})
    turn, stop = load("chat").chat_format(model)
    assert turn("Hi", True) + " Hello!" + turn("And?", False) == (
        "User: Hi\nAssistant: Hello!\nUser: And?\nAssistant:"
    )
    assert stop == ["\n"]


def start_chat(stories: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(EXAMPLES / "chat.py"), "-t", "1", "-m", str(stories), *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=env)


def test_chat_interrupted_answers_the_next_line() -> None:
    """Ctrl-C ends the answer; generate decodes the token that was cut off before the next turn."""
    module: Any = load("chat")
    prompts: list[list[int]] = []

    def generate(_ctx: Any, prompt: list[int], **_settings: Any) -> Iterator[kvg.Piece]:
        prompts.append(prompt)
        for token in (5, 6, 7):
            if token == 6:
                signal.raise_signal(signal.SIGINT)
            yield kvg.Piece("word ", token, 0.0, "length" if token == 7 else None)

    lines = iter(["one", "two", None])
    module.read_line = lambda: next(lines)
    module.kvg = SimpleNamespace(**{**public(), "generate": generate})
    tokenizer = SimpleNamespace(encode=lambda *_a, **_k: [1])
    model = SimpleNamespace(tokenizer=tokenizer, metadata={})
    ctx = SimpleNamespace(model=model, kv=SimpleNamespace(seq_pos_max=lambda _seq: -1))
    before = signal.getsignal(signal.SIGINT)
    module.chat(ctx, module.Page(), SimpleNamespace(n_keep=4, n=None, temp=0.0, seed=1))
    assert prompts == [[1], [1]]
    assert signal.getsignal(signal.SIGINT) is before


def test_chat_skips_empty_lines_and_reads_any_bytes(stories: Path) -> None:
    chat = start_chat(stories, "-n", "5")
    out, err = chat.communicate(b"\n  \n\xff\xfe hello\n", timeout=60)
    assert (chat.returncode, err) == (0, b"")
    assert len(out.splitlines()) <= 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("agents.py", "-n", "1", "--max-tokens", "2"),
        ("batch.py", "-f", str(EXAMPLES / "batch.py"), "-n", "1"),
        ("chat.py", "--story"),
        ("llama.py",),
        ("passkey.py", "3"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_reader_that_has_gone_is_no_error(stories: Path, arguments: tuple[str, ...]) -> None:
    name, *words = arguments
    model = [str(stories)] if name == "passkey.py" else ["-m", str(stories)]
    command = [sys.executable, str(EXAMPLES / name), *model, *words]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, b"")


def test_chat_without_stdin_is_one_line(stories: Path) -> None:
    command = ["sh", "-c", '"$@" <&-', "sh", sys.executable, str(EXAMPLES / "chat.py"), "-m", str(stories)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("chat.py: stdin is closed")
    assert result.stderr.count("\n") == 1


def test_lines_end_with_a_word(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "11")
    with load("chat").Page() as page:
        for text in ("ten let", "ters and", " more \n\n  in", "dented"):
            page.write(text)
    assert capsys.readouterr().out == "ten\nletters\nand more\n\n  indented\n"


@pytest.mark.parametrize("n_grp", ["1", "4"])
def test_passkey_reads_past_its_context_and_owns_up(stories: Path, n_grp: str) -> None:
    result = run("passkey.py", stories, "60", n_grp, "9", "-t", "1")
    found = re.match(r"(\d+) tokens, the key after 9 of 60 pieces of junk\n(\d+) cells", result.stdout)
    assert found is not None, result.stderr
    n_tokens, n_cells = int(found[1]), int(found[2])
    given_up = re.findall(r"^shift: positions 32 to (\d+) discarded, ", result.stdout, re.MULTILINE)
    discarded = sum(int(last) - 31 for last in given_up) * int(n_grp)  # each position has a group of cells
    # all that doesn't fit, and room for the answer; in whole groups
    assert n_cells == 512 * int(n_grp) + 32
    assert 0 < n_tokens + 16 - n_cells <= discarded < n_tokens + 16 - n_cells + int(n_grp) * len(given_up)
    # this model knows stories, not numbers
    assert result.stdout.endswith(": not found\n")
    assert (result.returncode, result.stderr) == (1, "")


Passkey = Callable[..., tuple[int, kvg.CellsView]]


def public() -> dict[str, Any]:
    """All of the package's names; it imports each when it is asked for."""
    return {name: getattr(kvg, name) for name in kvg.__all__}


@pytest.fixture
def passkey(stories: Path, monkeypatch: pytest.MonkeyPatch) -> Passkey:
    """Runs passkey.py here, with an answer put in its mouth: exit code, and the cells when it was asked."""
    module = load("passkey")

    def play(answer: str, *arguments: str) -> tuple[int, kvg.CellsView]:
        seen: list[kvg.CellsView] = []

        def generate(ctx: kvg.Context, prompt: list[int], max_tokens: int) -> Iterator[kvg.Piece]:
            seen.append(ctx.kv.cells())
            assert ctx.kv.n_cells - ctx.kv.n_used >= len(prompt) + max_tokens
            yield kvg.Piece(answer, 0, 0.0, "length")

        monkeypatch.setattr(module, "kvg", SimpleNamespace(**{**public(), "generate": generate}))
        monkeypatch.setattr(sys, "argv", ["passkey.py", str(stories), "-t", "1", *arguments])
        code = module.main()
        return code, seen[0]

    return play


@pytest.mark.parametrize("arguments", [("250", "2", "90"), ("250", "1", "130"), ("250", "1", "10")])
def test_passkey_finds_what_is_in_its_window(arguments: tuple[str, ...]) -> None:
    """llama.cpp's own arguments, on the model that was trained for it; the last key is discarded."""
    result = run("passkey.py", embedded_model(), *arguments)
    assert result.returncode == (1 if arguments[2] == "10" else 0), result.stdout
    assert (": found" in result.stdout) == (arguments[2] != "10")
    assert f"\n{4096 * int(arguments[1]) + 32} cells, batches of 512, " in result.stdout
    assert result.stdout.count("shift: ") == (0 if arguments[1] == "2" else 3)


def test_passkey_shows_what_is_done_to_the_cache() -> None:
    tree = ast.parse((EXAMPLES / "passkey.py").read_text(encoding="utf-8"))
    calls = {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert {"seq_rm", "seq_add", "seq_div", "defrag", "update"} <= calls


def test_passkey_exits_with_0_only_for_the_key(passkey: Passkey, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("3", "1", "-1", "4")
    passkey(" I forgot.", *arguments)
    key = capsys.readouterr().out.split("the key was ")[1][:5]
    assert key.isdigit()
    wrong = "1" + key[1:] if key[0] != "1" else "2" + key[1:]
    for answer, code in ((f" {key}.", 0), (wrong, 1), (f"{key}1", 1), (f"1 or {key}", 1), ("", 1)):
        assert passkey(answer, *arguments)[0] == code, answer


@pytest.mark.parametrize("n_grp", [1, 2, 4])
def test_passkey_leaves_each_position_to_a_group(passkey: Passkey, n_grp: int) -> None:
    n_batch, n_cells = 64, 320
    _, cells = passkey("", "30", str(n_grp), "-b", str(n_batch), "-c", str(n_cells), "--n-keep", "16")
    counts = Counter(cells.pos[cells.pos >= 0].tolist())
    # no position is missing; all hold a group, but those of the last batch, which have not been grouped yet
    assert sorted(counts) == list(range(len(counts)))
    alone = [position for position, count in counts.items() if count == 1]
    if n_grp == 1:
        assert len(alone) == len(counts)
    else:
        assert 0 < len(alone) <= n_batch
        assert min(alone) == len(counts) - len(alone)
        assert all(counts[position] == n_grp for position in range(min(alone)))
    assert not cells.shift.any()  # K has followed


def test_passkey_says_when_the_cache_is_too_small(stories: Path) -> None:
    result = run("passkey.py", stories, "-c", "60")
    assert result.returncode == 1
    assert result.stderr.startswith("passkey.py: 60 cells can't hold 32 tokens that are kept, and ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["agents.py", "batch.py", "chat.py", "llama.py", "passkey.py"])
def test_a_missing_model_is_one_line(name: str) -> None:
    prompts = ("-f", EXAMPLES / name) if name == "batch.py" else ()
    model = ("nobody.gguf",) if name == "passkey.py" else ("-m", "nobody.gguf")
    result = run(name, *model, *prompts)
    assert result.returncode == 1
    assert re.fullmatch(rf"{name}: .*(No such file|no model file).*nobody\.gguf'?\n", result.stderr)


@pytest.mark.parametrize("name", ["agent.py", "agents.py", "batch.py"])
def test_a_missing_text_is_one_line(stories: Path, name: str) -> None:
    result = run(name, "-m", stories, "-f", "nobody.txt")
    assert result.returncode == 1
    assert result.stderr == f"{name}: [Errno 2] No such file or directory: 'nobody.txt'\n"


def test_batch_answers_a_file_in_its_order(stories: Path, tmp_path: Path) -> None:
    prompts = [f"Once upon a time there was a girl who had {n} cats. " * 3 for n in range(5)]
    (tmp_path / "prompts").write_text("\n".join(prompts), encoding="utf-8")
    result = run("batch.py", "-m", stories, "-f", tmp_path / "prompts", "-n", "8", "-np", "2")
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert [answer["prompt"] for answer in answers] == prompts
    with kvg.Model(stories, device="cpu") as model, kvg.Context(model, n_ctx=256) as ctx:
        alone = "".join(piece.text for piece in kvg.generate(ctx, prompts[0], max_tokens=8))
        n_tokens = sum(len(model.tokenizer.encode(prompt)) for prompt in prompts)
    assert answers[0]["text"] == alone
    n_cached = sum(answer["n_cached"] for answer in answers)
    told = re.fullmatch(
        r"5 answers in \d+ steps; (\d+) of (\d+) prompt tokens were in the cache\n", result.stderr
    )
    assert told is not None and (int(told[1]), int(told[2])) == (n_cached, n_tokens)


def test_an_agent_decodes_less_when_its_text_is_edited(stories: Path) -> None:
    """Both ways the prompts are as long; behind each note 32 tokens are decoded, and no result again."""
    result = run(
        "agent.py", "-m", stories, "--turns", "6", "--part", "120", "--keep", "2", "--max-tokens", "4"
    )
    assert result.returncode == 0, result.stderr
    exact, edited = (
        list(map(int, found))
        for found in re.findall(
            r"of (\d+) prompt tokens.*, (\d+) edited\n +(\d+) tokens decoded", result.stdout
        )
    )
    assert exact[0] == edited[0]
    assert exact[1] == 0 < edited[1]
    # six results are decoded once; exactly, one of two that stay is decoded again in each of four turns
    assert edited[2] < 6 * 120 + 4 * 60 + 300 < exact[2]


def test_agents_share_their_context(stories: Path) -> None:
    """Its cells are there once: what all texts take is that, and what is their own."""
    result = run("agents.py", "-m", stories, "-n", "2", "--max-tokens", "8")
    assert result.returncode == 0, result.stderr
    n_shared = int(re.findall(r"the shared text: (\d+) tokens", result.stdout)[0])
    found = [tuple(map(int, pair)) for pair in re.findall(r"(\d+) of (\d+) prompt tokens", result.stdout)]
    assert len(found) == 3 * 2 + 3
    assert all(n_cached >= n_shared for n_cached, _ in found[2:])  # all but the first agent's
    n_tokens, n_cells = map(int, re.findall(r"all texts: (\d+) tokens in (\d+) cells", result.stdout)[0])
    assert n_tokens == sum(n_prompt for _, n_prompt in found) + 9 * 8
    # a question of at most 12 tokens for each agent, 8 tokens for each of 9 answers, 4 for what follows
    assert n_shared < n_cells <= n_shared + 3 * 12 + 9 * 8 + 3 * 4
