"""What the verbs share: options that the environment can set and errors in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from pykvgraph.errors import InvalidArgumentError, KVGraphError

F = TypeVar("F", bound=Callable[..., Any])

# what a Context takes; for --help
DEFAULT_THREADS = "all CPUs; 1 for a model under 10 million parameters"


def option(*names: str, **settings: Any) -> Callable[[F], F]:
    """A click option with its environment variable: KVGRAPH_ and the long name."""
    long_name = next(name for name in names if name.startswith("--"))
    variable = "KVGRAPH_" + long_name[2:].replace("-", "_").upper()
    return click.option(*names, envvar=variable, show_envvar=True, **settings)


def json_option(command: F) -> F:
    """`--json`, the same in every verb."""
    return option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")(command)


def examples(*lines: str) -> str:
    """An epilog for `--help`, one example per line."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)


class Verb(click.Command):
    """A command whose errors are a line on stderr and exit code 1, with no traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the verb. What pykvgraph raises, or the system says of files, becomes a ClickException."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # the reader has gone: click ends in silence
        except (KVGraphError, ImportError, OSError) as error:
            origin = self._origin(ctx) if isinstance(error, InvalidArgumentError) else ""
            raise click.ClickException(" ".join(str(error).split()) + origin) from error

    def _origin(self, ctx: click.Context) -> str:
        """The environment variables that had a say: nobody typed those."""
        variables = [
            str(option.envvar)
            for option in self.params
            if option.name and ctx.get_parameter_source(option.name) is ParameterSource.ENVIRONMENT
        ]
        return f" (from the environment: {', '.join(variables)})" if variables else ""
