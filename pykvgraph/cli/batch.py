"""`pykvgraph batch`: a file of prompts in, a file of answers out."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
import stat
import time
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any, Literal

import click

from pykvgraph.checks import integers, shown
from pykvgraph.cli.adapters import Adapters, adapter_options
from pykvgraph.cli.answer_file import AnswerFile
from pykvgraph.cli.compare import Answered, differences, longest, report, show
from pykvgraph.cli.draft import OF_ENGINE, draft_arguments, draft_options, spec_type_of, spec_type_option
from pykvgraph.cli.progress import progress_on_terminal
from pykvgraph.cli.question import Arrivals, Line, parse, question_of
from pykvgraph.cli.show import print_json
from pykvgraph.cli.verb import (
    Cells,
    Interruptible,
    Verb,
    batch_option,
    cache_type_options,
    defrag_option,
    examples,
    json_option,
    margin_option,
    model_option,
    option,
    swa_option,
    threads_option,
    ubatch_option,
)
from pykvgraph.cli.where import Where, where_options
from pykvgraph.errors import InvalidArgumentError, KVGraphError
from pykvgraph.params.params import ContextParams

if TYPE_CHECKING:
    from pykvgraph.chat.messages import MessageTokens
    from pykvgraph.engine import Engine, Request
    from pykvgraph.engine.types import Completion
    from pykvgraph.model.model import Model

COUNT = click.IntRange(min=1)
N_AT_A_TIME = 128  # requests that the engine has, at most; those that wait may share a prefix with others


@click.command(
    cls=Verb,
    epilog=examples(
        "pykvgraph batch -m model.gguf -f prompts.jsonl -o answers.jsonl",
        "pykvgraph batch -m model.gguf -f prompts.jsonl -o answers.jsonl -np 16",
    ),
)
@model_option(required=True)
@option(
    "-f", "--file", "prompts", type=click.File("rb"), required=True, metavar="FILE", help="Prompts; -: stdin."
)
@option(
    "-o",
    "--answers",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True),
    required=True,
    metavar="FILE",
    help="Where answers are added; -: stdout.",
)
@option("-np", "--parallel", "n_parallel", type=COUNT, metavar="N", default=8, help="Prompts at a time.")
@option(
    "-c",
    "--ctx-size",
    "n_ctx",
    type=Cells(),
    metavar="N",
    default="auto",
    help="Cells of the cache; auto: as many as -np texts can fill and the memory has room for.",
)
@margin_option
@batch_option()
@ubatch_option
@cache_type_options
@swa_option
@defrag_option()
@threads_option()
@where_options
@adapter_options
@spec_type_option(OF_ENGINE)
@draft_options
@option(
    "--compare",
    is_flag=True,
    help="Afterwards answer them again with nothing shared, and tell where answers differ, and how narrowly.",
)
@json_option
def batch(
    model: str,
    where: Where,
    adapters: Adapters,
    prompts: IO[bytes],
    answers: str,
    n_parallel: int,
    n_ctx: int | Literal["auto"],
    n_threads: int | None,
    spec_type: str | None,
    model_draft: str | None,
    compare: bool,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Answer a file of prompts, many at a time.

    Each line of the file is a JSON object with one of

    \b
      {"prompt": "a text"}
      {"messages": [{"role": "user", "content": "a text"}]}
      {"tokens": [1, 403, 407]}

    Beside that it may have an "id", and how to answer: "max_tokens", "temperature" and the other fields of
    SamplingParams. What prompts begin with alike is decoded once.

    Each answer is a line, as soon as it is known and whatever the order of the prompts: "line", the number of
    its prompt, "digest", of this line and of the model, "id", "text", "finish_reason", "n_prompt", "n_cached"
    (tokens of the prompt that needed no decoding) and "seconds". A prompt that can't be answered gets an
    "error"; the others go on, and the exit code is 1. Prompts from a pipe are answered as they come.

    After Ctrl-C, or whatever else ended it, the same command goes on where it stopped. It tries prompts with
    an error again. It refuses to add to answers to other prompts or of another model.

    With --compare each prompt that was answered now is answered once more, by an engine that shares nothing.
    Of each answer that differs it tells the first token that does, and the gap: by how much the logit of the
    token that was said with nothing shared is above the other's. A small gap is a near tie, which rounding
    decides: batches of other sizes do that, too.
    """
    import pykvgraph as kvg
    from pykvgraph.chat.messages import MessageTokens

    sizes |= {
        "n_seq_max": n_parallel,
        "n_threads": n_threads,
        "n_threads_batch": n_threads,
        **where.context(),
    }
    if as_json and answers == "-":
        raise click.UsageError("--json and -o - both print to stdout: leave one out")
    kind = spec_type_of(spec_type, model_draft, model, where.kv_overrides)
    begin = time.perf_counter()
    with (
        kvg.Model(model, **where.model(), **draft_arguments(kind, model_draft)) as loaded,
        kvg.Model(model_draft, **where.of_model())
        if model_draft and kind == "draft-simple"
        else contextlib.nullcontext() as draft,
    ):
        sizes |= {
            "adapters": adapters.load(loaded),
            "draft": "ngram" if kind == "ngram-simple" else draft,
            "background": False,
        }
        with kvg.Engine(loaded, n_ctx=n_ctx, **sizes) as engine, AnswerFile(answers) as file:
            known = loaded._fingerprint(engine.adapters)
            job = BatchRun(engine, MessageTokens(loaded), file, known, keeps=compare)
            n_bytes = _n_bytes(prompts)
            with (
                Interruptible() as work,
                progress_on_terminal(shown=bool(n_bytes) and answers != "-") as progress,
            ):
                bar = progress.add_task(job.told(), total=n_bytes)
                job.run(prompts, lambda n: progress.update(bar, advance=n, description=job.told()))
                progress.update(bar, completed=n_bytes)  # with empty lines at the end
        totals = job.totals | {"seconds": time.perf_counter() - begin}
        if compare and not work.interrupted:
            totals["compared"] = _compared(job, loaded, engine.context.n_ctx, sizes)
    if as_json:
        print_json(totals)
    else:
        click.echo(_summary(totals), err=True)
        if "compared" in totals:
            show(totals["compared"])
    if work.interrupted and answers != "-":
        click.echo("Interrupted: the same command goes on from here.", err=True)
    work.end()
    if totals["n_errors"]:
        raise click.exceptions.Exit(1)


