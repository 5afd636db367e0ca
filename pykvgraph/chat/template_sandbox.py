"""Jinja's sandbox, with a budget: whatever a template may call is counted, and measured before it is done."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from string import Formatter
from typing import Any

import jinja2
import jinja2.nodes as nodes
import jinja2.runtime
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from pykvgraph.chat.template_budget import MOST_TEXT, Budget, BudgetError

_MOST = 10_000  # what a template may multiply with; a power has as many digits
_LONGEST_NUMBER = 400  # characters of any number, as it is formatted without a width
_NODES_PER_STEP = 32
_STEPS_PER_CALL = 4
_SHORT = 1000  # characters
_HEAVY = (list, dict, tuple, range, set, frozenset, *map(type, ({}.keys(), {}.values(), {}.items())))
# what no template of llama.cpp's collection uses, and would have to be measured
_LEFT_OUT = (
    *("batch", "center", "filesizeformat", "pprint", "random", "slice", "striptags"),
    *("urlize", "wordcount", "wordwrap", "xmlattr"),
)
# those that look at no element, or at each of them as the template asks for it
_GLANCING = frozenset(
    "count d default first items last length map reject rejectattr reverse select selectattr".split()  # noqa: SIM905
)
# those that make nothing of what is short, or of what they only glance at
_PLAIN = frozenset(
    "capitalize count d default first last length lower string title trim upper".split()  # noqa: SIM905
)
_LISTING = frozenset(("groupby", "list", "sort", "unique"))
_COMPARING = ("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le")
_TESTS = (*_COMPARING, "lessthan", "lower", "lt", "ne", "upper")
_ATTRIBUTES: dict[type, frozenset[str]] = {
    str: frozenset(
        """capitalize center count endswith find format index isalnum isalpha isascii isdecimal isdigit
        isidentifier islower isnumeric isspace istitle isupper join ljust lower lstrip partition removeprefix
        removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip
        swapcase title upper zfill""".split()  # noqa: SIM905
    ),
    list: frozenset(("append", "copy", "count", "index", "pop")),
    tuple: frozenset(("count", "index")),
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    bytes: frozenset(),
    int: frozenset(),
    float: frozenset(),
}


class Sandbox(ImmutableSandboxedEnvironment):
    """Templates run in `with sandbox.spending()`, which gives each rendering its budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        self._now = threading.local()
        super().__init__(**options, finalize=self.shown)
        self.code_generator_class = _Counting
        for name in _LEFT_OUT:
            del self.filters[name]
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        for name, function in self.filters.items():
            self.filters[name] = self._measured(name, function)
        for name in _TESTS:
            test: Any = self.tests[name]
            self.tests[name] = self._measured(name, test)
        self.filters[_COUNTED] = lambda values: self.budget.counted(values)

    @property
    def budget(self) -> Budget:
        """That of the rendering in this thread."""
        budget: Budget = self._now.budget
        return budget

    @contextlib.contextmanager
    def spending(self) -> Iterator[Budget]:
        """Whatever runs in this block, in this thread, has one budget."""
        self._now.budget = Budget()
        try:
            yield self._now.budget
        finally:
            del self._now.budget

    # ---- what the compiled template calls

    def step(self, n: int) -> None:
        """In each iteration, and each call of a macro."""
        self._now.budget.step(n)

    def weighed(self, value: Any) -> Any:
        """A side of a comparison."""
        if not _is_light(value):
            self._now.budget.look(value)
        return value

    def searched(self, value: Any) -> Any:
        """What something is looked for in."""
        if not (isinstance(value, dict) or _is_light(value)):
            self._now.budget.look(value)
        return value

    def sliced(self, value: Any) -> Any:
        """What a slice is taken from."""
        self._now.budget.glance(value)
        return value

    def joined(self, values: tuple[Any, ...]) -> str:
        """a ~ b ~ c"""
        texts = [value if type(value) is str else self.shown(value) for value in values]
        n = sum(map(len, texts))
        if n > _SHORT:
            self._now.budget.make(n)
        return "".join(texts)

    def concat(self, values: Iterable[str]) -> str:
        """What a macro or a block has said."""
        texts = list(values)
        self.budget.make(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Asked for each of the intercepted operations; text takes up whatever is added to it."""
        if operator == "+" and type(left) is str and type(right) is str:
            n = len(left) + len(right)
            if n > _SHORT:
                self._now.budget.make(n)
            return left + right
        sides = left, right
        has_text = any(isinstance(each, str) for each in sides)
        if operator == "+" and has_text and not any(isinstance(each, jinja2.Undefined) for each in sides):
            return self.joined(sides)
        if operator == "%" and isinstance(left, str):
            self._measure_format(left, right if isinstance(right, (tuple, dict)) else (right,))
        elif operator == "+" and isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            self.budget.make_list(len(left) + len(right))
        elif operator in ("*", "**"):
            sizes = [len(each) if hasattr(each, "__len__") else abs(each) for each in sides]
            if max(sizes) > _MOST:
                raise OverflowError(f"{operator} with what is over {_MOST}")
            if has_text:
                self.budget.make(sizes[0] * sizes[1])
            elif any(isinstance(each, (list, tuple)) for each in sides):
                self.budget.make_list(sizes[0] * sizes[1])
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Asked for each call."""
        budget = self.budget
        budget.step(_STEPS_PER_CALL)
        if isinstance(function, types.BuiltinMethodType):
            owner = function.__self__
            if isinstance(owner, str):
                args = self._measure_method(owner, function.__name__, args, kwargs)
            elif isinstance(owner, (list, tuple)) and function.__name__ != "append":
                budget.look(owner)  # compared, or copied
            elif isinstance(owner, dict) and function.__name__ == "copy":
                budget.make_list(len(owner))
        if isinstance(function, (types.BuiltinMethodType, type)):
            for each in args if not kwargs else (*args, *kwargs.values()):
                if not _is_light(each):
                    budget.look(each)
        return super().call(context, function, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Asked for each attribute that a template names."""
        for kind, names in _ATTRIBUTES.items():
            if isinstance(obj, kind):
                return attr in names
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Asked for each attribute, whether it is str.format, which is done by this instead."""
        if not isinstance(value, types.BuiltinMethodType) or value.__name__ != "format":
            return None
        text = value.__self__
        if not isinstance(text, str):
            return None
        return lambda *args, **kwargs: _Formatter(self).vformat(text, args, kwargs)

    # ---- what things take

    def shown(self, value: Any) -> str:
        """As str(value); of each output, too."""
        if type(value) is not str:
            if not isinstance(value, (str, int, float, jinja2.Undefined)):
                self.budget.look(value)
            return str(value)
        text: str = value
        return text

    def _measured(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter, or a test, that is measured before it is done."""
        measure: Callable[..., tuple[Any, ...]] = getattr(self, f"_measure_{name}", self._measure_any)
        is_glancing = name in _GLANCING
        look = Budget.glance if is_glancing else Budget.look
        is_plain = name in _PLAIN
        # of the context, or the environment, which stand in front
        n_front = int(getattr(function, "jinja_pass_arg", None) is not None)

        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            budget = self._now.budget
            budget.step()
            is_alone = is_plain and len(args) == n_front + 1 and not kwargs
            if is_alone and (is_glancing or _is_light(args[n_front])):
                return function(*args)
            front, args = args[:n_front], args[n_front:]
            for each in args if not kwargs else (*args, *kwargs.values()):
                if not _is_light(each):
                    look(budget, each)
            if name in _LISTING and args and isinstance(args[0], str):
                budget.make_list(len(args[0]))
            args = measure(*args, **kwargs)
            found = function(*front, *args, **kwargs)
            if isinstance(found, str):
                budget.make(len(found))
                return str(found)  # no Markup, whose methods are others
            if isinstance(found, list):
                budget.make_list(len(found))
            return budget.counted(found) if isinstance(found, types.GeneratorType) else found

        return measured

    def _measure_any(self, *args: Any, **_: Any) -> tuple[Any, ...]:
        return args

    def _measure_join(self, value: Any, d: Any = "", *rest: Any, **kwargs: Any) -> tuple[Any, ...]:
        values = list(self.budget.counted(value))
        d = kwargs.get("d", d)
        self.budget.make(sum(map(self.budget.look, values)) + len(values) * len(str(d)))
        return (values, *(() if "d" in kwargs else (d,)), *rest)

    def _measure_indent(self, s: Any, width: Any = 4, *rest: Any, **kwargs: Any) -> tuple[Any, ...]:
        own = kwargs.get("width", width)
        size = len(own) if isinstance(own, str) else max(int(own), 0)
        self.budget.make(len(str(s)) + (len(str(s).splitlines()) + 1) * size)
        return (s, *(() if "width" in kwargs else (width,)), *rest)

    def _measure_replace(self, s: Any, old: Any, new: Any, *rest: Any, **_: Any) -> tuple[Any, ...]:
        self._measure_replaced(str(s), str(old), str(new))
        return (s, old, new, *rest)

    def _measure_format(self, text: Any, *given: Any, **kwargs: Any) -> tuple[Any, ...]:
        """text % values: no more than each of its % has room for, and the widths that it names."""
        values = given[0] if len(given) == 1 and isinstance(given[0], (tuple, dict)) else given
        named = values if isinstance(values, dict) else kwargs
        listed = () if isinstance(values, dict) else values
        largest = max((self.budget.look(each) for each in (*listed, *named.values())), default=0)
        widths = sum(int(digits[:12]) for digits in re.findall(r"\d+", str(text)))
        if "*" in str(text):
            widths += sum(abs(each) for each in listed if isinstance(each, int))
        self.budget.make(len(str(text)) + widths + str(text).count("%") * (_LONGEST_NUMBER + largest))
        return (text, *given)

    def _measure_round(self, value: Any, precision: Any = 0, *rest: Any, **kwargs: Any) -> tuple[Any, ...]:
        if abs(int(kwargs.get("precision", precision))) > _LONGEST_NUMBER:
            raise BudgetError(f"it rounds to more than {_LONGEST_NUMBER} digits")
        return (value, *(() if "precision" in kwargs else (precision,)), *rest)

    def _measure_int(self, value: Any, *rest: Any, **_: Any) -> tuple[Any, ...]:
        if isinstance(value, str) and len(value) > _LONGEST_NUMBER:
            raise BudgetError(f"it reads a number of more than {_LONGEST_NUMBER} digits")
        return (value, *rest)

    def _measure_sum(self, values: Any, *rest: Any, **kwargs: Any) -> tuple[Any, ...]:
        start = kwargs.get("start", rest[1] if len(rest) > 1 else 0)
        if not isinstance(start, (int, float)):
            raise BudgetError("it adds up what are no numbers")
        return (values, *rest)

    def _measure_method(
        self, text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        """Of a str; with what it is to be called instead."""
        budget = self.budget
        budget.make(len(text))
        if name in ("center", "ljust", "rjust", "zfill") and args:
            budget.make(max(int(args[0]), len(text)))
        elif name == "replace" and len(args) >= 2:
            self._measure_replaced(text, str(args[0]), str(args[1]))
        elif name == "join" and args:
            values = list(budget.counted(args[0]))
            budget.make(sum(map(budget.look, values)) + len(values) * len(text))
            return (values,)
        elif name in ("rsplit", "split", "splitlines"):
            mark = args[0] if args and name != "splitlines" else kwargs.get("sep")
            most = args[1] if len(args) > 1 else kwargs.get("maxsplit", -1)
            n = text.count(mark) if isinstance(mark, str) and mark else len(text) // 2
            budget.make_list(1 + (min(n, int(most)) if int(most) >= 0 else n))
        return args

    def _measure_replaced(self, text: str, old: str, new: str) -> None:
        n = text.count(old) if old else len(text) + 1
        self.budget.make(len(text) + n * max(len(new) - len(old), 0))


def _is_light(value: Any) -> bool:
    """Whether nothing is to be measured: what that costs is part of the step."""
    kind = type(value)
    return len(value) <= _SHORT if kind is str else kind not in _HEAVY


class _Formatter(SandboxedFormatter):
    """str.format: no width is larger than a text may be."""

    _sandbox: Sandbox

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        super().__init__(sandbox)

    def format_field(self, value: Any, format_spec: str) -> str:
        """Called for each field, after what is within its format was filled in."""
        widths = sum(int(digits[:12]) for digits in re.findall(r"\d+", format_spec))
        if widths > MOST_TEXT:
            raise BudgetError(f"it makes a text of more than {MOST_TEXT} characters")
        self._sandbox.budget.step()
        self._sandbox.budget.make(widths + self._sandbox.budget.look(value))
        text: str = Formatter.format_field(self, value, format_spec)
        return text

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """!r and !s"""
        self._sandbox.budget.look(value)
        return super().convert_field(value, conversion)


_COUNTED = "counted by the budget"  # the name of a filter that no template can write


class _Counting(CodeGenerator):
    """Writes into each loop and each macro that its steps are counted."""

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802
        bodies: list[Any] = list(node.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)))
        for each in bodies:
            n_nodes = sum(1 for part in each.body for _ in part.find_all(nodes.Node))
            # no template can write such a statement: it takes an extension that isn't there
            each.body.insert(0, nodes.ExprStmt(nodes.Const(1 + n_nodes // _NODES_PER_STEP)))
            if isinstance(each, nodes.For) and each.test is not None:
                each.iter = nodes.Filter(each.iter, _COUNTED, [], [], None, None)
        super().visit_Template(node, frame)

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:  # noqa: N802
        assert isinstance(node.node, nodes.Const)
        self.writeline(f"environment.step({node.node.value})")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.joined((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")

    @optimizeconst
    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        self.write("(")
        sides = node.expr, *(operand.expr for operand in node.ops)
        searches = any(operand.op in ("in", "notin") for operand in node.ops)
        # beside a constant nothing long is looked at, unless that is looked for
        is_short = not searches and any(isinstance(side, nodes.Const) for side in sides)
        self._weigh("" if is_short or searches else "weighed", node.expr, frame)
        for operand in node.ops:
            self.write(f" {_OPERATORS[operand.op]} ")
            self._weigh("searched" if searches else "" if is_short else "weighed", operand.expr, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.sliced(")
        self.visit(node.node, frame)
        self.write(")[")
        self.visit(node.arg, frame)
        self.write("]")

    def _weigh(self, by: str, node: nodes.Expr, frame: Frame) -> None:
        if not by or isinstance(node, nodes.Const):
            self.visit(node, frame)
            return
        self.write(f"environment.{by}(")
        self.visit(node, frame)
        self.write(")")


_OPERATORS = {
    **{"eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<="},
    **{"in": "in", "notin": "not in"},
}
