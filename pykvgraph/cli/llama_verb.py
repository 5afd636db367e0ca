"""Verbs that take llama.cpp's options: what they lack does nothing, and says so, or is refused by name."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource

from pykvgraph.cli.llama_options import LlamaOption, llama_options
from pykvgraph.cli.verb import Verb

_ON = ("1", "on", "true", "enabled")
_OFF = ("0", "off", "false", "disabled")


@dataclass(frozen=True)
class _Variable:
    """An environment variable of llama-server: what it stands for, and what it says."""

    name: str
    option: LlamaOption
    value: str


class LlamaVerb(Verb):
    """A verb that takes the options of llama-server and llama-cli, as llama_options() says of them.

    reads_variables: whether their environment variables are defaults, too; KVGRAPH_... come first.
    """

    def __init__(self, *args: Any, reads_variables: bool = False, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._reads_variables = reads_variables
        self._lacking: dict[str, LlamaOption] = {}  # by the name of the parameter
        self._hidden: list[click.Parameter] = []

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """As click's."""
        variables = _variables(llama_options(self.name or "")) if self._reads_variables else []
        given, names = {}, {}
        for variable in variables:
            for name, value in self._default(variable):
                given[name], names[name] = value, variable.name
        known = self._long_names()
        args = [_dashed(word, known) for word in args]
        typed = list(args)
        try:
            ctx = super().make_context(info_name, args, parent, **{"default_map": given, **extra})
        except click.UsageError as error:
            raise _explained(error, typed, names) from None
        if not ctx.resilient_parsing:
            with ctx.scope(cleanup=False):
                self._tell(ctx, typed, variables)
        return ctx

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Those of --help, and, hidden, those of llama.cpp that are not among them."""
        params = super().get_params(ctx)
        if not self._hidden:
            known = {name for param in params for name in (*param.opts, *param.secondary_opts)}
            for i, option in enumerate(llama_options(self.name or "")):
                if lacking := [name for name in option.names if name not in known]:
                    self._lacking[f"llama_{i}"] = option
                    self._hidden.append(_hidden(f"llama_{i}", lacking, option.n_values))
        return [*params, *self._hidden]

    def _long_names(self) -> frozenset[str]:
        names = {name for param in self.params for name in (*param.opts, *param.secondary_opts)}
        names.update(name for option in llama_options(self.name or "") for name in option.names)
        return frozenset(name for name in names if name.startswith("--"))

    def _default(self, variable: _Variable) -> Iterable[tuple[str, Any]]:
        """The parameter that it sets, and its value."""
        names = set(variable.option.names)
        for param in self.params:
            if variable.option.effect != "taken" or not names.intersection(param.opts + param.secondary_opts):
                continue
            if param.name and not (isinstance(param, click.Option) and param.is_flag):
                yield param.name, variable.value
            elif param.name and (word := variable.value.lower()) in _ON + _OFF:
                yield param.name, (word in _ON) == (variable.option.names[0] not in param.secondary_opts)
            elif param.name:
                yield param.name, variable.value  # which click refuses

    def _tell(self, ctx: click.Context, typed: Sequence[str], variables: Sequence[_Variable]) -> None:
        """Refuses what is refused, and says of the others that they have no effect."""
        words = [word.partition("=")[0] for word in typed]
        idle: dict[str, list[str]] = {}
        for name, option in self._lacking.items():
            if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                spelled = next((word for word in words if word in option.names), option.names[-1])
                self._tell_of(ctx, spelled, option, idle)
        for variable in variables:
            is_off = variable.option.n_values == 0 and variable.value.lower() in _OFF
            if variable.option.effect != "taken" and not is_off:
                self._tell_of(ctx, variable.name, variable.option, idle)
        for note, names in idle.items():
            has = "has" if len(names) == 1 else "have"
            click.echo(f"{', '.join(names)} {has} no effect here: {note}.", err=True)

    def _tell_of(
        self, ctx: click.Context, spelled: str, option: LlamaOption, idle: dict[str, list[str]]
    ) -> None:
        if option.effect == "none":
            idle.setdefault(option.note, []).append(spelled)
        elif option.effect == "refused":
            raise click.UsageError(f"{spelled} is not taken here: {option.note}.")
        else:
            root = ctx.find_root().command
            verbs = root.commands if isinstance(root, click.Group) else {}
            takers = [
                name
                for name in ("serve", "generate", "chat", *verbs)
                if name in verbs and any(spelled in param.opts for param in verbs[name].params)
            ]
            told = f"`pykvgraph {takers[0]}` takes it" if takers else "only llama.cpp has it"
            raise click.UsageError(f"{spelled}: `pykvgraph {self.name}` has no such option; {told}.")


def _dashed(word: str, names: frozenset[str]) -> str:
    """An option that is spelled with underscores, as llama.cpp takes it: `--ctx_size`."""
    name, *value = word.split("=", 1)
    dashed = name.replace("_", "-")
    return "=".join([dashed, *value]) if dashed in names and name not in names else word


def _show_help(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(ctx.get_help())
        ctx.exit()


def _hidden(name: str, names: Sequence[str], n_values: int | None) -> click.Option:
    """An option that is parsed, and does nothing by itself, but for --usage."""
    settings: dict[str, Any] = {"expose_value": False, "hidden": True, "default": None}
    if names == ["--usage"]:
        settings |= {"is_eager": True, "callback": _show_help}
    if n_values == 0:
        settings |= {"is_flag": True, "default": False}
    elif n_values is None:
        settings |= {"is_flag": False, "flag_value": "on"}
    else:
        settings |= {"nargs": n_values}
    return click.Option([name, *names], **settings)


def _variables(options: Iterable[LlamaOption]) -> list[_Variable]:
    """Those that are set and are llama.cpp's own, with NO in the name, too, which older versions have."""
    found = []
    for option in options:
        for name in option.variables:
            if value := os.environ.get(name) if name.startswith("LLAMA_") else None:
                found.append(_Variable(name, option, value))
            denied = name.replace("LLAMA_ARG_", "LLAMA_ARG_NO_", 1)
            if denied != name and option.n_values == 0 and denied in os.environ:
                found.append(_Variable(denied, option, "0"))
    return found


def _explained(error: click.UsageError, typed: Sequence[str], variables: dict[str, str]) -> click.UsageError:
    """The same error. It names the word that was typed, where click has taken its letters apart, or the
    environment variable.
    """
    if isinstance(error, click.NoSuchOption):
        name = error.option_name
        if len(name) == 2 and (whole := _cluster(typed, name[1])):
            return click.NoSuchOption(whole, ctx=error.ctx)
    elif isinstance(error, click.BadParameter) and error.param is not None and error.ctx is not None:
        source = error.ctx.get_parameter_source(error.param.name or "")
        letters = [name[1] for name in error.param.opts if len(name) == 2]
        if source is ParameterSource.DEFAULT_MAP and error.param.name in variables:
            told = f"{error.message} (from the environment: {variables[error.param.name]})"
            return click.BadParameter(told, ctx=error.ctx, param=error.param)
        elif source is ParameterSource.COMMANDLINE and letters and (whole := _cluster(typed, letters[0])):
            return click.NoSuchOption(whole, ctx=error.ctx)
    return error


def _cluster(typed: Iterable[str], letter: str) -> str | None:
    """The word, as -cx, from which click has taken this letter."""
    words = (word for word in typed if len(word) > 2 and word[0] == "-" and word[1] not in "-0123456789.")
    return next((word for word in words if letter in word[1:] and not word[2].isdigit()), None)
