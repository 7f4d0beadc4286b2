"""Loading one plugin in isolation: a failure is recorded with the plugin and does not affect any other."""

from __future__ import annotations

import re
import signal
import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.metadata import EntryPoint
from types import FrameType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

import pluggy

from ..names import did_you_mean, shortened
from ..specs.overrides import wrong_proposals
from ..specs.spec import (
    AlgorithmSpec,
    BackendSpec,
    EngineSpec,
    EnvironmentSpec,
    LauncherSpec,
    ModelSpec,
    RewardSpec,
    Spec,
    TrackerSpec,
    TransportSpec,
)
from .entry_points import entry_points, installed_dists
from .hookspec import API_GROUP, HookSpecs

__all__ = [
    "Plugin",
    "PluginRecord",
    "broken",
    "describe_failure",
    "disabled_plugin",
    "find_plugins",
    "import_failure",
    "imported",
    "load_plugin",
    "register",
]

SPEC_HOOKS: dict[str, type[Spec]] = {
    "unirl_models": ModelSpec,
    "unirl_engines": EngineSpec,
    "unirl_backends": BackendSpec,
    "unirl_algorithms": AlgorithmSpec,
    "unirl_rewards": RewardSpec,
    "unirl_environments": EnvironmentSpec,
    "unirl_trackers": TrackerSpec,
    "unirl_launchers": LauncherSpec,
    "unirl_transports": TransportSpec,
}
"""Hook -> the spec that it must return."""
NAME_HOOKS = ("unirl_kernels", "unirl_guidances")
"""Hooks that return `module:Class` of each class that they offer."""

PART_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
TARGET = re.compile(r"\w+(\.\w+)*:\w+(\.\w+)*")
"""Syntax of a reference to an implementation: `package.module:attribute`."""


@dataclass(frozen=True, kw_only=True)
class PluginRecord:
    """The outcome of loading one plugin."""

    name: str
    """Name of its entry point."""
    dist: str
    """The dist that provides it; for a single file its absolute path."""
    version: str
    """Version of the dist; for a single file a digest of its content."""
    module: str
    """Value of its entry point: `package.module` or `package.module:object`."""
    status: Literal["loaded", "broken", "refused", "disabled"]
    """`broken` failed to load, `refused` targets another version of the hook API, `disabled` was switched off."""
    error: str | None = None
    """Why it is not loaded, as one sentence."""
    specs: tuple[Spec, ...] = ()
    """Its parts. A broken plugin lists those that could still be read; the catalog does not offer them."""
    kernels: tuple[str, ...] = ()
    """`module:Class` of its SDE kernels."""
    guidances: tuple[str, ...] = ()
    """`module:Class` of its guidances."""
    conflicts: tuple[str, ...] = ()
    """One sentence for each of its parts that another plugin also provides."""
    cause: BaseException | None = field(default=None, compare=False, repr=False)
    """The exception behind `error`."""

    @property
    def is_file(self) -> bool:
        """Whether the plugin is a single file; `dist` is then its path."""
        return self.dist.endswith(".py")

    @property
    def label(self) -> str:
        return f"{self.name!r} ({self.dist} {self.version})"


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A record and, if the plugin loaded, its hooks.

    Each plugin has its own pluggy manager: with a shared one, an implementation that raises ends the call for all.
    """

    record: PluginRecord
    hooks: pluggy.HookRelay | None = None

    def implements(self, hook: str) -> bool:
        return self.hooks is not None and bool(getattr(self.hooks, hook).get_hookimpls())

    def call(self, hook: str, **arguments: Any) -> list[Any]:
        """Results of this plugin's implementations of a hook. Their exceptions propagate."""
        assert self.hooks is not None, f"{self.record.name} is not loaded"
        return getattr(self.hooks, hook)(**arguments)


def find_plugins(group: str) -> Iterator[tuple[PluginRecord, EntryPoint | None]]:
    """Entry points of the group and of its other versions (`unirl.v1`, `unirl.v2`, ...), each with the record of a
    plugin that is not loaded yet; imports nothing.

    A dist whose entry points cannot be read yields a broken record and no entry point.
    """
    family = group.rpartition(".")[0]
    versions = re.compile(re.escape(family) + r"\.v\d+") if family else re.compile(re.escape(group))
    for dist in installed_dists():
        if dist.error is not None:
            name, version = dist.identity
            text = f"the entry points of its dist cannot be read: {dist.error}. Reinstall {name}."
            blank = PluginRecord(name=name, dist=name, version=version, module="", status="loaded")
            yield _failed(blank, text, cause=dist.error), None
    groups = {point.group for dist in installed_dists() for point in dist.points}
    for one in sorted({group, *filter(versions.fullmatch, groups)}):
        for point in entry_points(one):
            blank = PluginRecord(
                name=point.name, dist=point.dist, version=point.version, module=point.value, status="loaded"
            )
            yield blank, point.entry


