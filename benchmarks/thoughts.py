"""A conversation whose template drops thoughts, with and without --prepare-turns, beside llama-server.

    python benchmarks/thoughts.py                     # minutes a model and server
    python benchmarks/thoughts.py --only llama --turns 5

Each turn thinks for --thoughts tokens and answers with --said; the client sends answers back without their
thoughts, by /v1/chat/completions on loopback, and reads for --reads seconds. The weights are random: each
server goes on from its own answers. A table tells, over all turns but the first, how many tokens up to the
last answer's end were decoded while the user waited, and the milliseconds to the first token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from shapes import QWEN35, ROOT, machine, with_tokenizer, written
from support.architectures import ArchSpec  # shapes has told where
from support.models import ModelSpec, WeightType
from support.thought_marks import with_marks

import pykvgraph as kvg
from pykvgraph.bench.servers import started

SERVER = ROOT.parent / "shared" / "rivals" / "bin" / "llama-server"
MODELS: dict[str, ModelSpec | ArchSpec] = {
    "llama": ModelSpec(n_layer=6, n_embd=512, n_head=8, n_head_kv=4, n_ff=1536, weights=WeightType.Q8_0),
    "qwen35": replace(QWEN35, n_layer=4, n_embd=512, n_ff=1536),
}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}\n</think>{% endif %}{% endif %}"
)
OURS = {
    "pykvgraph": (),
    "approximate": ("--cache-edit", "approximate"),
    "unprepared": ("--no-prepare-turns",),
}
THEIRS = {"llama-server": (), "cache-reuse": ("--cache-reuse", "32")}
WORDS = ("What did the little dog find?", "And then, what did he say?", "Why was she so sad that day?")


class Client:
    """Keeps a conversation. unwanted: tokens that no answer has."""

    def __init__(self, port: int, unwanted: list[int], args: argparse.Namespace) -> None:
        self._address = f"http://127.0.0.1:{port}"
        self._body = {
            "temperature": 0,
            "ignore_eos": True,
            "logit_bias": [[token, False] for token in unwanted],
            "reasoning_budget_tokens": args.thoughts,
            "max_tokens": args.thoughts + args.said,
            "timings_per_token": True,
        }
        self._messages: list[dict[str, str]] = []

    def say(self, words: str) -> tuple[int, float]:
        """The old tokens that were decoded for it, and the milliseconds that its prompt took."""
        n_old = self._n_old() if self._messages else 0
        self._messages.append({"role": "user", "content": words})
        told = self._post("/v1/chat/completions", {**self._body, "messages": self._messages})
        content = told["choices"][0]["message"]["content"]
        if not content:
            raise RuntimeError("the answer has no words behind its thoughts: give more --said")
        self._messages.append({"role": "assistant", "content": content})
        timings = told["timings"]
        return max(n_old - timings["cache_n"], 0), timings["prompt_ms"]

    def _n_old(self) -> int:
        """Tokens up to the last answer's end."""
        words = "words"
        messages = [*self._messages, {"role": "user", "content": words}]
        prompt = self._post("/apply-template", {"messages": messages})["prompt"]
        old = prompt.rpartition(f"<|user|>{words}")[0]
        body = {"content": old, "add_special": True, "parse_special": True}
        return len(self._post("/tokenize", body)["tokens"])

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        asked = urllib.request.Request(
            self._address + path, data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=600) as reply:
            return json.loads(reply.read())


def converse(client: Client, args: argparse.Namespace) -> dict[str, Any]:
    n_old, firsts = [], []
    for turn in range(args.turns):
        n, ms = client.say(WORDS[turn % len(WORDS)])
        if turn:
            n_old.append(n)
            firsts.append(ms)
        time.sleep(args.reads)
    return {"old": n_old, "first_ms": round(statistics.median(firsts), 1)}


def servers(model: Path, template: Path, args: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Those that were asked for, with their commands."""
    n_ctx = -(-args.turns * (args.said + 60) // 256) * 256 + 2 * (args.thoughts + 256)
    options = ["-m", str(model), "-c", str(n_ctx), "-np", "1", "-t", str(args.threads)]
    options += ["--chat-template-file", str(template), "--jinja"]
    for name in args.servers:
        if name in THEIRS and not args.server.exists():
            print(f"SKIPPED: {name}: there is none at {args.server}; give --server", file=sys.stderr)
        elif name in THEIRS:
            yield name, [str(args.server), *options, *THEIRS[name]]
        else:
            yield name, [sys.executable, "-m", "pykvgraph", "serve", *options, *OURS[name]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = ROOT / "build"
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), help="models")
    parser.add_argument("--models", type=Path, default=folder / "models", help="folder of the models")
    parser.add_argument("--server", type=Path, default=SERVER, help="llama-server (default: %(default)s)")
    names = [*OURS, *THEIRS]
    parser.add_argument("--servers", nargs="+", choices=names, default=names, help="which, with what options")
    parser.add_argument("--threads", type=int, default=2, help="of each server")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--thoughts", type=int, default=300, help="tokens of each thought")
    parser.add_argument("--said", type=int, default=100, help="tokens behind it, its end mark among them")
    parser.add_argument(
        "--reads", type=float, default=2.0, help="seconds between an answer and the next turn"
    )
    parser.add_argument("--json", type=Path, default=folder / "thoughts.json", help="what was measured")
    args = parser.parse_args()
    args.models.mkdir(parents=True, exist_ok=True)
    template = args.models / "thoughts.jinja"
    template.write_text(TEMPLATE, encoding="utf-8")
    report: dict[str, Any] = {"machine": machine(), "turns": args.turns, "thoughts": args.thoughts}
    for name in args.only:
        source = written(MODELS[name], args.models)
        path = source.with_name(f"thoughts-{name}.gguf")
        if not path.exists():
            with_marks(with_tokenizer(source, source.with_name(f"words-{name}.gguf")), path)
        with kvg.Model(path, device="cpu") as model:
            pieces = [model.tokenizer.token_to_piece(token) for token in range(model.n_vocab)]
        unwanted = [
            token
            for token, piece in enumerate(pieces)
            if not (piece.isascii() and piece.decode().isprintable())
        ]
        print(f"{name:<16}{'old tokens decoded':>20}{'first ms':>10}")
        for server, command in servers(path, template, args):
            with args.json.with_suffix(".log").open("ab") as log, started(command, log) as port:
                found = converse(Client(port, unwanted, args), args)
            report.setdefault(name, {})[server] = found
            print(f"{server:<16}{sum(found['old']):>20}{found['first_ms']:>10}", flush=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
