"""The sandbox in which a chat template runs: what it may call, and what that may cost.

jinja2's immutable sandbox, set up as the models' own library does it: trim_blocks, lstrip_blocks, loop controls,
`raise_exception`, `strftime_now`, and a `tojson` that escapes nothing for HTML. On top of it, methods and filters are
those listed here, each of which knows beforehand how large its result can be. A `Sandbox` holds the budget of one
rendering and is used for one only, so that nothing is shared between renderings but compiled code.
"""

import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, reduce, wraps
from itertools import chain
from sys import getsizeof
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any, NoReturn

from jinja2 import filters, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.tests import TESTS
from jinja2.utils import Cycler, Joiner, Namespace, pass_context
from markupsafe import Markup, escape

from reflex_ipc import template_text as text
from reflex_ipc.errors import TemplateError
from reflex_ipc.template_text import MAX_CHARS, Budget, Marked, like, plain

_MAX_INT_BITS = 512
_MAX_WIDTH = 1 << 12
_MAX_ROWS = 100_000
_ITEM_BYTES = 64
_EMPTY: dict[str, object] = {}
_VIEWS = (type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))
_CONTAINERS = (list, tuple, dict, *_VIEWS)
_CONTAINER_METHODS: dict[type, frozenset[str]] = {
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
}
_COMPARISONS = {
    *("==", "!=", ">", ">=", "<", "<=", "eq", "ne", "gt", "ge", "lt", "le"),
    *("equalto", "greaterthan", "lessthan", "in"),
}
_CHEAP_FILTERS = ("abs", "attr", "count", "d", "default", "first", "float", "items", "last", "length", "reverse")
_WALKING_FILTERS = ("list", "map", "reject", "rejectattr", "select", "selectattr")
_COMPARING_FILTERS = ("groupby", "max", "min", "sort", "unique")
_SPEC = re.compile(
    r"%(?:\((?P<key>[^()]*)\))?(?P<form>[#0\- +]*(?P<width>\d*)(?:\.(?P<precision>\d*))?[hlL]?(?P<kind>[a-zA-Z%]))"
)


class Refusal(Exception):
    """The template called `raise_exception`."""


