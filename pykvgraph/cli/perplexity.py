"""`pykvgraph perplexity`: how well a model predicts a text, and how far one run is from another."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from pykvgraph.cli.adapters import Adapters, adapter_options
from pykvgraph.cli.progress import progress_on_terminal
from pykvgraph.cli.prompt import text_option
from pykvgraph.cli.show import new_table, print_json, print_table
from pykvgraph.cli.verb import (
    Verb,
    batch_option,
    cache_type_options,
    examples,
    flash_attn_option,
    json_option,
    model_option,
    option,
    threads_option,
    ubatch_option,
)
from pykvgraph.cli.where import Where, where_options
from pykvgraph.demos.perplexity import LEAST_N_CTX, N_CTX
from pykvgraph.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pykvgraph.context.context import Context
    from pykvgraph.demos.base_logits import BaseFile
    from pykvgraph.demos.perplexity import Chunks, Floats
    from pykvgraph.model.model import Model

_SHARES = ("max", "99_9", "99", "95", "90", "median", "10", "5", "1", "0_1", "min")


@click.command(
    cls=Verb,
    epilog=examples(
        "pykvgraph perplexity -m model.gguf -f a.txt -ctk q4_0 -ctv q4_0",
        "pykvgraph perplexity -m model.gguf -f a.txt --kl-divergence-base base",
        "pykvgraph perplexity -m model.gguf --kl-divergence --kl-divergence-base base",
    ),
)
@model_option(required=True)
@text_option("The text, in UTF-8, without the newline at its end; -: stdin. Not with --kl-divergence.")
@option(
    "-c",
    "--ctx-size",
    "n_ctx",
    type=click.IntRange(min=LEAST_N_CTX),
    metavar="N",
    show_default=f"{N_CTX}; with --kl-divergence the base's",
    help="Tokens of a chunk.",
)
@option(
    "--chunks",
    "n_chunks",
    type=click.IntRange(min=-1),
    metavar="N",
    default=-1,
    help="Chunks to read; -1: all that the text, or the base, has.",
)
@option(
    "--kl-divergence-base",
    "--save-all-logits",
    "base",
    type=click.Path(),
    metavar="FILE",
    help="Write all logits into this file; with --kl-divergence: read them from it.",
)
@option("--kl-divergence", is_flag=True, help="Compare with the logits, and the text, of the base.")
@batch_option()
@ubatch_option
@cache_type_options
@flash_attn_option
@threads_option()
@where_options
@adapter_options
@json_option
def perplexity(
    model: str,
    text: str | None,
    n_ctx: int | None,
    n_chunks: int,
    base: str | None,
    kl_divergence: bool,
    n_batch: int,
    n_ubatch: int,
    n_threads: int | None,
    where: Where,
    adapters: Adapters,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Tell a text's perplexity, as llama-perplexity does.

    The text is cut into chunks of -c tokens, and of each chunk the second half is predicted; BOS, where the
    model wants it, takes the place of each chunk's first token.

    With --kl-divergence the logits are compared with those of an earlier run, which wrote them by
    --kl-divergence-base: of another cache type, another quantization, or with an adapter. They take four
    bytes for each token that is predicted and each entry of the vocabulary: 50 MB for a chunk of 512 and a
    vocabulary of 49,152.
    """
    import pykvgraph as kvg
    from pykvgraph.demos.base_logits import BaseFile

    start = time.perf_counter()
    _require_one_source(text, base, kl_divergence)
    sizes |= {"n_ubatch": n_ubatch, "n_threads": n_threads, "n_threads_batch": n_threads}
    with kvg.Model(model, **where.model()) as loaded:
        sizes |= {**where.context(), "adapters": adapters.load(loaded)}
        if text is None:
            with BaseFile(str(base)) as file:
                told = _compare(loaded, file, n_ctx, n_chunks, n_batch, sizes)
        else:
            told = _measure(loaded, text, n_ctx or N_CTX, n_chunks, n_batch, base, sizes)
    told |= {"seconds": time.perf_counter() - start}
    if as_json:
        print_json(told)
    elif text is None:
        _show_divergence(told)
    else:
        _show_perplexity(told)


def _require_one_source(text: str | None, base: str | None, kl_divergence: bool) -> None:
    if kl_divergence and base is None:
        raise click.UsageError("--kl-divergence compares with a base: give --kl-divergence-base FILE")
    if kl_divergence and text is not None:
        raise click.UsageError("--kl-divergence reads the text of the base: leave out -f")
    if not kl_divergence and text is None:
        raise click.UsageError("Missing the text: give -f FILE.")


