"""What the verbs share: options that the environment can set and errors in one line."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

import click
import click.shell_completion
from click.core import ParameterSource

from pykvgraph.errors import InvalidArgumentError, KVGraphError
from pykvgraph.interrupted import ctrl_c_raises
from pykvgraph.params.cache_type import CACHE_TYPES, parse_cache_type
from pykvgraph.params.params import MARGIN, ContextParams
from pykvgraph.viz.figure import PICTURES

F = TypeVar("F", bound=Callable[..., Any])

INTERRUPTED = 130  # the exit code after Ctrl-C, as shells have it

# what a Context takes; for --help
DEFAULT_THREADS = "all CPUs; 1 for a model under 10 million parameters"


def option(*names: str, **settings: Any) -> Callable[[F], F]:
    """A click option with an environment variable for each long name: KVGRAPH_ and that name."""
    long = [name.split("/")[0] for name in names if name.startswith("--")]  # --slots/--no-slots has one
    variables = ["KVGRAPH_" + name[2:].replace("-", "_").upper() for name in long]
    return click.option(*names, envvar=variables, show_envvar=True, **settings)


def json_option(command: F) -> F:
    """`--json`, the same in every verb."""
    return option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")(command)


def model_option(
    help_text: str = "A GGUF file.", required: bool = False, argument: str | None = None, **settings: Any
) -> Callable[[F], F]:
    """`-m`, `-hf` and `-mu`, the same in every verb but for whether one of them must be given.

    The verb gets the path as `model`, whichever of them it was. argument: the name of an argument of the verb
    that can be the path, too.
    """

    def add(command: F) -> F:
        @functools.wraps(command)
        def run(
            *,
            hf_repo: str | None,
            hf_file: str | None,
            hf_token: str | None,
            model_url: str | None,
            offline: bool,
            model: str | None,
            **others: Any,
        ) -> None:
            if hf_file and not hf_repo:
                raise click.UsageError("-hff names a file of the repository that -hf names: give both")
            if hf_file and hf_repo:
                hf_repo = f"{hf_repo.partition(':')[0]}:{hf_file}"
            # huggingface_hub reads them when it is imported; workers get them, too
            if offline:
                os.environ["HF_HUB_OFFLINE"] = "1"
            if hf_token:
                os.environ["HF_TOKEN"] = hf_token
            values = {"model": model, "hf_repo": hf_repo, "model_url": model_url}
            if argument:
                values[argument] = others.pop(argument)
            name = _chosen(values, required)
            path = values[name] if name else None
            if path is not None and name in ("hf_repo", "model_url"):
                from pykvgraph.cli.download import downloaded

                path = downloaded(path, from_hub=name == "hf_repo", offline=offline)
            command(model=path, **others)

        wrapped: Any = option(
            "--offline", is_flag=True, help="-hf and -mu: what is in the cache, and nothing from the network."
        )(run)
        for names, metavar, text in (
            (("-mu", "--model-url"), "URL", "The address of a GGUF file, which is kept in a cache."),
            (("-hft", "--hf-token"), "TOKEN", "Who asks Hugging Face; HF_TOKEN and a login do, too."),
            (("-hff", "--hf-file"), "FILE", "The file of this repository, in place of QUANT."),
            (
                ("-hf", "-hfr", "--hf-repo"),
                "USER/NAME[@COMMIT][:QUANT]",
                "A model of Hugging Face: Q4_K_M, if there is one.",
            ),
        ):
            wrapped = option(*names, metavar=metavar, help=text)(wrapped)
        model_file = option("-m", "--model", type=click.Path(), metavar="FILE", help=help_text, **settings)
        return cast(F, model_file(wrapped))

    return add


def _chosen(values: dict[str, str | None], required: bool) -> str | None:
    """Which parameter names the model: one that was typed before one of the environment."""
    ctx = click.get_current_context()
    given = [name for name, value in values.items() if value is not None]
    typed = [name for name in given if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    names = typed or given
    if len(names) > 1:
        spelled = [_spelled(param, typed=bool(typed)) for param in ctx.command.params if param.name in names]
        raise click.UsageError(f"{' and '.join(spelled)} each name the model: give one of them")
    if required and not names:
        raise click.UsageError("Missing the model: give -m, -hf or -mu.")
    return names[0] if names else None


def _spelled(param: click.Parameter, typed: bool) -> str:
    if isinstance(param, click.Argument):
        return param.make_metavar(click.get_current_context()).strip("[]")
    return param.opts[0] if typed else str((param.envvar or [""])[0])


class Cells(click.IntRange):
    """A number from `least` on. `auto`, for as many as the memory has room for, becomes `auto`."""

    def __init__(self, least: int = 1, auto: str | int = "auto") -> None:
        super().__init__(min=least)
        self._auto = auto

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A usage error for what is neither."""
        return self._auto if value == "auto" else super().convert(value, param, ctx)


