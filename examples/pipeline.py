"""A model in several processes: each has some of the layers, and hands hidden states to the next one.

    python examples/pipeline.py -m model.gguf -p "Once upon a time" -n 120 --stages 3
    python examples/pipeline.py -m model.gguf -n 120 --stages 2 --kill-after 40 --then 3

No process loads more than its layers. --kill-after N: the last stage is killed then, and the text goes on
from what all stages have saved last, in as many processes as --then says. The text is the same in each case,
also with --stages 1. On several machines the addresses would be tcp:HOST:PORT, with a token.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from screen import Screen  # beside this file

import pykvgraph as kvg
from pykvgraph import stream

Logits = npt.NDArray[np.float32]
LONG = 3600.0  # seconds that a stage waits for the one before it
N_BATCH = 512
SAVE_EVERY = 16  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="One model, several processes.")
    parser.add_argument("-m", metavar="MODEL", required=True, help="a GGUF file")
    parser.add_argument("-p", metavar="PROMPT", default="Once upon a time", help="what the text begins with")
    parser.add_argument("-n", type=int, default=120, help="tokens behind the prompt (default: 120)")
    parser.add_argument("-c", type=int, default=1024, help="cells (default: 1024)")
    parser.add_argument("--stages", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--kill-after", type=int, default=0, help="tokens; 0: never (default: 0)")
    parser.add_argument("--then", type=int, help="processes behind that (default: as many as before)")
    parser.add_argument(
        "--stage", nargs=4, metavar=("BEGIN", "END", "BEFORE", "AFTER"), help=argparse.SUPPRESS
    )
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        work(args)
        return
    with kvg.GgufFile(args.m) as file:
        n_layer = file.model_info().n_layer
    if not 1 <= min(args.stages, args.then or 1) <= max(args.stages, args.then or 1) <= n_layer:
        sys.exit(f"pipeline.py: the model has {n_layer} layers, so 1 to {n_layer} stages")
    write(args, cut(n_layer, args.stages), cut(n_layer, args.then or args.stages))


def cut(n_layer: int, n_stages: int) -> list[range]:
    """The layers of each stage, as evenly as they go."""
    ends = [n_layer * i // n_stages for i in range(n_stages + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]


def work(args: argparse.Namespace) -> None:
    """A stage behind the first."""
    begin, end, before, after = args.stage
    with (
        stream.listen(before, timeout=LONG) as listener,
        kvg.Model(args.m, layers=range(int(begin), int(end))) as model,
        kvg.Context(model, n_ctx=args.c, n_batch=N_BATCH) as ctx,
    ):
        to_next = reach(after)
        stream.run_stage(ctx, listener.accept(), to_next, args.folder)


def reach(address: str) -> stream.Transport:
    """An end of what listens there, as soon as it does."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return stream.open(address, timeout=LONG)
        except kvg.TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


class Line:
    """The stages of a text while it is written: a pipeline, and the processes of the others."""

    def __init__(
        self, pipe: stream.Pipeline, workers: list[subprocess.Popen[bytes]], links: Sequence[stream.Transport]
    ) -> None:
        self.pipe = pipe
        self.workers = workers
        self.links = links
        self.greeted = [link.bytes_sent for link in links]


@contextmanager
def line_of(args: argparse.Namespace, cuts: Sequence[range], folder: str, name: str) -> Iterator[Line]:
    """Starts the stages. Each link of the ring is a socket, at which the stage listens that it leads to."""
    addresses = [f"unix:{folder}/{name}{i}" for i in range(len(cuts))]  # of what leads to stage i
    with ExitStack() as stack:
        back = stack.enter_context(stream.listen(addresses[0], timeout=60)) if len(cuts) > 1 else None
        workers = []
        for i, layers in enumerate(cuts[1:], 1):
            stage = [str(layers.start), str(layers.stop), addresses[i], addresses[(i + 1) % len(cuts)]]
            same = ["-m", args.m, "-c", str(args.c), "--folder", folder]
            workers.append(subprocess.Popen([sys.executable, __file__, *same, "--stage", *stage]))
            stack.callback(workers[-1].wait)
            stack.callback(workers[-1].terminate)
        model = stack.enter_context(kvg.Model(args.m, layers=cuts[0]))
        ctx = stack.enter_context(kvg.Context(model, n_ctx=args.c, n_batch=N_BATCH))
        before = back.accept() if back is not None else None
        after = reach(addresses[1]) if back is not None else None
        with stream.Pipeline(ctx, after, before, folder) as pipe:
            yield Line(pipe, workers, [] if after is None or before is None else [after, before])


def write(args: argparse.Namespace, cuts: list[range], then: list[range]) -> None:
    with kvg.Model(args.m, layers=cuts[0]) as model:
        tokenizer = model.tokenizer
    text = Text(tokenizer.encode(args.p), args.n)
    screen = Screen(tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        try:
            with line_of(args, cuts, folder, "first-") as line:
                text.write(line, text.read(line), screen, args.kill_after, then)
                report(line, len(cuts), len(text.tokens))
        except kvg.TransportError:
            screen.tell(
                f"\n[a stage was killed; {text.n_saved} tokens were saved, and go on in {len(then)}]\n"
            )
            with line_of(args, then, folder, "then-") as line:
                line.pipe.load(0, text.name, cuts)
                text.write(line, text.again(line), screen, 0, then)
    screen.end()


def report(line: Line, n_stages: int, n_decoded: int) -> None:
    if line.links:
        n_bytes = line.links[0].bytes_sent - line.greeted[0]
        print(
            f"\n[{n_decoded} tokens: {n_bytes:,} bytes from each of {n_stages} stages to the next]",
            file=sys.stderr,
        )


class Text:
    """The tokens so far, and what of them is saved."""

    def __init__(self, prompt: list[int], n: int) -> None:
        self.tokens = prompt
        self.n_prompt = len(prompt)
        self.n = len(prompt) + n
        self.n_saved = 0

    @property
    def name(self) -> str:
        """Of what is saved."""
        return f"text-{self.n_saved}"

    def read(self, line: Line) -> Logits:
        """The logits behind the prompt."""
        for begin in range(0, self.n_prompt, N_BATCH):
            batch = kvg.Batch()
            batch.extend(self.tokens[begin : begin + N_BATCH], begin)
            logits: Logits = line.pipe.decode(batch)[-1]
        return logits

    def again(self, line: Line) -> Logits:
        """The logits behind the last token, when those behind what was saved are decoded again."""
        for token in self.tokens[self.n_saved :]:
            logits = line.pipe.append(token)
        return logits

    def write(
        self, line: Line, logits: Logits, screen: Screen, kill_after: int, then: Sequence[range]
    ) -> None:
        """The likeliest tokens."""
        screen.show(self.tokens)
        while len(self.tokens) < self.n:
            self.tokens.append(int(np.argmax(logits)))
            screen.show(self.tokens)
            n_said = len(self.tokens) - self.n_prompt
            if kill_after and n_said % SAVE_EVERY == 1:
                self.n_saved = len(self.tokens) - 1  # those that are decoded
                line.pipe.save(0, self.name, then)
            if n_said == kill_after and line.workers:
                line.workers[-1].kill()
            logits = line.pipe.append(self.tokens[-1])


if __name__ == "__main__":
    try:
        main()
    except (kvg.KVGraphError, OSError) as error:
        sys.exit(f"{Path(__file__).name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
