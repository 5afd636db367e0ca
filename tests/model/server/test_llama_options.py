"""What llama-server's options do, beside llama-server with the same options on the same file."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.adapters import write_adapter
from support.gguf_parts import take_apart
from support.llama_help import LIST, listed_by_file, listed_by_help
from support.served import RIVAL, llama_server, said_by, served_alone

from pykvgraph.server.run import listen

from .conftest import STORIES
from .conftest import TEMPLATE as THINKING

GREEDY = {"temperature": 0, "n_predict": 24}
PROMPT = "Once upon a time"
# what llama2.c says behind it (tests/data/stories260K.golden.txt)
PLAIN = (STORIES.parent / "stories260K.golden.txt").read_text(encoding="utf-8").partition(PROMPT)[2]
UINT32 = 4
TEMPLATE = (
    "{%- for message in messages %}<|{{ message.role }}|>{{ message.content }}</s>{% endfor -%}"
    "{{ reasoning_effort }}"
    "{%- if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>{% endif %}{% endif -%}"
)
HELLO = [{"role": "user", "content": "hello"}]

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def both(*options: str, model: Path = STORIES) -> Iterator[list[str]]:
    """The addresses of llama-server and of ours."""
    with llama_server(model, *options) as theirs, served_alone(model, *options) as (ours, _):
        yield [theirs, ours]


def posted(url: str, path: str, **body: Any) -> Any:
    return httpx.post(url + path, json=body, timeout=60).json()


def said(url: str, prompt: str = PROMPT, **fields: Any) -> str:
    return str(posted(url, "/completion", prompt=prompt, **{**GREEDY, **fields})["content"])


def test_the_list_is_what_llama_server_prints() -> None:
    if not RIVAL.exists():
        pytest.skip("there is no llama-server to ask")
    text = subprocess.run(
        [str(RIVAL), "--help"], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    found = listed_by_help(text)
    assert len(found) > 250
    assert listed_by_file()[: len(found)] == found
    version = subprocess.run([str(RIVAL), "--version"], capture_output=True, text=True, timeout=60)
    commit = (version.stdout + version.stderr).partition("commit ")[2].partition(")")[0]
    assert commit and f"commit {commit}" in LIST.read_text(encoding="utf-8")


SAMPLERS = (
    "--typical-p 0.75 --mirostat-ent 4 --mirostat-lr 0.25 --top-nsigma 1.5 --xtc-probability 0.5 "
    "--xtc-threshold 0.25 --dynatemp-range 0.5 --dynatemp-exp 2 --dry-multiplier 0.75 --dry-base 2 "
    "--dry-allowed-length 3 --dry-penalty-last-n 9 --repeat-penalty 1.5 --repeat-last-n 32 "
    "--presence-penalty 0.25 --frequency-penalty 0.5 --ignore-eos --temperature 0.5 --top-k 7 --top-p 0.75 "
    "--min-p 0.25 -s 5 --samplers top_k;penalties;temperature"
)


def test_samplers_are_told_and_used_alike() -> None:
    """All of these numbers are whole in 32 bits. n_predict is -1 there whatever -n says."""
    with both(*SAMPLERS.split(), "-c", "512", "-l", "400-inf", "--tags", "a,b") as urls:
        told = [httpx.get(f"{url}/props").json()["default_generation_settings"]["params"] for url in urls]
        theirs, ours = told
        names = set(theirs) - {"n_predict", "max_tokens", "adaptive_decay"}
        assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}
        assert len(names) > 30
        tags = [httpx.get(f"{url}/v1/models").json()["data"][0]["tags"] for url in urls]
        assert tags == [["a", "b"]] * 2
        texts = [said(url, n_predict=80) for url in urls]
        assert texts[0] == texts[1]
        off: dict[str, Any] = {"repeat_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
        free = [said(url, n_predict=80, **off) for url in urls]
        assert free[0] == free[1] != texts[0]
        asked = {"prompt": "a", "logit_bias": [[5, 1]], **GREEDY}
        settings = [posted(url, "/completion", **asked)["generation_settings"] for url in urls]
        biases = [each["logit_bias"] for each in settings]
        assert [each for each in biases[1] if each["token"] == 5] == [{"bias": 1.0, "token": 5}]
        assert 400 not in [each["token"] for each in biases[0] + biases[1]]  # the body's take their place


def test_a_bias_a_stop_and_control_tokens() -> None:
    end = [[2, 100]]
    options = (
        "-l",
        "300+100",
        "-r",
        r"er\x65",
        "--special",
        "-c",
        "512",
        "--chat-template",
        TEMPLATE.replace("<think>", ""),
    )
    with both(*options) as urls:
        bodies: list[dict[str, Any]] = [{}, {"logit_bias": end}, {"logit_bias": []}]
        for body in (*bodies, {"logit_bias": [[1, 100]], "n_predict": 3}):
            texts = [said(url, **body) for url in urls]
            assert texts[0] == texts[1], body
        assert said(urls[1], logit_bias=end) == "</s>"
        assert said(urls[1]) == said(urls[1], stop=[])[: len(said(urls[1]))]
        chats = [
            posted(url, "/v1/chat/completions", messages=HELLO, logit_bias=end, **GREEDY)["choices"][0][
                "message"
            ]
            for url in urls
        ]
        assert chats[1]["content"] == "</s>"
        assert chats[0]["content"] == chats[1]["content"]


def test_a_grammar_for_all_gives_way_to_a_bodys_own(tmp_path: Path) -> None:
    (tmp_path / "grammar").write_text('root ::= "the" [a-z]+')
    with both("--grammar-file", str(tmp_path / "grammar"), "-c", "512") as urls:
        texts = [said(url) for url in urls]
        assert texts[0] == texts[1]
        assert texts[1].startswith("the") and texts[1].isalpha()
        texts = [said(url, grammar='root ::= "a"+ "b"') for url in urls]
        assert texts[0] == texts[1]
        assert texts[1].startswith("a")
        assert said(urls[1], json_schema={"const": "xyz"}) == '"xyz"'  # llama-server fails here
    with both("-j", '{"const": "xyz"}', "-c", "512") as urls:
        assert [said(url) for url in urls] == ['"xyz"'] * 2


@pytest.mark.parametrize(
    "options",
    [
        "--rope-scale 4",
        "--rope-freq-scale 0.5",
        "--rope-freq-base 1000",
        "--rope-scaling yarn --rope-scale 40 --yarn-orig-ctx 16",
    ],
)
def test_positions_are_rotated_alike(options: str) -> None:
    with both(*options.split(), "-c", "512") as urls:
        texts = [said(url) for url in urls]
    assert texts[0] == texts[1]
    assert not PLAIN.startswith(texts[0])


@pytest.mark.parametrize("options", ["-rea on", "-rea off", "--reasoning-effort high"])
def test_the_template_is_told_alike(options: str) -> None:
    with both(*options.split(), "--jinja", "--chat-template", TEMPLATE, "-c", "512") as urls:
        prompts = [posted(url, "/apply-template", messages=HELLO)["prompt"] for url in urls]
    assert prompts[0] == prompts[1]
    assert (options != "-rea off") == ("<think>" in prompts[1])
    assert ("high" in options) == ("high" in prompts[1])


def test_a_last_message_of_the_assistant_is_one_like_others() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "yes"}]
    template = TEMPLATE.replace("<think>", "")
    prompts: list[str] = []
    for option in ("--no-prefill-assistant", "--prefill-assistant"):
        with both(option, "--jinja", "--chat-template", template, "-c", "512") as urls:
            told = [posted(url, "/apply-template", messages=messages)["prompt"] for url in urls]
            assert told[0] == told[1]
            prompts.append(told[1])
    assert prompts[0] != prompts[1]


def test_a_reply_that_is_not_taken_apart() -> None:
    """The prompt opens thoughts, which the reply closes."""
    body = {"messages": HELLO, "grammar": 'root ::= "a</think>b"', **GREEDY}
    schema = {"type": "object", "properties": {"at": {"const": 1}}, "required": ["at"]}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    forced: dict[str, Any] = {"messages": HELLO, "tools": [tool], "tool_choice": "required", "temperature": 0}
    forced |= {"chat_template_kwargs": {"enable_thinking": False}, "n_predict": 96}
    contents, calls = [], []
    for option in ("--skip-chat-parsing", "--no-skip-chat-parsing"):
        with both(option, "--jinja", "--chat-template", THINKING, "-c", "512") as urls:
            told = [posted(url, "/v1/chat/completions", **body)["choices"][0]["message"] for url in urls]
            assert told[0]["content"] == told[1]["content"]
            contents.append(told[1]["content"])
            calls.append(posted(urls[1], "/v1/chat/completions", **forced)["choices"][0]["message"])
    assert "tool_calls" not in calls[0] and '"look"' in calls[0]["content"]
    assert calls[1]["tool_calls"][0]["function"]["name"] == "look"
    assert contents == ["a</think>b", "b"]


def test_room_for_each_slot() -> None:
    with both("--kv-unified-per-slot", "100", "-np", "3") as urls:
        room = [httpx.get(f"{url}/props").json()["default_generation_settings"]["n_ctx"] for url in urls]
    assert room == [100, 100]


def test_the_suffix_first(tmp_path: Path) -> None:
    parts = take_apart(STORIES.read_bytes())
    for i, name in enumerate(("pre", "suf", "mid")):
        parts.set(f"tokenizer.ggml.fim_{name}_token_id", UINT32, 300 + i)
    model = parts.raw().write(tmp_path / "model.gguf")
    body = {"input_prefix": "Once", "input_suffix": "the end.", "prompt": "upon", **GREEDY}
    with both("--spm-infill", "-c", "512", model=model) as urls:
        told = [posted(url, "/infill", **body) for url in urls]
    assert told[0]["prompt"].removeprefix(" ") == told[1]["prompt"].removeprefix(" ")
    assert told[0]["content"] == told[1]["content"]
    assert told[1]["prompt"].index("the end") < told[1]["prompt"].index("Once")


def test_adapters_at_rest(tmp_path: Path) -> None:
    """As llama-server's README has it; the program applies them all the same (2026-10)."""
    adapter = write_adapter(tmp_path / "adapter.gguf", STORIES, seed=0, alpha=4.0)
    with both("--lora", str(adapter), "--lora-init-without-apply", "-c", "512") as urls:
        theirs, ours = (said(url, lora=[{"id": 0, "scale": 1.0}]) for url in urls)
        assert ours == theirs
        assert [each["scale"] for each in httpx.get(f"{urls[1]}/lora-adapters").json()] == [0.0]
        plain = said(urls[1])
    assert PLAIN.startswith(plain)
    assert plain != ours