def _measure(
    model: Model, text: str, n_ctx: int, n_chunks: int, n_batch: int, base: str | None, sizes: dict[str, Any]
) -> dict[str, Any]:
    """A text's perplexity; its logits go into the file `base`, if there is one."""
    import numpy as np

    from pykvgraph.demos.base_logits import BaseWriter
    from pykvgraph.demos.perplexity import chunks_of, estimate, n_together, read_chunks

    chunks = chunks_of(model, text, n_ctx, n_chunks)
    n = len(chunks.tokens)
    n_seqs = 1 if base else min(n_together(n_ctx, n_batch), n)
    losses = np.zeros((n, chunks.n_rows))
    with (
        _context(model, chunks, n_batch, n_seqs, sizes) as ctx,
        nullcontext() if base is None else BaseWriter(base, chunks, model.n_vocab) as writer,
        progress_on_terminal() as progress,
    ):
        bar = progress.add_task("", total=losses.size)
        for rows in read_chunks(ctx, chunks):
            end = rows.begin + len(rows.nexts)
            losses[rows.chunk, rows.begin : end] = rows.losses()
            if writer is not None:
                writer.write(rows)
            progress.update(bar, advance=len(rows.nexts))
            if end == chunks.n_rows:
                progress.update(bar, description=_so_far(losses, rows.chunk))
    found = estimate(losses.ravel())
    return {
        "perplexity": found.value,
        "perplexity_error": found.error,
        "so_far": np.exp(np.cumsum(losses.mean(axis=1)) / np.arange(1, n + 1)).tolist(),
        "n_tokens": found.n_tokens,
        "n_ctx": n_ctx,
        "n_chunks": n,
    }


def _compare(
    model: Model, file: BaseFile, n_ctx: int | None, n_chunks: int, n_batch: int, sizes: dict[str, Any]
) -> dict[str, Any]:
    """How far this run is from the file's."""
    from pykvgraph.demos.divergence import Divergence, diverged, statistics
    from pykvgraph.demos.perplexity import read_chunks

    if file.n_vocab != model.n_vocab:
        raise InvalidArgumentError(
            f"the base's vocabulary has {file.n_vocab} tokens, and this model's {model.n_vocab}: only models "
            "with one vocabulary can be compared"
        )
    chunks = file.chunks.up_to(n_chunks)
    n, n_base = chunks.tokens.shape
    if n_ctx not in (None, n_base):
        raise InvalidArgumentError(f"the base has chunks of {n_base} tokens, not of {n_ctx}: leave out -c")
    parts: list[Divergence] = []
    with _context(model, chunks, n_batch, 1, sizes) as ctx, progress_on_terminal() as progress:
        bar = progress.add_task("", total=n * chunks.n_rows)
        for rows in read_chunks(ctx, chunks):
            parts.append(diverged(file.read(len(rows.nexts)), rows.logits, rows.nexts))
            progress.update(bar, advance=len(rows.nexts))
    found = Divergence.joined(parts)
    return {**statistics(found), "n_tokens": len(found.kl), "n_ctx": n_base, "n_chunks": n}


def _context(model: Model, chunks: Chunks, n_batch: int, n_seqs: int, sizes: dict[str, Any]) -> Context:
    """Room for so many chunks at a time."""
    import pykvgraph as kvg

    n_cells = n_seqs * chunks.tokens.shape[1]
    return kvg.Context(model, n_ctx=n_cells, n_batch=min(n_batch, n_cells), n_seq_max=n_seqs, **sizes)


def _so_far(losses: Floats, chunk: int) -> str:
    from pykvgraph.demos.perplexity import estimate

    return f"[{chunk + 1}] {estimate(losses[: chunk + 1].ravel()).value:.4f}"


def _show_perplexity(told: dict[str, Any]) -> None:
    click.echo(",".join(f"[{i}]{value:.4f}" for i, value in enumerate(told["so_far"], 1)))
    click.echo(f"Final estimate: PPL = {told['perplexity']:.4f} +/- {told['perplexity_error']:.5f}")


def _show_divergence(told: dict[str, Any]) -> None:
    """Three tables, in the order of llama-perplexity's."""
    table = new_table("perplexity", "value", "+/-")
    for words, name in (
        ("PPL(Q)", "perplexity"),
        ("PPL(base)", "base_perplexity"),
        ("ln(PPL(Q)/PPL(base))", "log_ratio"),
        ("PPL(Q)/PPL(base)", "ratio"),
    ):
        table.add_row(words, f"{told[name]:.6f}", f"{told[f'{name}_error']:.6f}")
    table.add_row("Cor(ln(PPL(Q)), ln(PPL(base)))", f"{told['correlation']:.2%}", "")
    print_table(table)
    table = new_table("", "KL divergence", "delta p")
    table.add_row(
        "mean",
        f"{told['kl_mean']:.6f} +/- {told['kl_error']:.6f}",
        f"{told['delta_p_mean']:.3%} +/- {told['delta_p_error']:.3%}",
    )
    for share in _SHARES:
        words = share.replace("_", ".") + (" %" if share[0].isdigit() else "")
        table.add_row(words, f"{told[f'kl_{share}']:.6f}", f"{told[f'delta_p_{share}']:.3%}")
    table.add_row("RMS", "", f"{told['delta_p_rms']:.3%}")
    print_table(table)
    click.echo(f"same top token: {told['same_top']:.3%} +/- {told['same_top_error']:.3%}")
