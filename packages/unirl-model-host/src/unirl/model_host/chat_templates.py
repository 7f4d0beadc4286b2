"""Chat templates of checkpoints, rendered within limits of time and size.

A chat template is a program in Jinja that comes with a checkpoint. transformers runs it in Jinja's sandbox, which keeps
it from files and from Python, and not from running for hours or filling the memory.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from importlib import import_module
from threading import Lock, local
from typing import Any, cast

from jinja2 import Template, TemplateError, TemplateRuntimeError, nodes, pass_context, pass_environment
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from unirl.core.errors import RecipeError

__all__ = ["bounded_templates", "render_chat"]

TEMPLATE = 2**20
"""Characters of a template. Published ones have up to a hundred thousand."""
SECONDS = 5.0
"""Of the thread's own time, for one conversation: nothing that a busy machine prolongs."""
VALUE = 2**22
"""Size of one value: characters of a text, those of all its items and their number for a list. A conversation adds its
own, several times."""
TOTAL = 2**26
"""Size of all values that are made, and of the text."""
INTEGER = 10**6
"""Largest integer that is a width, or a number of times."""
DIGITS = 2**12
"""Bits of integers."""
GROWING = (
    "center",
    "expandtabs",
    "indent",
    "join",
    "ljust",
    "replace",
    "rjust",
    "to_bytes",
    "tojson",
    "translate",
    "xmlattr",
    "zfill",
)
"""Filters and methods that make as much as their arguments' sizes multiplied."""
FORMATS = ("format", "format_map", "strftime_now")
LEFT_OUT = ("lipsum", "pprint", "urlize", "wordwrap")
"""Functions and filters whose time grows with the square of what they are given. No published template uses them."""
FAILURES = (
    TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, SyntaxError,
    TypeError, ValueError
)  # fmt: skip
"""What a template may raise that does not suit its conversation, or Jinja."""

_swap = Lock()
_inside: list[Any] = []
"""transformers' own function, once for each block that is running."""
_thread = local()


def render_chat(renderer: Any, conversation: Any, *, key: str, sample: str = "", **settings: Any) -> Any:
    """`apply_chat_template` of a tokenizer or a processor, within the limits; its text, or texts of several.

    key: of the setting that asks for it, and sample: its id, for errors.  settings: as transformers takes them.
    Raises RecipeError for a template that fails, or takes or makes too much.
    """
    with bounded_templates():
        try:
            return renderer.apply_chat_template(conversation, tokenize=False, **settings)
        except FAILURES as error:
            raise _failure(error, key=key, sample=sample) from error


@contextmanager
def bounded_templates() -> Generator[None]:
    """Within the block transformers renders templates within the limits, with its own filters and variables; whoever
    calls it, such as a pipeline of diffusers.

    Raises RecipeError, key `model.path`, for a template that fails.
    """
    library: Any = import_module("transformers.utils.chat_template_utils")
    with _swap:
        plain = _inside[0] if _inside else library._compile_jinja_template
        _inside.append(plain)
        library._compile_jinja_template = lambda text: _compiled(text, plain)
    try:
        yield
    except TemplateError as error:
        raise _failure(error, key="model.path") from error
    finally:
        with _swap:
            _inside.pop()
            if not _inside:
                library._compile_jinja_template = plain


def _failure(error: BaseException, *, key: str, sample: str = "") -> RecipeError:
    text = (str(error) or type(error).__name__)[:500]
    where = f" on sample {sample!r}" if sample else ""
    return RecipeError(f"{key}: the checkpoint's chat template fails{where}: {text}")


@lru_cache(maxsize=32)
def _compiled(text: str, plain: Callable[[str], Template]) -> Template:
    if len(text) > TEMPLATE:
        raise TemplateRuntimeError(f"it has {len(text)} characters, expected at most {TEMPLATE}.")
    # The environment that transformers makes, whatever its version adds to it.
    environment = object.__new__(_Environment)
    environment.restrict(plain("").environment)
    with _limited(0):
        return environment.from_string(text)


