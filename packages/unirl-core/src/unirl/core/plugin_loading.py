"""Loading one plugin, isolated: whatever goes wrong with it becomes its record and touches no other plugin."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any, Literal, cast

import pluggy

from .hookspec import API_GROUP, HookSpecs
from .names import did_you_mean
from .spec import (
    AlgorithmSpec,
    BackendSpec,
    EngineSpec,
    LauncherSpec,
    ModelSpec,
    RewardSpec,
    Spec,
    TrackerSpec,
    TransportSpec,
)

__all__ = ["Plugin", "PluginRecord", "canonical", "describe_failure", "find_plugins", "load_plugin"]

SPEC_HOOKS: dict[str, type[Spec]] = {
    "unirl_models": ModelSpec,
    "unirl_engines": EngineSpec,
    "unirl_backends": BackendSpec,
    "unirl_algorithms": AlgorithmSpec,
    "unirl_rewards": RewardSpec,
    "unirl_trackers": TrackerSpec,
    "unirl_launchers": LauncherSpec,
    "unirl_transports": TransportSpec,
}
"""Hook -> the spec that it must return."""

PART_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True, kw_only=True)
class PluginRecord:
    """What became of one installed plugin."""

    name: str
    """Name of its entry point."""
    dist: str
    version: str
    module: str
    """What its entry point names: `package.module` or `package.module:object`."""
    status: Literal["loaded", "broken", "refused", "disabled"]
    """`broken` failed to load, `refused` speaks another version of the hooks, `disabled` was left out by choice."""
    error: str | None = None
    """Why it is not loaded, as one sentence."""
    specs: tuple[Spec, ...] = ()
    """Its parts. Those of a broken plugin are what it could still name; the catalog does not offer them."""
    conflicts: tuple[str, ...] = ()
    """One sentence for each of its parts that another plugin provides as well."""
    cause: BaseException | None = field(default=None, compare=False, repr=False)
    """The exception behind `error`."""

    @property
    def label(self) -> str:
        return f"{self.name!r} ({self.dist} {self.version})"


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """A record and, where it loaded, the hooks of that plugin alone.

    Each plugin has a manager of its own: with a shared one, an implementation that raises ends the call for all.
    """

    record: PluginRecord
    hooks: pluggy.HookRelay | None = None

    def implements(self, hook: str) -> bool:
        return self.hooks is not None and bool(getattr(self.hooks, hook).get_hookimpls())

    def call(self, hook: str, **arguments: Any) -> list[Any]:
        """Results of this plugin's implementations of a hook. Lets what they raise through."""
        assert self.hooks is not None, f"{self.record.name} is not loaded"
        return getattr(self.hooks, hook)(**arguments)


def find_plugins(group: str) -> Iterator[tuple[str, EntryPoint, Distribution] | PluginRecord]:
    """Entry points of the group and of its other versions (`unirl.v1`, `unirl.v2`, ...); imports nothing.

    A dist whose entry points cannot be read gives a broken record instead. Of two copies of a dist on the path, the
    first counts, as it does for imports.
    """
    family = group.rpartition(".")[0]
    versions = re.compile(re.escape(family) + r"\.v\d+") if family else re.compile(re.escape(group))
    seen: set[str] = set()
    for dist in distributions():
        try:
            points = [p for p in dist.entry_points if p.group == group or versions.fullmatch(p.group)]
        except (ValueError, TypeError, AttributeError, OSError) as error:
            # importlib.metadata raises these for an entry_points.txt that is no such file; the others must not suffer.
            name, version = _identity(dist)
            text = f"the entry points of its dist cannot be read: {error}. Install {name} again."
            yield PluginRecord(
                name=name, dist=name, version=version, module="", status="broken", error=text, cause=error
            )
            continue
        if not points:
            continue
        key = canonical(_identity(dist)[0])
        if key in seen:
            continue
        seen.add(key)
        for point in points:
            yield point.group, point, dist


