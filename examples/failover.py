"""A process that writes a text is killed in the middle of it; another one goes on at the same token.

    python examples/failover.py -m model.gguf -p "Once upon a time" -n 120 --kill-after 40

The worker is a process of its own. Each of its steps comes here: the new rows of the cache, and the token
that was chosen. This process has decoded nothing, but has all that it takes to go on, at once: the prompt is
not decoded again. On two machines the address would be tcp:HOST:PORT, with a token.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from screen import Screen  # beside this file

import pykvgraph as kvg
from pykvgraph import stream

LONG = 3600.0  # seconds: longer than any pause of the text
N_BATCH = 512


def main() -> None:
    parser = argparse.ArgumentParser(description="A text that outlives its process.")
    parser.add_argument("-m", metavar="MODEL", required=True, help="a GGUF file")
    parser.add_argument("-p", metavar="PROMPT", default="Once upon a time", help="what the text begins with")
    parser.add_argument("-n", type=int, default=120, help="tokens behind the prompt (default: 120)")
    parser.add_argument("-t", type=int, help="CPU threads (default: all, one for a tiny model)")
    parser.add_argument("--kill-after", type=int, default=40, help="tokens; 0: never (default: 40)")
    parser.add_argument("--worker", metavar="ADDRESS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    with kvg.Model(args.m) as model:
        prompt = model.tokenizer.encode(args.p)
        threads = {"n_threads": args.t, "n_threads_batch": args.t}
        with kvg.Context(model, n_ctx=len(prompt) + args.n, n_batch=N_BATCH, **threads) as ctx:
            if args.worker:
                work(ctx, args.worker, prompt, args.n)
            else:
                watch(ctx, sys.argv[1:], args.kill_after, len(prompt), args.n)


def work(ctx: kvg.Context, address: str, prompt: list[int], n: int) -> None:
    """The worker: the likeliest tokens, each of which goes to the peer with its step."""
    with stream.open(address, timeout=LONG) as end:
        layout = stream.Layout({end: range(ctx.model.n_layer)})
        with stream.replicated(ctx, 0, layout, prompt) as copy:
            for begin in range(0, len(prompt), N_BATCH):
                batch = kvg.Batch()
                batch.extend(prompt[begin : begin + N_BATCH], begin)
                ctx.decode(batch)
                if begin + N_BATCH < len(prompt):
                    copy.send()
            logits = ctx.logits()[-1]
            for _ in range(n):
                token = int(np.argmax(logits))
                copy.send([token])
                logits = ctx.append(token)


def watch(ctx: kvg.Context, arguments: list[str], kill_after: int, n_prompt: int, n: int) -> None:
    """The peer: starts the worker, kills it, and goes on."""
    screen = Screen(ctx.model.tokenizer)
    with (
        tempfile.TemporaryDirectory() as folder,
        stream.listen(f"unix:{folder}/s", timeout=60) as listener,
        subprocess.Popen([sys.executable, __file__, *arguments, "--worker", listener.address]) as worker,
        listener.accept() as end,
    ):
        copy = stream.replica(ctx, 0, stream.Layout({end: range(ctx.model.n_layer)}))
        try:
            for n_text in copy:
                screen.show(copy.text)
                if kill_after and n_text >= n_prompt + kill_after:
                    worker.kill()
        except kvg.TransportError:
            go_on(ctx, copy.text, copy.go_on(), n_prompt + n, screen)
    screen.end()


def go_on(ctx: kvg.Context, text: list[int], undecoded: list[int], n_text: int, screen: Screen) -> None:
    begin = time.perf_counter()
    for token in undecoded:
        logits = ctx.append(token)
    seconds = time.perf_counter() - begin
    screen.tell(
        f"\n[killed; {len(undecoded)} tokens decoded here, the next one after {seconds * 1e3:.0f} ms]\n"
    )
    while undecoded and len(text) < n_text:
        text.append(int(np.argmax(logits)))
        screen.show(text)
        logits = ctx.append(text[-1])


if __name__ == "__main__":
    try:
        main()
    except (kvg.KVGraphError, OSError) as error:
        sys.exit(f"{Path(__file__).name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