class _Generation(Extension):
    """`{% generation %}` marks what to train on; it renders as if it were not there."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(list(parser.parse_statements(("name:endgeneration",), drop_needle=True)), lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """What one rendering may do, and what it has left to do it with."""

    concat: Callable[[Iterable[str]], str]

    def __init__(self, budget: Budget) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # which would run the template's constant expressions at compile time
            extensions=[LoopControlExtension, _Generation],
            cache_size=0,
        )
        self.budget = budget
        self.concat = partial(text.concat, budget)
        self._constants: dict[str, Marked] = {}
        self._weights: dict[int, tuple[object, int]] = {}
        self.filters = {**self._operations(), **self._filters()}
        self.tests = self._tests()
        self.globals = {
            "cycler": Cycler,
            "dict": dict,
            "joiner": Joiner,
            "namespace": Namespace,
            "raise_exception": _raise_exception,
            "range": self.globals["range"],
            "strftime_now": _strftime_now,
        }
        self._functions = {id(function) for function in self.globals.values()}

    # --- How large a value is

    def weigh(self, value: object) -> int:
        """About the characters a value takes when it is written out. Containers cannot change, so theirs are kept."""
        if isinstance(value, str):
            return 8 + len(value)
        if not isinstance(value, _CONTAINERS):
            if isinstance(value, Namespace):
                raise TemplateError("a namespace cannot be written out or compared")
            return 8
        if (known := self._weights.get(id(value))) is not None:
            return known[1]
        total = 8
        for item in chain(value.keys(), value.values()) if isinstance(value, dict) else value:
            self.budget.spend()
            total += self.weigh(item)
            if total > MAX_CHARS:
                raise TemplateError("the template builds a structure that is too large to look at")
        self._weights[id(value)] = (value, total)
        return total

    def operand(self, value: Any) -> Any:
        """The value, accounted for as something that is compared or hashed."""
        if isinstance(value, str):
            self.budget.spend(len(value))
        elif isinstance(value, _CONTAINERS):
            self.budget.spend(self.weigh(value))
        return value

    def each(self, value: Any, cost: int = 0, compared: bool = False) -> Iterator[Any]:
        """The value's items, one by one accounted for."""
        for item in value:
            self.budget.hold(_ITEM_BYTES)
            self.budget.spend(cost)
            yield self.operand(item) if compared else item

    def text(self, value: Any) -> str:
        """The value as a template writes it out; a string as it is."""
        self.budget.spend()
        if type(value) is str or type(value) is Marked:
            return value
        if isinstance(value, (*_CONTAINERS, Namespace)):
            self.budget.spend(self.weigh(value))
        return self.budget.keep(str(value))

    # --- Operations, which the rewritten tree calls

    def _operations(self) -> dict[str, Callable[..., Any]]:
        return {
            "#text": self._constant,
            "#out": self._out,
            "#tick": lambda _: self.budget.spend(),
            "#operand": self.operand,
            "#box": self._box,
            "#slice": self._slice,
            "#~": lambda *values: text.concat(self.budget, map(self.text, values)),
            "#+": self._add,
            "#*": self._multiply,
            "#%": self._modulo,
            "#**": self._power,
            "#-": self._arithmetic(operator.sub),
            "#/": self._arithmetic(operator.truediv),
            "#//": self._arithmetic(operator.floordiv),
        }

    # The two that stand directly in an output take the context: such filters are not run while compiling.
    @pass_context
    def _constant(self, context: Context, value: str) -> Marked:
        return self._constants.get(value) or self._constants.setdefault(value, Marked(value))

    @pass_context
    def _out(self, context: Context, value: Any) -> str:
        return self.text(value)

    def _box(self, value: Any) -> Any:
        self.budget.hold(getsizeof(value))
        return value

    def _slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        wanted = slice(start, stop, step)
        if isinstance(value, str) and not isinstance(value, Markup):
            first, last, stride = wanted.indices(len(value))
            if stride == 1:
                return self.budget.keep(text.cut(value, first, max(first, last)))
            return self.budget.keep(like(plain(value)[wanted], value))
        return self._box(value[wanted])

    def _small(self, *values: Any) -> None:
        for value in values:
            if isinstance(value, int) and value.bit_length() > _MAX_INT_BITS:
                raise TemplateError("the template computes with numbers that are too large")

    def _arithmetic(self, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def run(left: Any, right: Any) -> Any:
            self.budget.spend()
            self._small(left, right)
            return function(left, right)

        return run

    def _add(self, left: Any, right: Any) -> Any:
        if isinstance(left, str) and isinstance(right, str):
            self.budget.room(len(left) + len(right))
            if isinstance(left, Markup) or isinstance(right, Markup):
                return self.budget.keep(plain(left) + plain(right))
            return self.budget.keep(text.join((left, right)))
        self._small(left, right)
        return self._box(left + right)

    def _multiply(self, left: Any, right: Any) -> Any:
        if isinstance(left, int):
            left, right = right, left
        if isinstance(right, int):
            if isinstance(left, str):
                return text.repeat(self.budget, left, right)
            if isinstance(left, (list, tuple)):
                self.budget.hold(len(left) * max(right, 0) * 8)
        self._small(left, right)
        return self._box(left * right)

    def _power(self, left: Any, right: Any) -> Any:
        self.budget.spend()
        self._small(left, right)
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_INT_BITS:
            raise TemplateError("the template computes with numbers that are too large")
        return left**right

    def _modulo(self, left: Any, right: Any) -> Any:
        self._small(left, right)
        return self._percent(left, right) if isinstance(left, str) else self._box(left % right)

    def _percent(self, form: str, values: Any) -> str:
        """printf-style formatting, without widths out of the arguments (`%*d`)."""
        if isinstance(form, Markup):
            raise TemplateError("a text marked as safe cannot be formatted")
        given = iter(values if isinstance(values, tuple) else (values,))
        pieces = []
        at = 0
        for spec in _SPEC.finditer(plain(form)):
            self.budget.hold(_ITEM_BYTES)
            pieces.append(_literal(form, at, spec.start()))
            at = spec.end()
            if spec["kind"] == "%":
                pieces.append(self.budget.keep(text.cut(form, at - 1, at)))
                continue
            try:
                value = next(given) if spec["key"] is None else values[spec["key"]]
            except StopIteration:
                raise TypeError("not enough arguments for format string") from None
            self._width(spec["width"], spec["precision"])
            if spec["form"] == "s":
                pieces.append(self.text(value))
            else:
                self.operand(value)
                pieces.append(self.budget.keep(("%" + spec["form"]) % (plain(value),)))
        indexed = hasattr(values, "__getitem__") and not isinstance(values, (tuple, str))
        if next(given, pieces) is not pieces and not indexed:
            raise TypeError("not all arguments converted during string formatting")
        pieces.append(_literal(form, at, len(form)))
        return text.concat(self.budget, pieces)

    def _width(self, *numbers: str | None) -> None:
        if any(number and (len(number) > 8 or int(number) > _MAX_WIDTH) for number in numbers):
            raise TemplateError(f"the template formats to a width over {_MAX_WIDTH}")

    def _format(self, form: str, args: tuple[Any, ...], names: Mapping[str, Any]) -> str:
        """str.format, without replacement fields inside format specifications."""
        formatter = SandboxedFormatter(self)
        pieces = []
        count = 0
        for literal, field, spec, conversion in formatter.parse(plain(form)):
            self.budget.hold(_ITEM_BYTES)
            pieces.append(like(literal, form))
            if field is None:
                continue
            if not field:
                field, count = str(count), count + 1
            value, _ = formatter.get_field(field, args, names)
            self.operand(value)
            value = formatter.convert_field(value, conversion)
            self._width(*re.findall(r"\d+", spec or ""))
            pieces.append(self.text(value) if not spec else self.budget.keep(format(plain(value), spec)))
        return text.concat(self.budget, pieces)

    # --- What jinja2 asks its environment

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(obj) is Marked and type(argument) is int:
            at = argument + len(obj) if argument < 0 else argument
            if 0 <= at < len(obj):
                return text.cut(obj, at, at + 1)
        return super().getitem(obj, argument)

    def call_filter(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A filter by its name, which may come from anywhere; the operations above are for the rewritten tree alone."""
        return _refuse(name) if name.startswith("#") else super().call_filter(name, *args, **kwargs)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what a template may call: methods from the lists, macros and loops, and the sandbox's own functions."""
        self.budget.spend()
        method = obj.__wrapped__ if type(obj) is FunctionType and hasattr(obj, "__wrapped__") else obj
        if isinstance(method, BuiltinMethodType):
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return self._call_method(method.__self__, method.__name__, method, args, kwargs)
        if (
            id(obj) in self._functions
            or isinstance(obj, (Macro, LoopContext, BlockReference, Joiner, Undefined))
            or (isinstance(obj, MethodType) and isinstance(obj.__self__, (LoopContext, Cycler)))
        ):
            if not isinstance(obj, Macro) or obj.catch_varargs or obj.catch_kwargs:
                for value in (*args, *(value for key, value in kwargs.items() if key[:1] != "_")):
                    self.operand(value)
            result = context.call(obj, *args, **kwargs)
            return result if isinstance(obj, Macro) else self._kept(result)
        return _refuse(type(obj).__name__)

    def _call_method(self, owner: Any, name: str, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(owner, str):
            if name == "format":
                return self._format(owner, args, kwargs)
            if name == "format_map":
                return self._format(owner, (), *args, **kwargs)
            if name in text.METHODS:
                return text.METHODS[name](self.budget, owner, *args, **kwargs)
        elif name in _CONTAINER_METHODS.get(type(owner), ()):
            for value in args:
                self.operand(value)
            if name in ("count", "index"):
                self.operand(owner)
            return self._kept(method(*args, **kwargs))
        return _refuse(f"{type(owner).__name__}.{name}")

    def _kept(self, value: Any) -> Any:
        return self._box(value) if isinstance(value, (list, dict, str)) else value

    # --- Tests and filters

    def _tests(self) -> dict[str, Any]:
        def compared(test: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *values: test(*map(self.operand, values))

        def written(test: Callable[[str], bool]) -> Callable[[Any], bool]:
            return lambda value: test(self.text(value))

        given: dict[str, Any] = dict(TESTS)
        return {
            **given,
            **{name: compared(given[name]) for name in _COMPARISONS},
            **{name: written(given[name]) for name in ("lower", "upper")},
        }

    def _filters(self) -> dict[str, Callable[..., Any]]:
        given = filters.FILTERS
        return {
            **{name: given[name] for name in _CHEAP_FILTERS},
            **{name: self._walks(given[name]) for name in _WALKING_FILTERS},
            **{name: self._walks(given[name], compared=True) for name in _COMPARING_FILTERS},
            "batch": self._walks(self._rows(filters.do_batch)),
            "slice": self._walks(self._rows(filters.sync_do_slice)),
            **{name: self._method(name) for name in ("capitalize", "lower", "upper")},
            "center": lambda value, width=80: text.METHODS["center"](self.budget, self.text(value), width),
            "dictsort": lambda value, *args, **kwargs: given["dictsort"](self.operand(value), *args, **kwargs),
            "e": self._escape,
            "escape": self._escape,
            "forceescape": lambda value: self._escape(self.text(value)),
            "format": lambda value, *args, **kwargs: self._percent(self.text(value), kwargs or args),
            "indent": self._indent,
            "int": self._int,
            "join": self._join,
            "replace": self._replace,
            "round": self._round,
            "safe": lambda value: value if isinstance(value, Markup) else Markup(plain(self.text(value))),
            "string": lambda value: value if isinstance(value, Markup) else self.text(value),
            "sum": self._sum,
            "title": self._title,
            "tojson": self._tojson,
            "trim": lambda value, chars=None: text.METHODS["strip"](self.budget, self.text(value), chars),
            "truncate": lambda value, *args, **kwargs: self._kept(
                filters.do_truncate(self, plain(value), *args, **kwargs)
            ),
        }

    def _walks(self, function: Callable[..., Any], compared: bool = False) -> Callable[..., Any]:
        """A filter of jinja2 that walks over its value."""
        lead = int(hasattr(function, "jinja_pass_arg"))

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            value = args[lead]
            cost = sum(len(arg) for arg in (*args[lead + 1 :], *kwargs.values()) if isinstance(arg, str))
            items = self.each(value, cost, compared) if value else value
            return self._kept(function(*args[:lead], items, *args[lead + 1 :], **kwargs))

        return run

    def _rows(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(value: Any, count: int, fill_with: Any = None) -> Iterator[Any]:
            if count > _MAX_ROWS:
                raise TemplateError(f"the template makes rows of more than {_MAX_ROWS}")
            return self.each(function(value, count, fill_with))

        return run

    def _method(self, name: str) -> Callable[..., Any]:
        return lambda value: text.METHODS[name](self.budget, self.text(value))

    def _escape(self, value: Any) -> Markup:
        if isinstance(value, Markup):
            return value
        ordinary = plain(self.text(value))
        self.budget.room(len(ordinary) + 4 * sum(map(ordinary.count, "<>&'\"")))
        return self._box(escape(ordinary))  # type: ignore[no-any-return]

    def _indent(self, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> Any:
        if isinstance(value, str):
            n_lines = len(text.METHODS["splitlines"](self.budget, value)) + 1
            self.budget.room(len(value) + n_lines * (len(width) if isinstance(width, str) else max(width, 0)))
        return self._kept(filters.do_indent(plain(value), plain(width), first, blank))

    def _int(self, value: Any, default: int = 0, base: int = 10) -> int:
        if isinstance(value, str) and len(value) > _MAX_WIDTH:
            raise TemplateError("the template reads a number that is too long")
        return filters.do_int(value, default, base)

    def _join(self, value: Any, d: Any = "", attribute: int | str | None = None) -> str:
        items = self.each(value, len(str(attribute)))
        if attribute is not None:
            items = map(filters.make_attrgetter(self, attribute), items)
        return text.METHODS["join"](self.budget, self.text(d), map(self.text, items))  # type: ignore[no-any-return]

    def _replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        pieces = (self.text(value), self.text(old), self.text(new))
        return text.replace(self.budget, *pieces, -1 if count is None else count)

    def _round(self, value: Any, precision: int = 0, method: Any = "common") -> Any:
        if abs(precision) > 100:
            raise TemplateError("the template rounds to more than 100 digits")
        self._small(value)
        return filters.do_round(value, precision, method)

    def _title(self, value: Any) -> str:
        ordinary = plain(self.text(value))
        self.budget.hold(_ITEM_BYTES * len(ordinary))  # it may be split into so many pieces
        return self.budget.keep(filters.do_title(ordinary))

    def _sum(self, value: Any, attribute: int | str | None = None, start: Any = 0) -> Any:
        if isinstance(start, str):
            raise TypeError("sum() can't sum strings")
        items = self.each(value, len(str(attribute)))
        if attribute is not None:
            items = map(filters.make_attrgetter(self, attribute), items)
        return reduce(self._add, items, start)

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        self.operand(value)
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        if indent is None and separators is None:
            return self.budget.keep(encoder.encode(value))
        self._width(str(len(indent) if isinstance(indent, str) else indent or 0))
        return text.concat(self.budget, encoder.iterencode(value))


def _literal(form: str, start: int, stop: int) -> str:
    """What stands between the conversions of a printf-style format."""
    piece = text.cut(form, start, stop)
    if "%" in piece:
        raise ValueError("unsupported format")
    return piece


def _refuse(name: str) -> NoReturn:
    raise SecurityError(f"a chat template cannot call {name}")


def _raise_exception(message: str) -> NoReturn:
    raise Refusal(message)


def _strftime_now(form: str) -> str:
    from datetime import datetime

    if len(form) > _MAX_WIDTH:
        raise TemplateError("the template formats the time at too great a length")
    return datetime.now().strftime(form)