def load_plugin(point: EntryPoint, blank: PluginRecord, *, group: str, disabled: bool) -> Plugin:
    """Import the target of an entry point and collect its specs; a failure becomes its record."""
    if point.group != group:
        text = (
            f"it targets hook API {point.group}; this unirl-core provides {group}. "
            f"Install a release of {blank.dist} for {group}, or another release of unirl-core."
        )
        return Plugin(record=_failed(blank, text, status="refused"))
    if disabled:
        return disabled_plugin(blank)
    result = imported(point.load, blank, what=point.value)
    return result if isinstance(result, Plugin) else register(result, blank)


def imported(load: Callable[[], object], blank: PluginRecord, *, what: str) -> object:
    """The result of `load`, or a broken Plugin if it fails. what: the module or the file.

    The user's Ctrl-C propagates; a KeyboardInterrupt raised by the plugin itself counts as its failure.
    """
    with _noting_ctrl_c() as is_pressed:
        try:
            return load()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - recorded; a plugin that exits must not end the host
            return broken(blank, import_failure(what, dist=blank.dist, error=error), cause=error)
        except KeyboardInterrupt as error:
            if is_pressed():
                raise
            return broken(blank, import_failure(what, dist=blank.dist, error=error), cause=error)


def broken(blank: PluginRecord, error: str, *, cause: BaseException) -> Plugin:
    """A plugin that did not load, with the reason."""
    return Plugin(record=_failed(blank, error, cause=cause))


def disabled_plugin(blank: PluginRecord) -> Plugin:
    """A plugin disabled by the user."""
    return Plugin(record=_failed(blank, "it was disabled by the user.", status="disabled"))


def register(plugin: object, blank: PluginRecord) -> Plugin:
    """Check the hooks of a plugin and collect its specs."""
    manager = pluggy.PluginManager("unirl")
    manager.add_hookspecs(HookSpecs)
    try:
        manager.register(plugin, blank.name)
    except Exception as error:  # noqa: BLE001 - recorded
        return Plugin(record=_failed(blank, f"a hook does not fit: {_one_line(error)}", cause=error))
    problems = [*_strange_hooks(manager, plugin)]
    specs: list[Spec] = []
    cause: BaseException | None = None
    offered: dict[str, tuple[str, ...]] = {}
    for hook in (*SPEC_HOOKS, *NAME_HOOKS):
        if not getattr(manager.hook, hook).get_hookimpls():
            continue
        implementations = getattr(manager.hook, hook).get_hookimpls()
        try:
            answers: list[object] = getattr(manager.hook, hook)()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - recorded
            cause = cause or error
            problems.append(f"{hook} raised {describe_failure(error)}")
            continue
        # pluggy leaves out those that return None.
        if len(answers) < len(implementations):
            problems.append(f"{hook} returned None, expected a list of {'names' if hook in NAME_HOOKS else 'specs'}")
        for answer in answers:
            if hook in NAME_HOOKS:
                names, bad = _checked_names(hook, answer)
                offered[hook.removeprefix("unirl_")] = tuple(names)
            else:
                good, bad = _checked(hook, answer, SPEC_HOOKS[hook])
                specs += good
            problems += bad
    names = [(spec.kind, spec.name) for spec in specs]
    problems += [f"it provides {k} {n!r} twice" for k, n in sorted({x for x in names if names.count(x) > 1})]
    if problems:
        return Plugin(record=_failed(blank, "; ".join(problems) + ".", specs=specs, cause=cause))
    record = replace(_failed(blank, None, status="loaded", specs=specs), **offered)
    return Plugin(record=record, hooks=manager.hook)