def load_plugin(point: EntryPoint, dist: Distribution, *, group: str, disabled: bool) -> Plugin:
    """Import what an entry point names and ask it for its specs; every failure ends in the record."""
    name, version = _identity(dist)
    blank = PluginRecord(name=point.name, dist=name, version=version, module=point.value, status="loaded")
    if point.group != group:
        text = (
            f"it speaks hooks {point.group}, this unirl-core speaks {group}. "
            f"Install a release of {name} for {group}, or another unirl-core."
        )
        return Plugin(record=_failed(blank, text, status="refused"))
    if disabled:
        return Plugin(record=_failed(blank, "it was disabled by choice.", status="disabled"))
    try:
        found = point.load()
    except (Exception, SystemExit) as error:  # noqa: BLE001 - recorded; a plugin that exits must not end the host
        return Plugin(record=_failed(blank, _import_failure(point.value, name, error), cause=error))
    return register(found, blank)


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
    for hook, kind in SPEC_HOOKS.items():
        if not getattr(manager.hook, hook).get_hookimpls():
            continue
        try:
            answers: list[object] = getattr(manager.hook, hook)()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - recorded
            cause = cause or error
            problems.append(f"{hook} raised {describe_failure(error)}")
            continue
        for answer in answers:
            good, bad = _checked(hook, answer, kind)
            specs += good
            problems += bad
    names = [(spec.kind, spec.name) for spec in specs]
    problems += [f"it provides {k} {n!r} twice" for k, n in sorted({x for x in names if names.count(x) > 1})]
    if problems:
        return Plugin(record=_failed(blank, "; ".join(problems) + ".", specs=specs, cause=cause))
    return Plugin(record=_failed(blank, None, status="loaded", specs=specs), hooks=manager.hook)


def describe_failure(error: BaseException) -> str:
    """`TypeName: message (file.py:12)`, with the innermost place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, SyntaxError):
        place = f" ({error.filename}:{error.lineno})"
    return f"{type(error).__name__}: {_one_line(error)}{place}"


def canonical(dist: str) -> str:
    """A dist's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", dist).lower()


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


def _identity(dist: Distribution) -> tuple[str, str]:
    """Name and version; a dist whose METADATA is gone is called by its folder."""
    try:
        metadata = cast(Any, dist.metadata)
        name, version = metadata["Name"], metadata["Version"]
    except (KeyError, TypeError, ValueError, OSError):
        name = version = None
    return str(name or getattr(dist, "_path", "a dist without a name")), str(version or "unknown")


def _import_failure(value: str, dist: str, error: BaseException) -> str:
    """Tells a plugin that is not there from one that lacks something else."""
    module = value.partition(":")[0].strip()
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        return f"its entry point names {value!r}, and there is no module {error.name!r}. Install {dist} again."
    if isinstance(error, ModuleNotFoundError) and error.name:
        top = error.name.partition(".")[0]
        return f"importing {module!r} needs {top!r}, which is not installed: {describe_failure(error)}"
    return f"importing {module!r} raised {describe_failure(error)}"


def _strange_hooks(manager: pluggy.PluginManager, plugin: object) -> Iterator[str]:
    """Misspelt hooks, hooks without their decorator, and no hooks at all: pluggy passes over all three in silence."""
    known = sorted(name for name in vars(HookSpecs) if name.startswith("unirl_"))
    callers = manager.get_hookcallers(plugin) or []
    for caller in callers:
        required = [impl for impl in caller.get_hookimpls() if not impl.optionalhook]
        if not caller.has_spec() and required:
            yield f"{caller.name!r} is no hook of {API_GROUP}{did_you_mean(caller.name, known)}"
    implemented = {caller.name for caller in callers}
    for name in known:
        if name not in implemented and isinstance(getattr(plugin, name, None), Callable):
            yield f"{name!r} is not decorated with @hookimpl, so it would never be called"
    if not callers:
        yield f"it implements no hook of {API_GROUP}; decorate with @hookimpl functions named {', '.join(known)}"


def _checked(hook: str, answer: object, kind: type[Spec]) -> tuple[list[Spec], list[str]]:
    """The good specs of one answer, and a sentence for each bad one."""
    if isinstance(answer, (str, bytes)) or not isinstance(answer, Iterable):
        return [], [f"{hook} must return specs in a list, it returned {answer!r}"]
    good: list[Spec] = []
    bad: list[str] = []
    try:
        items = list(cast(Iterable[object], answer))
    except Exception as error:  # noqa: BLE001 - recorded: a hook may be a generator that raises half way
        return [], [f"{hook} raised {describe_failure(error)}"]
    for item in items:
        if not isinstance(item, kind):
            bad.append(f"{hook} must return {kind.__name__}s, it returned {_brief(item)}")
        elif not isinstance(cast(object, item.name), str) or not PART_NAME.fullmatch(item.name):
            bad.append(f"{hook}: the name {item.name!r} must be lower case with dashes")
        else:
            good.append(item)
    return good, bad


def _brief(value: object) -> str:
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 100 else text[:97] + "..."


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
