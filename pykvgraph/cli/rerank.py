"""`pykvgraph rerank`: documents in the order in which they answer a query."""

from __future__ import annotations

from typing import IO

import click

from pykvgraph.cli.n_ctx import sized
from pykvgraph.cli.prompt import read_text
from pykvgraph.cli.show import print_json, printable
from pykvgraph.cli.verb import (
    Cells,
    Verb,
    batch_option,
    examples,
    json_option,
    margin_option,
    model_option,
    option,
    threads_option,
)
from pykvgraph.cli.where import Where, where_options

_TOGETHER = 16  # texts that one batch may have


@click.command(
    cls=Verb,
    epilog=examples(
        "pykvgraph rerank -m reranker.gguf -q 'What is a panda?' -f docs.txt",
        "pykvgraph rerank -m reranker.gguf -q 'A panda?' --json -f - < docs.txt",
    ),
)
@model_option("A GGUF file of a reranker.", required=True)
@option("-q", "--query", required=True, metavar="TEXT", help="What the documents are to answer.")
@option(
    "-f",
    "--file",
    "documents_file",
    type=click.File(encoding="utf-8", errors="strict"),
    required=True,
    metavar="FILE",
    help="A file with a document on each line; -: stdin. Empty lines are left out.",
)
@option(
    "--top-n",
    "top_n",
    type=click.IntRange(min=1),
    metavar="N",
    show_default="all",
    help="Show the N best.",
)
@option(
    "-c",
    "--ctx-size",
    "n_ctx",
    type=Cells(),
    metavar="N",
    show_default="as -b",
    help="Cells of the cache; auto: as many as the memory has room for.",
)
@margin_option
@batch_option()
@threads_option()
@where_options
@json_option
def rerank(
    model: str,
    query: str,
    documents_file: IO[str],
    top_n: int | None,
    n_ctx: int | None,
    margin: int,
    n_batch: int,
    n_threads: int | None,
    where: Where,
    as_json: bool,
) -> None:
    """Order documents by how well they answer a query.

    A line for each, best first: the score, the number of its line, counted from 0 without empty ones, and the
    document. Scores are the model's own: only their order means something for all models.
    """
    import pykvgraph as kvg

    documents = [line for line in read_text(documents_file).split("\n") if line.strip()]
    with kvg.Model(model, **where.model()) as loaded:
        context = {"n_batch": n_batch, "n_threads": n_threads, "n_seq_max": _TOGETHER, **where.context()}
        context = sized(loaded, n_ctx or n_batch, loaded.n_ctx_train, context, margin)
        with kvg.Engine(loaded, background=False, **context) as engine:
            scores = engine.rank(query, documents)
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[:top_n]
    if as_json:
        results = [{"index": i, "score": scores[i], "text": documents[i]} for i in order]
        print_json({"query": query, "results": results})
        return
    for i in order:
        click.echo(f"{scores[i]:10.5f}  {i:4}  {printable(documents[i])}")
