"""Hides a key in junk, reads a text that is longer than the context, and asks for the key.

    python examples/passkey.py -m model.gguf --n-junk 250 --i-pos 90
    python examples/passkey.py -m model.gguf --n-junk 250 --i-pos 90 --n-grp 4

When the cache is full, older text is discarded for newer: a key that is far from the end is forgotten. With
--n-grp above 1, that many neighbours share a position (self-extend, arXiv:2401.01325): the text takes fewer
positions than it has tokens, and the model reads more than it was trained for.

After llama.cpp's example of this name, with its text, which comes from Landmark Attention (arXiv:2305.16300).
Exits with 0 only if the key was found.
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
MAX_DEFAULT_CTX = 4096


def main() -> int:
    args = parse_arguments()
    rng = random.Random(args.seed)
    key = str(rng.randint(10000, 99999))
    i_pos = rng.randrange(args.n_junk) if args.i_pos is None else args.i_pos

    with kvg.Model(args.m) as model:
        junk = [JUNK] * args.n_junk
        junk.insert(i_pos, f" The pass key is {key}. Remember it. {key} is the pass key.")
        text = model.tokenizer.encode(TASK + "".join(junk) + QUESTION)
        n_question = len(model.tokenizer.encode(QUESTION, add_special=False))
        document, question = text[:-n_question], text[-n_question:]

        # as many cells as fit the positions that the model knows: in groups, but for the newest batch
        n_positions = min(model.n_ctx_train, MAX_DEFAULT_CTX)
        n_batch = args.b or max(n_positions // 4, 1)
        n_ctx = args.c or (n_positions - n_batch) * args.n_grp + n_batch

        print(f"{len(text)} tokens, the key after {i_pos} of {args.n_junk} pieces of junk")
        print(f"{n_ctx} cells, batches of {n_batch}, groups of {args.n_grp}")
        with kvg.Context(model, n_ctx=n_ctx, n_batch=n_batch, n_threads=args.t) as ctx:
            reader = kvg.LongReader(ctx, n_keep=args.n_keep, n_grp=args.n_grp, on_shift=tell)
            reader.read(document)  # batch by batch, whatever its length
            reader.make_room(n_question + N_ANSWER)
            # goes on where the document ended
            answer = "".join(piece.text for piece in kvg.generate(ctx, question, max_tokens=N_ANSWER))

    said = re.search(r"\d+", answer)
    found = said is not None and said[0] == key
    print(f"{QUESTION.strip()}{answer!r}")
    print(f"the key was {key}: {'found' if found else 'not found'}")
    return 0 if found else 1


def tell(report: kvg.ShiftReport) -> None:
    end = report.n_keep + report.n_discard
    print(f"shift: positions {report.n_keep} to {end - 1} discarded, {report.stats}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Hides a key in a text longer than the context, and asks for it."
    )
    parser.add_argument("-m", metavar="MODEL", required=True, help="a GGUF file")
    parser.add_argument("--n-junk", type=int, default=250, help="pieces of junk (default: 250)")
    parser.add_argument("--i-pos", type=int, help="pieces of junk before the key (default: random)")
    parser.add_argument("--n-grp", type=int, default=1, help="neighbours that share a position (default: 1)")
    parser.add_argument(
        "--n-keep", type=int, default=32, help="first positions, never discarded (default: 32)"
    )
    parser.add_argument("-c", type=int, help="cells of the cache (default: what the model was trained for)")
    parser.add_argument("-b", type=int, help="tokens of a batch (default: a quarter of that)")
    parser.add_argument(
        "-t", type=int, help="CPU threads (default: all CPUs; 1 for a model under 10 million parameters)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the key and its place (default: 1)")
    args = parser.parse_args()
    if args.n_junk < 1 or args.n_grp < 1 or args.n_keep < 0:
        parser.error("--n-junk and --n-grp must be at least 1, --n-keep at least 0")
    if args.i_pos is not None and not 0 <= args.i_pos <= args.n_junk:
        parser.error(f"--i-pos must be from 0 to {args.n_junk}, the pieces of junk")
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
