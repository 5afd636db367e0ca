"""A chat that goes on when its context is full; with --story, an endless story.

    python examples/chat.py -m model.gguf
    python examples/chat.py -m model.gguf --story

When every cell of the cache is used, the first few are kept, half of the others are discarded, and the rest
move down: their positions change, their K is rotated to the new ones, and the holes are filled. Nothing is
decoded again. Each time, a line on stderr says what was done.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pykvgraph as kvg

STORY_OPENING = "Once upon a time"
MAX_DEFAULT_CTX = 4096

# a private character that stands for an answer in a rendered template
ANSWER = "\ue000"


def main() -> None:
    parser = argparse.ArgumentParser(description="Chats, or tells a story, beyond the end of the context.")
    parser.add_argument("-m", metavar="MODEL", required=True, help="a GGUF file")
    parser.add_argument("--story", action="store_true", help="tell a story instead of chatting")
    parser.add_argument(
        "-n", type=int, help="tokens of the story (default: 4 contexts), or of an answer (default: 512)"
    )
    parser.add_argument(
        "-c", type=int, help=f"cells of the cache (default: the model's context, at most {MAX_DEFAULT_CTX})"
    )
    parser.add_argument(
        "--n-keep", type=int, default=4, help="first tokens that are never discarded (default: 4)"
    )
    parser.add_argument("--temp", type=float, default=0.7, help="temperature (default: 0.7)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sampler (default: 1)")
    parser.add_argument("-t", type=int, help="CPU threads (default: all, one for a tiny model)")
    args = parser.parse_args()
    if sys.stdin is None and not args.story:
        sys.exit("chat.py: stdin is closed, and a chat reads lines from it. Open it, or use --story")
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what can't be read or shown doesn't end the talk

    with kvg.Model(args.m) as model:
        n_ctx = args.c or min(model.n_ctx_train, MAX_DEFAULT_CTX)
        with kvg.Context(model, n_ctx=n_ctx, n_threads=args.t) as ctx, Page() as page:
            (tell_stories if args.story else chat)(ctx, page, args)


def tell_stories(ctx: kvg.Context, page: Page, args: argparse.Namespace) -> None:
    """One story after another in the same sequence: the earlier ones fade as they are shifted out."""
    tokenizer = ctx.model.tokenizer
    shift = kvg.ContextShift(n_keep=args.n_keep, on_shift=page.show_shift)
    opening = tokenizer.encode(STORY_OPENING)  # with BOS, which tells the model to begin anew
    n_left = args.n or 4 * ctx.n_ctx
    for n_told in itertools.count():
        page.write(STORY_OPENING)
        previous = None
        for piece in kvg.generate(
            ctx,
            opening,
            max_tokens=n_left,
            temperature=args.temp,
            top_p=0.9,
            seed=args.seed + n_told,
            on_full=shift,
        ):
            n_left -= 1
            # some models begin the next story by themselves
            if piece.token == tokenizer.bos:
                page.write("\n\n")
            page.write(piece.text.lstrip() if previous == tokenizer.bos else piece.text)
            previous = piece.token
        page.end()
        if n_left == 0:
            break
        page.write("\n")


def chat(ctx: kvg.Context, page: Page, args: argparse.Namespace) -> None:
    """Reads lines from stdin and answers; Ctrl-C stops an answer. A turn decodes only what is new."""
    tokenizer = ctx.model.tokenizer
    turn, stop = chat_format(ctx.model)
    shift = kvg.ContextShift(n_keep=args.n_keep, on_shift=page.show_shift)
    while (line := read_line()) is not None:
        first = ctx.kv.seq_pos_max(0) < 0
        ids = tokenizer.encode(
            turn(line, first), add_special=first, parse_special=True, add_space_prefix=first
        )
        with interrupts() as interrupted:
            for piece in kvg.generate(
                ctx,
                ids,
                max_tokens=args.n or 512,
                temperature=args.temp,
                seed=args.seed,
                stop=stop,
                on_full=shift,
            ):
                page.write(piece.text)
                if interrupted.is_set():
                    break
        # the cache keeps the last token of an answer that was cut off; what ends one is in the next turn
        page.end()


@contextlib.contextmanager
def interrupts() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that nothing ends half done; a second one raises KeyboardInterrupt."""
    event = threading.Event()

    def interrupt(_signal: int, _frame: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def chat_format(model: kvg.Model) -> tuple[Callable[[str, bool], str], list[str]]:
    """What makes a line, the first or a later one, the text to decode; and what ends an answer."""
    template = model.metadata.get("tokenizer.chat_template")
    if template is None:
        return plain_turn, ["\n"]
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    eos = model.tokenizer.eos
    eos_text = "" if eos is None else model.metadata["tokenizer.ggml.tokens"][eos]
    # the tokenizer adds BOS, once
    formatter = Jinja2ChatFormatter(template, eos_token=eos_text, bos_token="")

    def turn(line: str, first: bool) -> str:
        messages: list[Any] = [{"role": "user", "content": line}]
        if not first:
            messages = [{"role": "user", "content": ""}, {"role": "assistant", "content": ANSWER}, *messages]
        prompt: str = formatter(messages=messages).prompt
        return prompt.rpartition(ANSWER)[2]

    return turn, []


def plain_turn(line: str, first: bool) -> str:
    """For a model without a chat template: one line per speaker."""
    return f"User: {line}\nAssistant:" if first else f"\nUser: {line}\nAssistant:"


def read_line() -> str | None:
    """The next line of stdin that says something; None at its end."""
    on_terminal = sys.stdin.isatty()
    if on_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() a history
    try:
        while not (line := input("> " if on_terminal else "")).strip():
            pass
        return line
    except (EOFError, KeyboardInterrupt) as end:
        if on_terminal:
            print()  # after the prompt
        if isinstance(end, KeyboardInterrupt):
            raise
        return None


class Page:
    """Prints text as it comes, and breaks lines between words. A `with` ends the last line, come what may."""

    def __init__(self) -> None:
        self.width = (
            shutil.get_terminal_size().columns - 1
        )  # some terminals go to the next line after a full one
        self.column = 0
        self.gap = ""  # spaces that come before the next word of the line
        self.begun = ""  # a word that may go on

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.end()

    def write(self, text: str) -> None:
        *words, self.begun = re.split(r"(?<=\s)", self.begun + text)
        for word in words:
            self._put(word)

    def end(self) -> None:
        """What was begun is all there is."""
        self._put(self.begun)
        self.begun = ""
        self._end_line()

    def show_shift(self, report: kvg.ShiftReport) -> None:
        """One line on stderr, dimmed on a terminal."""
        self._end_line()
        line = f"[context full: {report.n_discard} positions discarded, {report.stats}]"
        dimmed = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        print(f"\x1b[2m{line}\x1b[0m" if dimmed else line, file=sys.stderr)

    def _put(self, word: str) -> None:
        text = word.rstrip()
        if text:
            if self.column + len(self.gap + text) > self.width:
                self._end_line()
            print(self.gap + text, end="", flush=True)
            self.column += len(self.gap + text)
            self.gap = ""
        self.gap += word[len(text) :]
        if self.gap.endswith("\n"):
            print(flush=True)
            self.column, self.gap = 0, ""

    def _end_line(self) -> None:
        if self.column > 0:
            print(flush=True)
        self.column, self.gap = 0, ""


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the reader has gone: nothing is left to say, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (kvg.KVGraphError, OSError) as error:
        sys.exit(f"chat.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