def _compared(job: BatchRun, model: Model, n_ctx: int, sizes: dict[str, Any]) -> dict[str, Any]:
    """What was answered, beside answers of an engine that shares nothing."""
    import pykvgraph as kvg
    from pykvgraph.chat.messages import MessageTokens

    shared = sorted(job.said, key=lambda said: said.line.number)
    text = b"".join(said.line.data.strip() + b"\n" for said in shared)
    with kvg.Engine(model, n_ctx=n_ctx, prefix_cache=False, **sizes) as engine:
        again = BatchRun(engine, MessageTokens(model), None, b"", keeps=True)
        again.run(io.BytesIO(text), lambda _: None)
    alone = {said.line.number: said for said in again.said}  # which counts from 1 on
    pairs = [(said, alone[i]) for i, said in enumerate(shared, 1) if i in alone]
    names = ContextParams.__dataclass_fields__.keys() - {"n_seq_max"}
    of_context = {name: value for name, value in sizes.items() if name in names}
    with kvg.Context(model, n_ctx=longest(shared), adapters=sizes["adapters"], **of_context) as ctx:
        found = differences(pairs, ctx)
    return report(sum(len(said.samples) for said, _ in pairs), job.n_drawn, found)


def _n_bytes(source: IO[bytes]) -> int:
    """Of a file; 0 for a pipe."""
    try:
        status = os.fstat(source.fileno())
    except OSError:  # not a file of the system's
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _summary(totals: dict[str, Any]) -> str:
    counts = "{n_answered} answers, {n_errors} errors, {n_skipped} there already".format(**totals)
    rate = totals["n_generated"] / totals["seconds"]
    tokens = "{n_generated} tokens in {seconds:.1f} s".format(**totals)
    cached = "{n_cached} of {n_prompt} prompt tokens were cached".format(**totals)
    drafts = "; {n_accepted} of {n_drafted} draft tokens held".format(**totals) if totals["n_drafted"] else ""
    return f"{counts}; {tokens}, {rate:.1f}/s; {cached}{drafts}"