margin_option = option(
    "--margin",
    type=click.IntRange(0, 99),
    metavar="P",
    default=MARGIN,
    help="Per cent of the free memory to leave to others.",
)


class Threads(click.IntRange):
    """A number of threads; -1, as llama.cpp's default is spelled, is none given."""

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A usage error for other numbers below 1."""
        return None if str(value) == "-1" else super().convert(value, param, ctx)


class _Toggle(click.Choice[str]):
    """on, off or auto, and llama.cpp's other words for them."""

    def __init__(self) -> None:
        super().__init__(["on", "off", "auto"])

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """One of the three. A usage error for anything else."""
        words = {"1": "on", "true": "on", "enabled": "on", "0": "off", "false": "off", "disabled": "off"}
        return super().convert(words.get(str(value).lower(), value), param, ctx)


def toggle_option(*names: str, **settings: Any) -> Callable[[F], F]:
    """on, off or auto; the name alone, as older versions of llama.cpp have it, is on."""
    return option(*names, type=_Toggle(), default="auto", is_flag=False, flag_value="on", **settings)


def flash_attn_option(command: F) -> F:
    """`-fa`, the same in every verb."""
    return toggle_option("-fa", "--flash-attn", help="Flash attention: on, off or auto.")(command)


class _CacheType(click.ParamType[str]):
    """A type of K or V, as type_k and type_v of Context take it."""

    name = "type"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The type in lower case. Fails with a usage error where it isn't one."""
        try:
            return str(parse_cache_type(value, "the type"))
        except InvalidArgumentError as error:
            self.fail(str(error), param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[click.shell_completion.CompletionItem]:
        """The types that begin so."""
        return click.Choice(tuple(CACHE_TYPES), case_sensitive=False).shell_complete(ctx, param, incomplete)


def cache_type_options(command: F) -> F:
    """`-ctk` and `-ctv`, the same in every verb."""
    command = option(
        "-ctv",
        "--cache-type-v",
        "type_v",
        type=_CacheType(),
        metavar="TYPE",
        default=ContextParams.type_v,
        help="Type of V.",
    )(command)
    return option(
        "-ctk",
        "--cache-type-k",
        "type_k",
        type=_CacheType(),
        metavar="TYPE",
        default=ContextParams.type_k,
        help="Type of K: f32, f16, bf16, q8_0, q5_1, q5_0, q4_1 or q4_0. f16:q4_0@1024: F16, and Q4_0 for "
        "tokens that are older than the last 1024.",
    )(command)


def swa_option(command: F) -> F:
    """`--swa-full`, the same in every verb."""
    return option(
        "--swa-full",
        is_flag=True,
        help="Keep every position in layers with a sliding window, too, so that all can be shifted.",
    )(command)


def batch_option(default: int = ContextParams.n_batch) -> Callable[[F], F]:
    """`-b`, the same in every verb but for its default."""
    return option(
        "-b",
        "--batch-size",
        "n_batch",
        type=click.IntRange(min=1),
        metavar="N",
        default=default,
        help="Most tokens in one decode.",
    )


def ubatch_option(command: F) -> F:
    """`-ub`, the same in every verb."""
    return option(
        "-ub",
        "--ubatch-size",
        "n_ubatch",
        type=click.IntRange(min=1),
        metavar="N",
        default=ContextParams.n_ubatch,
        help="Most tokens in one graph.",
    )(command)


def defrag_option(
    default: float | None = ContextParams.defrag_threshold, **settings: Any
) -> Callable[[F], F]:
    """`-dt`, the same in every verb but for its default."""
    return option(
        "-dt",
        "--defrag-thold",
        "defrag_threshold",
        type=click.FLOAT,
        metavar="N",
        default=default,
        help="Close holes between cells when they are more than this share; below 0: never.",
        **settings,
    )


def threads_option(help_text: str = "CPU threads.") -> Callable[[F], F]:
    """`-t`, the same in every verb but for what it is for."""
    return option(
        "-t",
        "--threads",
        "n_threads",
        type=Threads(),
        metavar="N",
        show_default=DEFAULT_THREADS,
        help=help_text,
    )


threads_batch_option = option(
    "-tb",
    "--threads-batch",
    "n_threads_batch",
    type=Threads(),
    metavar="N",
    show_default="as -t",
    help="CPU threads for more than one.",
)


class _Picture(click.Path):
    """A picture to be written when the work is done; one that can't be is told of before it begins."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path. A usage error for another suffix, a folder, and a file that can't be made or written."""
        path = str(super().convert(value, param, ctx))
        folder = os.path.dirname(path) or os.curdir
        if not os.path.basename(path) or not os.path.isdir(folder):
            self.fail(f"{path!r} can't be written: there is no such folder.", param, ctx)
        if not path.lower().endswith(PICTURES):
            self.fail(f"{path!r} is no picture's name: its suffix must be {', '.join(PICTURES)}.", param, ctx)
        if not os.path.exists(path) and not os.access(folder, os.W_OK | os.X_OK):
            self.fail(f"{path!r} can't be written: its folder is read-only.", param, ctx)
        return path


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """`512` or `128,512`; 0 for none."""

    name = "numbers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            numbers = (-1,)
        if min(numbers) < 0:
            self.fail(f"{value!r} is no list of numbers from 0 on, such as 0,512", param, ctx)
        return numbers


def plot_option(help_text: str) -> Callable[[F], F]:
    """`--plot`, where a picture goes."""
    kinds = ", ".join(suffix[1:] for suffix in PICTURES)
    return option("--plot", type=_Picture(), metavar="FILE", help=f"{help_text} By its suffix: {kinds}.")


def examples(*lines: str) -> str:
    """An epilog for `--help`, one example per line."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


class Interruptible:
    """In `with Interruptible() as work:` Ctrl-C ends the block alone, and the verb can tell what there is.

    After that it calls work.end().
    """

    def __init__(self) -> None:
        self.interrupted = False

    def __enter__(self) -> Interruptible:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.interrupted = kind is KeyboardInterrupt
        return self.interrupted

    def end(self) -> None:
        """Exits after Ctrl-C; otherwise does nothing."""
        if self.interrupted:
            raise click.exceptions.Exit(INTERRUPTED)


def _print_version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        import pykvgraph

        click.echo(f"pykvgraph {pykvgraph.__version__}")
        ctx.exit()


def version_option(*, hidden: bool = False) -> click.Option:
    """`--version`: prints it and exits."""
    return click.Option(
        ["--version"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        hidden=hidden,
        callback=_print_version,
        help="Show the version and exit.",
    )


class Verb(click.Command):
    """A command whose errors are a line on stderr and exit code 1, with no traceback."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The verb's, and, hidden, the program's --version."""
        return [*super().get_params(ctx), version_option(hidden=True)]

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the verb. What pykvgraph raises, or the system says of files, becomes a ClickException."""
        try:
            with ctrl_c_raises():
                return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader has gone: click ends in silence
        except KeyboardInterrupt:
            click.echo(err=True)  # after the ^C that a terminal shows
            raise click.exceptions.Exit(INTERRUPTED) from None
        except MemoryError as error:
            names = " or ".join(self._numbers(ctx)) or "model"
            raise click.ClickException(
                f"there is not enough memory for this: try a smaller {names}"
            ) from error
        except (KVGraphError, ImportError, OSError) as error:
            origin = self._origin(ctx) if isinstance(error, InvalidArgumentError) else ""
            raise click.ClickException(" ".join(_told(error).split()) + origin) from error

    def _numbers(self, ctx: click.Context) -> list[str]:
        """The options that somebody gave a number to."""
        given = {
            option.opts[-1]: ctx.params[option.name]
            for option in self.params
            if option.name and ctx.get_parameter_source(option.name) is not ParameterSource.DEFAULT
        }
        return [
            name
            for name, value in given.items()
            if all(type(number) is int for number in (value if isinstance(value, tuple) else (value,)))
        ]

    def _origin(self, ctx: click.Context) -> str:
        """Names the environment variables that set an option of this run."""
        variables = [
            next(variable for variable in option.envvar or () if os.environ.get(variable))
            for option in self.params
            if option.name and ctx.get_parameter_source(option.name) is ParameterSource.ENVIRONMENT
        ]
        return f" (from the environment: {', '.join(variables)})" if variables else ""


def _told(error: Exception) -> str:
    """What is wrong; of a file as click tells it, without the system's number of the error."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename!r}: {error.strerror}"
    return str(error)
