"""Hides a key in junk, reads a text that is longer than the context, and asks for the key.

    python examples/passkey.py model.gguf 250 2 90

are the model, pieces of junk, how many neighbours share a position, and the pieces before the key.

The cache has a cell for each position that the model was trained on, times the neighbours, and some more.
When it is full, older text is discarded for newer: a key that is far from the end is forgotten. With
neighbours that share a position (self-extend, arXiv:2401.01325) the text takes fewer positions than it has
tokens, and the model reads more than it was trained for. `pykvgraph.LongReader` does the same for a program.

After llama.cpp's example of this name, with its arguments and its text, which comes from Landmark Attention
(arXiv:2305.16300). Exits with 0 only if the key was found.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys

import pykvgraph as kvg

TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them."
    " I will quiz you about the important information there."
)
JUNK = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
QUESTION = " What is the pass key? The pass key is"
N_ANSWER = 16  # tokens; a key has five digits


def main() -> int:
    args = parse_arguments()
    rng = random.Random(args.seed)
    key = str(rng.randint(10000, 99999))
    i_pos = rng.randrange(args.n_junk) if args.i_pos < 0 else args.i_pos

    with kvg.Model(args.model) as model:
        junk = [JUNK] * args.n_junk
        junk.insert(i_pos, f" The pass key is {key}. Remember it. {key} is the pass key.")
        text = model.tokenizer.encode(TASK + "".join(junk) + QUESTION)
        n_question = len(model.tokenizer.encode(QUESTION, add_special=False))
        document, question = text[:-n_question], text[-n_question:]

        n_ctx = args.c or model.n_ctx_train * args.n_grp + args.n_keep
        n_batch = args.b or max(min(512, n_ctx // 4) // args.n_grp, 1) * args.n_grp
        require_room(n_ctx, args.n_keep * args.n_grp, max(n_batch, n_question + N_ANSWER))
        print(f"{len(text)} tokens, the key after {i_pos} of {args.n_junk} pieces of junk")
        print(f"{n_ctx} cells, batches of {n_batch}, groups of {args.n_grp}")
        with kvg.Context(model, n_ctx=n_ctx, n_batch=n_batch, n_threads=args.t) as ctx:
            read(ctx, document, args.n_keep, args.n_grp)
            make_room(ctx.kv, n_question + N_ANSWER, args.n_keep, args.n_grp)
            # goes on where the document ended
            answer = "".join(piece.text for piece in kvg.generate(ctx, question, max_tokens=N_ANSWER))

    said = re.search(r"\d+", answer)
    found = said is not None and said[0] == key
    print(f"{QUESTION.strip()}{answer!r}")
    print(f"the key was {key}: {'found' if found else 'not found'}")
    return 0 if found else 1


def read(ctx: kvg.Context, document: list[int], n_keep: int, n_grp: int) -> None:
    """Decodes a text of any length into sequence 0, batch by batch."""
    newest = 0  # where the newest batch begins: its tokens have positions of their own
    for begin in range(0, len(document), ctx.n_batch):
        part = document[begin : begin + ctx.n_batch]
        if n_grp > 1 and begin:
            group(ctx.kv, newest, n_grp)
        make_room(ctx.kv, len(part), n_keep, n_grp)
        newest = ctx.kv.seq_pos_max(0) + 1
        batch = kvg.Batch()
        batch.extend(part, newest, (0,), logits=False)
        ctx.decode(batch)


def group(kv: kvg.KVCache, p0: int, n_grp: int) -> None:
    """From position p0 on, every n_grp neighbours get one position."""
    begin = p0 * n_grp  # on a multiple of n_grp, so that dividing begins a group there, and position p0
    kv.seq_add(0, p0, -1, begin - p0)
    kv.seq_div(0, begin, -1, n_grp)
    kv.update()  # rotates K to the new positions


def make_room(kv: kvg.KVCache, n_tokens: int, n_keep: int, n_grp: int) -> None:
    """Discards the oldest positions behind the first n_keep until so many cells are free."""
    while (n_missing := n_tokens - kv.n_free) > 0:
        end = n_keep + -(-n_missing // n_grp)
        kv.seq_rm(0, n_keep, end)
        kv.seq_add(0, end, -1, n_keep - end)  # those behind move down
        kv.defrag()  # cells from the end will fill the holes
        stats = kv.update()  # does that, and rotates K to the new positions
        print(f"shift: positions {n_keep} to {end - 1} discarded, {stats}")


def require_room(n_ctx: int, n_kept: int, n_tokens: int) -> None:
    if n_kept + n_tokens > n_ctx:
        sys.exit(
            f"passkey.py: {n_ctx} cells can't hold {n_kept} tokens that are kept, and {n_tokens} more: use a "
            "larger -c, or a smaller -b or --n-keep"
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Hides a key in a text longer than the context, and asks for it."
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a GGUF file")
    add("n_junk", metavar="N_JUNK", type=int, nargs="?", default=250, help="pieces of junk (default: 250)")
    add(
        "n_grp",
        metavar="N_GRP",
        type=int,
        nargs="?",
        default=1,
        help="neighbours on one position (default: 1)",
    )
    add(
        "i_pos",
        metavar="I_POS",
        type=int,
        nargs="?",
        default=-1,
        help="pieces before the key (default: random)",
    )
    add("seed", metavar="SEED", type=int, nargs="?", default=1, help="of the key and its place (default: 1)")
    add("--n-keep", type=int, default=32, help="first positions, never discarded (default: 32)")
    add("-c", type=int, help="cells of the cache (default: what the model was trained on x N_GRP + --n-keep)")
    add("-b", type=int, help="tokens of a batch (default: 512, at most a quarter of -c)")
    add("-t", type=int, help="CPU threads (default: all CPUs; 1 for a model under 10 million parameters)")
    args = parser.parse_intermixed_args()
    if args.n_junk < 1 or args.n_grp < 1 or args.n_keep < 0:
        parser.error("N_JUNK and N_GRP must be at least 1, --n-keep at least 0")
    if args.i_pos > args.n_junk:
        parser.error(f"I_POS must be at most {args.n_junk}, the pieces of junk; below 0: random")
    if args.b and args.b % args.n_grp:
        parser.error("-b must be a multiple of N_GRP, so that each batch ends with a whole group")
    return args


if __name__ == "__main__":
    try:
        code = main()
        sys.stdout.flush()
        sys.exit(code)
    except BrokenPipeError:  # the reader has gone: nothing is left to say, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except (kvg.KVGraphError, OSError) as error:
        sys.exit(f"passkey.py: {error}")