@contextmanager
def _limited(given: int) -> Generator[_Limits]:
    """The limits of what this thread does in the block, for a conversation of this size.

    Raises TemplateError for whatever a template may raise.
    """
    before = getattr(_thread, "limits", None)
    _thread.limits = _Limits(given)
    try:
        yield _thread.limits
    except TemplateError:
        raise
    except FAILURES as error:
        raise TemplateRuntimeError(str(error) or type(error).__name__) from error
    finally:
        _thread.limits = before


class _Limits:
    """What is left of them, for one conversation."""

    def __init__(self, given: int) -> None:
        """given: size of the conversation."""
        self.value = VALUE + 16 * given
        self._most = self._total = TOTAL + 256 * given
        self._end = time.thread_time() + SECONDS

    def spend(self, size: int) -> None:
        """Count something that is made, or repeated."""
        self._total -= size + 1
        if self._total < 0:
            raise TemplateRuntimeError(f"it makes more than {TOTAL} characters and items.")
        if time.thread_time() > self._end:
            raise TemplateRuntimeError(f"it takes more than {SECONDS:g} s.")

    def hold(self, value: Any) -> Any:
        """The value, counted."""
        self.spend(self.size(value))
        return value

    def size(self, value: Any) -> int:
        """Characters and items of a value, as often as they are in it."""
        total, rest = 0, [value]
        while rest:
            one: Any = rest.pop()
            if isinstance(one, str | bytes):
                total += len(one)
            elif isinstance(one, Mapping):
                rest += [*cast("Mapping[Any, Any]", one).keys(), *cast("Mapping[Any, Any]", one).values()]
            elif isinstance(one, list | tuple | set | frozenset):
                rest += cast("list[Any]", one)
            elif isinstance(one, range):
                total += len(one)
            elif isinstance(one, int) and one.bit_length() > DIGITS:
                raise TemplateRuntimeError(f"it makes an integer of more than {DIGITS} bits.")
            total += 1
            if total + len(rest) > self.value:
                raise TemplateRuntimeError(f"it makes a value of more than {VALUE} characters and items.")
        return total

    def admit(self, name: str, values: Sequence[Any]) -> None:
        """Raise before a call that would make too much. name: of the filter, the function or the operator."""
        sizes, counts = [1], [1]
        if name == "sum" and any(isinstance(value, list | tuple) for value in values[1:]):
            raise TemplateRuntimeError("got sum of lists, expected numbers.")
        for value in values:
            if isinstance(value, int):
                if abs(value) > INTEGER and name in (*GROWING, *FORMATS, "batch", "slice"):
                    raise TemplateRuntimeError(f"got {name} with an integer over {INTEGER}.")
                counts.append(abs(value))
            else:
                # How long a generator is shows when it ends.
                sizes.append(INTEGER if isinstance(value, Iterator) else self.size(value))
                if name in FORMATS and isinstance(value, str):
                    widths = re.findall(r"\d+", value)
                    self._fits(name, sum(int(width) if len(width) < 10 else self._most + 1 for width in widths))
                    counts.append(value.count("%") + value.count("{"))
        self.spend(sum(sizes))
        if name in (*GROWING, *FORMATS):
            several = sorted([*sizes, *counts])[-2:]
            self._fits(name, several[0] * several[1])

    def _fits(self, name: str, size: int) -> None:
        if size > self._most:
            raise TemplateRuntimeError(f"got {name} of values that make more than {TOTAL} characters.")