def describe_failure(error: BaseException) -> str:
    """`TypeName: message (file.py:12)`, with the innermost frame of its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError):
        place = f" ({error.filename}:{error.lineno})"
    return f"{type(error).__name__}: {_one_line(error)}{place}"


def _failed(
    blank: PluginRecord,
    error: str | None,
    *,
    status: Literal["loaded", "broken", "refused", "disabled"] = "broken",
    specs: Sequence[Spec] = (),
    cause: BaseException | None = None,
) -> PluginRecord:
    return PluginRecord(
        name=blank.name,
        dist=blank.dist,
        version=blank.version,
        module=blank.module,
        status=status,
        error=error,
        specs=tuple(specs),
        cause=cause,
    )


@contextmanager
def _noting_ctrl_c() -> Generator[Callable[[], bool]]:
    """Yields a function that tells whether the user pressed Ctrl-C; it assumes so if SIGINT has another handler."""
    handler = signal.getsignal(signal.SIGINT)
    # A background process of a shell without job control ignores SIGINT.
    if threading.current_thread() is not threading.main_thread() or handler is signal.SIG_IGN:
        yield lambda: False
        return
    if handler is not signal.default_int_handler:
        yield lambda: True
        return
    is_pressed = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal is_pressed
        is_pressed = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: is_pressed
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def import_failure(value: str, *, dist: str, error: BaseException) -> str:
    """Why importing an entry point failed: its own module is missing, or a dependency, or it raised.

    dist: of the entry point; the path of a plugin that is a file.
    """
    module = value if value == dist else value.partition(":")[0].strip()
    # For a file, a missing module can only be one that it imports.
    own = "" if value == dist else f"{module}."
    if isinstance(error, ModuleNotFoundError) and error.name and own.startswith(f"{error.name}."):
        return f"its entry point names {value!r}, but there is no module {error.name!r}. Reinstall {dist}."
    if isinstance(error, ModuleNotFoundError) and error.name:
        # Many dists share the package `unirl`, which is always there.
        top = error.name if error.name.startswith("unirl.") else error.name.partition(".")[0]
        return f"importing {module!r} needs {top!r}, which is not installed: {describe_failure(error)}"
    return f"importing {module!r} raised {describe_failure(error)}"


def _strange_hooks(manager: pluggy.PluginManager, plugin: object) -> Iterator[str]:
    """Misspelt hooks, hooks without their decorator, and no hooks at all: pluggy silently ignores all three."""
    known = sorted(name for name in vars(HookSpecs) if name.startswith("unirl_"))
    callers = manager.get_hookcallers(plugin) or []
    for caller in callers:
        required = [impl for impl in caller.get_hookimpls() if not impl.optionalhook]
        if not caller.has_spec() and required:
            yield f"{caller.name!r} is not a hook of {API_GROUP}{did_you_mean(caller.name, known)}"
    implemented = {caller.name for caller in callers}
    for name in known:
        if name not in implemented and isinstance(getattr(plugin, name, None), Callable):
            yield f"{name!r} is not decorated with @hookimpl and would never be called"
    if not callers:
        yield f"it implements no hook of {API_GROUP}; decorate with @hookimpl functions named {', '.join(known)}"


def _checked(hook: str, answer: object, kind: type[Spec]) -> tuple[list[Spec], list[str]]:
    """The good specs of one answer, and a sentence for each bad one."""
    if isinstance(answer, (str, bytes)) or not isinstance(answer, Iterable):
        return [], [f"{hook} returned {answer!r}, expected a list of specs"]
    good: list[Spec] = []
    bad: list[str] = []
    try:
        items = list(cast(Iterable[object], answer))
    except Exception as error:  # noqa: BLE001 - recorded: a hook may be a generator that raises half way
        return [], [f"{hook} raised {describe_failure(error)}"]
    for item in items:
        if not isinstance(item, kind):
            bad.append(f"{hook} returned {_brief(item)}, expected {kind.__name__}s")
        elif not isinstance(cast(object, item.name), str) or not PART_NAME.fullmatch(item.name):
            bad.append(f"{hook}: the name {item.name!r} must be lower case with dashes")
        elif wrong := [*_wrong_fields(item)]:
            bad += [f"{hook}: {item.kind} {item.name!r}: {text}" for text in wrong]
        else:
            good.append(item)
    return good, bad


def _checked_names(hook: str, answer: object) -> tuple[list[str], list[str]]:
    """The names of classes in one answer, and a sentence for each entry that is not one."""
    expected = "a list of strings 'package.module:Class'"
    if isinstance(answer, (str, bytes)) or not isinstance(answer, Iterable):
        return [], [f"{hook} returned {_brief(answer)}, expected {expected}"]
    items = list(cast(Iterable[object], answer))
    names = [item for item in items if isinstance(item, str) and TARGET.fullmatch(item)]
    return names, [f"{hook} returned {_brief(item)}, expected {expected}" for item in items if item not in names]


def _wrong_fields(spec: Spec) -> Iterator[str]:
    """Fields of a spec with a wrong type or value: strings, tuples, sets, and members of a closed set."""
    for name, hint in _field_types(type(spec)).items():
        value: object = getattr(spec, name)
        if name in ("build", "config") and not (isinstance(value, str) and TARGET.fullmatch(value)):
            yield f"{name}: got {value!r}, expected a string 'package.module:attribute'"
        elif get_origin(hint) is Literal and value not in get_args(hint):
            yield f"{name}: got {value!r}, expected one of {', '.join(map(repr, get_args(hint)))}"
        elif (hint is str and not isinstance(value, str)) or (get_origin(hint) is tuple and type(value) is not tuple):
            yield f"{name}: got {_brief(value)}, expected a {'string' if hint is str else 'tuple'}"
        elif get_origin(hint) is AbstractSet and not isinstance(value, AbstractSet):
            yield f"{name}: got {_brief(getattr(spec, name))}, expected a set"
    if isinstance(spec, AlgorithmSpec):
        yield from wrong_proposals(spec)


@cache
def _field_types(cls: type[Spec]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {item.name: hints[item.name] for item in fields(cls)}


def _brief(value: object) -> str:
    return shortened(f"{type(value).__name__} {value!r}", 100)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
