"""One process reads the prompt, another one writes the answer; the cache travels while it is computed.

    python examples/disaggregated.py -m model.gguf -p "Once upon a time" -n 120
    python examples/disaggregated.py -m model.gguf --measure 2000

Each layer's K and V leave while the layers behind it are computed, so the answer begins when the prompt has
been read. --measure N: the time to the first token of N random tokens beside that of one process, by turns.
On two machines the address would be tcp:HOST:PORT, with a token.
"""

from __future__ import annotations

import argparse
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import pykvgraph as kvg
from pykvgraph import stream
from pykvgraph.sequence.detokenizer import Detokenizer

LONG = 3600.0  # seconds that an end waits for the other one
N_BATCH = 512
N_TURNS = 7
WANTED, FIRST, SAID = "wanted", "first", "said"  # regions beside those of the cache: a number each
NUMBER = struct.Struct("<q")


def main() -> None:
    parser = argparse.ArgumentParser(description="Prompts here, answers there.")
    parser.add_argument("-m", metavar="MODEL", required=True, help="a GGUF file")
    parser.add_argument("-p", metavar="PROMPT", default="Once upon a time", help="what the text begins with")
    parser.add_argument("-n", type=int, default=120, help="tokens behind the prompt (default: 120)")
    parser.add_argument("-t", type=int, help="CPU threads (default: all, one for a tiny model)")
    parser.add_argument(
        "--measure", type=int, metavar="N", help="times of prompts of N tokens, in place of -p"
    )
    parser.add_argument("--decode", metavar="ADDRESS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    with kvg.Model(args.m) as model:
        prompt = (
            model.tokenizer.encode(args.p) if args.measure is None else random_prompt(model, args.measure)
        )
        n_ctx = len(prompt) + args.n
        with kvg.Context(
            model, n_ctx=n_ctx, n_batch=N_BATCH, n_threads=args.t, n_threads_batch=args.t
        ) as ctx:
            if args.decode:
                decode_worker(ctx, args.decode)
                return
            with decoder(sys.argv[1:]) as end:
                if args.measure is None:
                    write(ctx, end, prompt, args.n)
                else:
                    measure(ctx, end, prompt)


def random_prompt(model: kvg.Model, n: int) -> list[int]:
    rng = random.Random(0)
    return [rng.randrange(model.n_vocab) for _ in range(n)]


@contextmanager
def decoder(arguments: Sequence[str]) -> Iterator[stream.Transport]:
    """The process that decodes, and our end of what connects this one with it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        stream.listen(f"unix:{folder}/s", timeout=60) as listener,
        subprocess.Popen([sys.executable, __file__, *arguments, "--decode", listener.address]) as process,
    ):
        try:
            with listener.accept() as end:
                yield end
                put(end, WANTED, 0)
                process.wait()
        finally:
            process.terminate()


def decode_worker(ctx: kvg.Context, address: str) -> None:
    """For each prompt: takes its cache as it comes, then the likeliest tokens, as many as are wanted."""
    with stream.open(address, timeout=LONG) as end:
        layout = stream.Layout({end: range(ctx.model.n_layer)})
        while n := take(end, WANTED):
            stream.stream_in(ctx, 0, layout)
            token = take(end, FIRST)
            put(end, SAID, token)
            for _ in range(n - 1):
                token = int(np.argmax(ctx.append(token)))
                put(end, SAID, token)
            ctx.reset()


def answer(ctx: kvg.Context, end: stream.Transport, prompt: list[int], n: int) -> Iterator[int]:
    """Reads the prompt here; the tokens are the other process's."""
    put(end, WANTED, n)
    with stream.following(ctx, 0, stream.Layout({end: range(ctx.model.n_layer)})) as out:
        first = read(ctx, prompt, out.send)
    put(end, FIRST, first)
    ctx.reset()
    for _ in range(n):
        yield take(end, SAID)


def read(ctx: kvg.Context, prompt: list[int], decoded: Callable[[], None] = lambda: None) -> int:
    """The likeliest token behind a prompt. decoded: called after each decode."""
    for begin in range(0, len(prompt), N_BATCH):
        batch = kvg.Batch()
        batch.extend(prompt[begin : begin + N_BATCH], begin)
        ctx.decode(batch)
        decoded()
    return int(np.argmax(ctx.logits()[-1]))


def write(ctx: kvg.Context, end: stream.Transport, prompt: list[int], n: int) -> None:
    tokenizer = ctx.model.tokenizer
    print(tokenizer.decode(prompt), end="", flush=True)
    said = Detokenizer()  # a letter may span tokens
    for token in answer(ctx, end, prompt, n):
        print(said.feed(tokenizer.token_to_piece(token)), end="", flush=True)
    print(said.finish())


def measure(ctx: kvg.Context, end: stream.Transport, prompt: list[int]) -> None:
    """The first turn of each is not counted."""
    alone, apart = [], []
    for _ in range(N_TURNS + 1):
        begin = time.perf_counter()
        read(ctx, prompt)
        alone.append(time.perf_counter() - begin)
        ctx.reset()
        begin = time.perf_counter()
        for _ in answer(ctx, end, prompt, 1):
            apart.append(time.perf_counter() - begin)
    ratio = statistics.median(a / b for a, b in zip(apart[1:], alone[1:], strict=True))
    print(
        f"{len(prompt)} tokens, medians of {N_TURNS}: the first token after "
        f"{statistics.median(alone[1:]):.3f} s in one process, {statistics.median(apart[1:]):.3f} s in two; "
        f"by turns {ratio:.3f} x"
    )


def put(end: stream.Transport, key: str, number: int) -> None:
    end.flush(key, NUMBER.pack(number))


def take(end: stream.Transport, key: str) -> int:
    data = bytearray(NUMBER.size)
    end.fetch(key, data)
    return int(NUMBER.unpack(data)[0])


if __name__ == "__main__":
    try:
        main()
    except (kvg.KVGraphError, OSError) as error:
        sys.exit(f"{Path(__file__).name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