class _Template(Template):
    def render(self, *args: Any, **kwargs: Any) -> str:
        with _limited(_given(kwargs)) as limits:
            return limits.hold(super().render(*args, **kwargs))


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("+", "*", "%", "**"))
    template_class = _Template

    @property
    def limits(self) -> _Limits:
        return _thread.limits

    def restrict(self, plain: Any) -> None:
        """Take over an environment, and hold its filters to the limits."""
        self.__dict__.update(plain.__dict__)
        # A value that is folded into a constant is made before anything can be counted.
        self.optimized, self.finalize = False, _shown
        filters = {name: value for name, value in plain.filters.items() if name not in LEFT_OUT}
        self.filters = {"_held": _hold, **{name: _held(name, function) for name, function in filters.items()}}
        self.globals = {name: value for name, value in plain.globals.items() if name not in LEFT_OUT}
        self.extensions = {name: extension.bind(self) for name, extension in plain.extensions.items()}

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Counted(self).visit(source), *args, **kwargs)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # As Jinja has it.
        limits, name = __self.limits, str(getattr(__obj, "__name__", ""))
        if __obj == __self.spend:
            return __self.spend(*args)
        # The sandbox wraps `format` of texts.
        method = getattr(__obj, "__wrapped__", __obj)
        # Jinja gives variables of loops and blocks along.
        named = [value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")]
        limits.admit(name, [getattr(method, "__self__", None), *args, *named])
        return limits.hold(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        limits, text = self.limits, next((one for one in (left, right) if isinstance(one, str | list | tuple)), None)
        if operator == "*" and text is not None:
            times: Any = right if text is left else left
            if isinstance(times, int) and limits.size(text) * times > limits.value:
                raise TemplateRuntimeError(f"it repeats a value to more than {VALUE} characters and items.")
        elif operator == "%" and isinstance(left, str):
            limits.admit("format", [left, *(right if isinstance(right, tuple) else (right,))])
        elif (
            operator == "**" and isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > DIGITS
        ):
            raise TemplateRuntimeError(f"it makes an integer of more than {DIGITS} bits.")
        return limits.hold(super().call_binop(context, operator, left, right))

    def spend(self, size: int) -> str:
        self.limits.spend(size)
        return ""

    def joined(self, *parts: Any) -> str:
        """Operator `~`; the parts were counted when it was called."""
        return "".join(map(str, parts))


class _Counted(NodeTransformer):
    """Counts each round of a loop and each call of a macro, with the text in it, and the values that literals make."""

    def __init__(self, environment: _Environment) -> None:
        self._environment = environment

    def _call(self, name: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
        call = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
        return cast("nodes.Call", call.set_lineno(lineno).set_environment(self._environment))

    def _visit_body(self, node: Any) -> nodes.Node:
        size = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        spend = self._call("spend", [nodes.Const(size)], node.lineno)
        node.body.insert(0, nodes.ExprStmt(spend).set_lineno(node.lineno).set_environment(self._environment))
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _visit_body

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call("joined", node.nodes, node.lineno)

    def _visit_literal(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":
            return node
        held = nodes.Filter(node, "_held", [], [], None, None)
        return held.set_lineno(node.lineno).set_environment(self._environment)

    visit_List = visit_Tuple = visit_Dict = _visit_literal


def _held(name: str, function: Any) -> Any:
    """A filter that counts what it makes."""
    passed: str = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    @wraps(function)
    def held(context: Any, *args: Any, **kwargs: Any) -> Any:
        environment = context.environment
        environment.limits.admit(name, [*args, *kwargs.values()])
        first = {"context": context, "eval_context": context.eval_ctx, "environment": environment}
        return environment.limits.hold(function(*([first[passed]] if passed else []), *args, **kwargs))

    return pass_context(held)


@pass_environment
def _hold(environment: _Environment, value: Any) -> Any:
    return environment.limits.hold(value)


@pass_context
def _shown(context: Any, value: Any) -> Any:
    """Part of the text."""
    return context.environment.limits.hold(value)


def _given(values: Mapping[str, Any]) -> int:
    """Size of what a template is given, which no template made."""
    total, rest = 0, list(values.values())
    while rest:
        one: Any = rest.pop()
        total += len(one) if isinstance(one, str) else 1
        rest += list(one.values()) if isinstance(one, dict) else one if isinstance(one, list | tuple) else []
    return total