def test_a_port_that_others_listen_on_too() -> None:
    with listen("127.0.0.1", 0, reuse_port=True) as first:
        port = first.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", port)
        with served_alone(STORIES, "--reuse-port", "--port", str(port)) as (url, _):
            assert url.endswith(f":{port}")


def test_several_addresses() -> None:
    try:
        listen("::1", 0).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with served_alone(STORIES, "--host", "127.0.0.1,::1", "-v") as (urls, _):
        one, other = urls.split(", ")
        assert one.startswith("http://127.0.0.1:") and other.startswith("http://[::1]:")
        for url in (one, other):
            asked = {"prompt": "Once", "max_tokens": 1}
            told = posted(url, "/v1/completions", **asked)
            assert told["__verbose"]["prompt"].endswith("Once")  # with -v, unless a body says otherwise
            assert "__verbose" not in posted(url, "/v1/completions", **asked, verbose=False)


def serve(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pykvgraph", "serve", "-m", str(STORIES), "--port", "0", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--grammar root::=(", "can't read the grammar"),
        ("-l 600+1", "--logit-bias: 600 is no token of this model's 512"),
        ("-j {5", "--json-schema is no JSON"),
        ("--samplers top_k;nothing", "--samplers: "),
        ("--log-file /nowhere/file", "/nowhere/file"),
        ("--rope-scale 2 --rope-freq-scale 0.5", "leave one out"),
    ],
)
def test_what_every_request_would_be_refused_for_ends_the_server(options: str, told: str) -> None:
    done = serve(*options.split())
    assert done.returncode in (1, 2)
    assert told in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_the_log_goes_to_a_file(tmp_path: Path) -> None:
    with served_alone(STORIES, "--log-file", str(tmp_path / "log")) as (_, process):
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert "SIGTERM: whoever is answered may finish" in (tmp_path / "log").read_text()
        assert "SIGTERM" in said_by(process)