class BatchRun:
    """Reads prompts, a limited number ahead, and writes answers as they come.

    totals: lines that were answered, that failed, and that had an answer before; tokens of those answered.
    """

    def __init__(
        self,
        engine: Engine,
        messages: MessageTokens,
        answers: AnswerFile | None,
        model: bytes,
        *,
        keeps: bool = False,
    ) -> None:
        """answers: None: they are not written. model: its fingerprint. keeps: what was said, for `said`."""
        self._engine = engine
        self._messages = messages
        self._answers = answers
        self._model = model
        self._is_told = answers is None  # that the model has no chat template
        self._keeps = keeps
        self._ids: dict[Request, Sequence[int] | None] = {}  # of prompts whose answers are kept
        self.said: list[Answered] = []
        self.n_drawn = 0  # of those that were answered, without a seed
        self._pending: dict[Request, tuple[Line, dict[str, Any]]] = {}  # with what their answers begin with
        counts = ("n_answered", "n_errors", "n_skipped")
        names = (*counts, "n_prompt", "n_cached", "n_generated", "n_drafted", "n_accepted")
        self.totals: dict[str, Any] = dict.fromkeys(names, 0)
        self._done: Callable[[int], object]

    def run(self, prompts: IO[bytes], done: Callable[[int], object]) -> None:
        """Answers them all. done: is told of the bytes of each line that is done with."""
        self._done = done
        arrivals = Arrivals(prompts)
        is_file = _n_bytes(prompts) > 0  # whose next line is there at once
        while True:
            is_full = len(self._pending) >= N_AT_A_TIME
            line = None if is_full else arrivals.next(wait=is_file or not self._pending)
            if line is not None:
                self._ask(line)
            elif self._pending:
                self._step()
            else:
                return

    def told(self) -> str:
        """For people who wait."""
        return "{n_answered} answers, {n_errors} errors".format(**self.totals)

    def _ask(self, line: Line) -> None:
        named: dict[str, Any] = {"line": line.number, "digest": self._digest(line)}
        if self._answers is not None and line.number in self._answers.answered:
            self._skip(line, named, self._answers.answered[line.number])
            return
        try:
            fields = parse(line.data)
            if fields.get("id") is not None:
                named["id"] = fields["id"]
            self._pending[self._submit(fields)] = line, named
        except KVGraphError as error:
            self._fail(line, named, error)

    def _digest(self, line: Line) -> str:
        """Of all that an answer depends on."""
        return hashlib.sha256(self._model + line.data.strip()).hexdigest()[:16]

    def _skip(self, line: Line, named: dict[str, Any], digest: Any) -> None:
        if digest != named["digest"]:
            raise click.ClickException(
                f"the answers are not of these prompts and this model: line {line.number} has an answer to "
                "something else. Give another file with -o, or remove this one"
            )
        self.totals["n_skipped"] += 1
        self._done(line.n_bytes)

    def _submit(self, fields: dict[str, Any]) -> Request:
        source, value, params = question_of(fields)
        if source == "tokens":
            value = integers(value, "tokens", 0, self._engine.model.n_vocab - 1)
        elif source == "messages":
            value, stop = self._messages.prompt(value)
            self._tell_of_no_template()
            params = dataclasses.replace(params, stop=(*params.stop, *stop))
        elif not isinstance(value, str):
            raise InvalidArgumentError(f"prompt must be a text, got {shown(value)}")
        request = self._engine.submit(value, params)
        if self._keeps:
            is_drawn = params.temperature > 0 and params.seed is None
            self._ids[request] = None if is_drawn else self._engine._ids_of(value).tolist()
        return request

    def _tell_of_no_template(self) -> None:
        from pykvgraph.model.gguf_file import TEMPLATE_KEY

        if not self._is_told and not self._engine.model._value(TEMPLATE_KEY):
            click.echo("the model has no chat template: turns are lines of User: and Assistant:", err=True)
        self._is_told = True

    def _step(self) -> None:
        self._engine.step()
        for request in [each for each in self._pending if each.done]:
            line, named = self._pending[request]
            try:
                found = request.results()
            except KVGraphError as error:
                self._fail(line, named, error)
            else:
                self._answer(line, named, found)
                self._keep(line, found, self._ids.get(request))
            self._ids.pop(request, None)
            del self._pending[request]

    def _keep(self, line: Line, found: list[Completion], ids: Sequence[int] | None) -> None:
        if ids is not None:
            self.said.append(Answered(line, ids, [each.tokens for each in found]))
        self.n_drawn += self._keeps and ids is None

    def _answer(self, line: Line, named: dict[str, Any], found: list[Completion]) -> None:
        first = found[0]
        texts: list[dict[str, Any]] = [
            {"text": each.text, "finish_reason": each.finish_reason} for each in found
        ]
        said = texts[0] if len(texts) == 1 else {"samples": texts}
        seconds = round(max(each.seconds for each in found), 3)
        answer = {**said, "n_prompt": first.n_prompt, "n_cached": first.n_cached, "seconds": seconds}
        self._write(named | answer)
        self.totals["n_answered"] += 1
        self.totals["n_prompt"] += first.n_prompt
        self.totals["n_cached"] += first.n_cached
        self.totals["n_generated"] += sum(len(each.tokens) for each in found)
        self.totals["n_drafted"] += sum(each.drafted for each in found)
        self.totals["n_accepted"] += sum(each.accepted for each in found)
        self._done(line.n_bytes)

    def _write(self, answer: dict[str, Any]) -> None:
        if self._answers is not None:
            self._answers.add(answer)

    def _fail(self, line: Line, named: dict[str, Any], error: KVGraphError) -> None:
        said = {"type": type(error).__name__, "message": f"line {line.number}: {error}"}
        self._write({**named, "error": said})
        self.totals["n_errors"] += 1
        self._done(line.n_bytes)
