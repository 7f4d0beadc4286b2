"""The catalog of installed plugins and their parts. Plugins are loaded in isolation, and nothing heavy is imported."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

from ..errors import PluginBroken, PluginConflict, PluginNotFound, PluginNotInstalled
from ..limits import Reason
from ..names import canonical, did_you_mean
from ..specs.spec import KINDS, Kind, Spec
from .entry_points import COMMANDS_GROUP, entry_points
from .hookspec import API_GROUP
from .loading import Plugin, PluginRecord, describe_failure, find_plugins, load_plugin, register
from .registry import Registry, known_parts

if TYPE_CHECKING:
    from ..roles import WeightUpdate
    from ..specs.plan import Plan
    from ..types.event import Event

__all__ = ["LEAVE_OUT", "Catalog", "Found", "HookFailure", "PluginRecord"]

log = logging.getLogger(__name__)

LEAVE_OUT = "Uninstall one of them, or disable its plugin with UNIRL_DISABLE=NAME."


@dataclass(frozen=True, kw_only=True)
class Found:
    """An installed part, and the dist that provides it."""

    spec: Spec
    dist: str
    version: str


@dataclass(frozen=True, kw_only=True)
class HookFailure:
    """A hook of a loaded plugin that raised while it was called."""

    plugin: str
    dist: str
    hook: str
    error: str


class Catalog:
    """Parts by kind and name. Create it with `Catalog.discover()`, or with `Catalog.of(...)` from given plugins."""

    def __init__(self, plugins: Sequence[Plugin], *, registry: Registry | None = None) -> None:
        self._registry = registry if registry is not None else known_parts()
        ordered = sorted(plugins, key=lambda plugin: (plugin.record.name, plugin.record.dist))
        found = [
            Found(spec=spec, dist=plugin.record.dist, version=plugin.record.version)
            for plugin in ordered
            if plugin.record.status == "loaded"
            for spec in plugin.record.specs
        ]
        self._parts: dict[tuple[Kind, str], list[Found]] = {}
        for part in sorted(found, key=lambda part: (KINDS.index(part.spec.kind), part.spec.name, part.dist)):
            self._parts.setdefault((part.spec.kind, part.spec.name), []).append(part)
        self._plugins = [_with_conflicts(plugin, self._parts) for plugin in ordered]
        self._silenced: set[tuple[str, str]] = set()
        self.failures: list[HookFailure] = []
        """Hooks that raised since this catalog was created."""
        self.allows_code = True
        """Whether settings may name code from outside the plugins and the current folder: a command asks its user."""

    @classmethod
    def discover(cls, *, group: str = API_GROUP, disabled: Collection[str] = (), files: Sequence[Path] = ()) -> Self:
        """A catalog of every plugin installed in this environment, and of single-file plugins.

        disabled: names of entry points, dists or files not to import. Raises PluginNotFound for an unknown one.
        files: absolute paths, see `unirl.core.plugins.files`. Nothing else raises here: a plugin that fails to load is
        listed in `records`, and becomes an error when one of its parts is used.
        """
        plugins: list[Plugin] = []
        off = {canonical(name) for name in disabled}
        for record, point in find_plugins(group):
            if point is None:
                plugins.append(Plugin(record=record))
                continue
            names = {canonical(record.name), canonical(record.dist)}
            plugins.append(load_plugin(point, record, group=group, disabled=bool(names & off)))
        if files:
            from .files import load_plugin_file

            plugins += [load_plugin_file(file, disabled=canonical(file.stem) in off) for file in files]
        catalog = cls(plugins)
        installed = {canonical(name) for record in catalog.records for name in (record.name, record.dist)}
        if off - installed:
            # A dist may have commands alone.
            installed |= {canonical(point.dist) for point in entry_points(COMMANDS_GROUP)}
        for name in sorted(off - installed):
            raise PluginNotFound(
                f"plugin {name!r}: cannot be disabled, no such plugin is installed{did_you_mean(name, installed)}"
            )
        return catalog

    @classmethod
    def of(cls, plugins: Mapping[str, object], *, version: str = "0", registry: Registry | None = None) -> Self:
        """A catalog of only these plugin modules or objects: name of the dist -> plugin."""
        loaded = [
            register(
                plugin,
                PluginRecord(name=dist, dist=dist, version=version, module=_module_of(plugin), status="loaded"),
            )
            for dist, plugin in plugins.items()
        ]
        return cls(loaded, registry=registry)

    @property
    def records(self) -> tuple[PluginRecord, ...]:
        """Every installed plugin, loaded or not, by name."""
        return tuple(plugin.record for plugin in self._plugins)

    def names(self, kind: Kind) -> list[str]:
        """Short names of the installed parts of a kind, sorted."""
        return [name for of_kind, name in self._parts if of_kind == kind]

    def specs(self, kind: Kind) -> list[Spec]:
        """Specs of the installed parts of a kind, sorted by name; a name with two providers appears twice."""
        return [part.spec for part in self.parts() if part.spec.kind == kind]

    def parts(self) -> list[Found]:
        """Every installed part, sorted by kind and name."""
        return [part for parts in self._parts.values() for part in parts]

    def get(self, kind: Kind, name: str) -> Found:
        """The part of this kind and name.

        Raises PluginConflict when two plugins provide it, PluginBroken when the plugin that should provide it did not
        load, PluginNotFound when none does; the message then suggests a similar name, or how to install the part.
        """
        result = self._parts.get((kind, name), [])
        if len(result) > 1:
            dists = " and ".join(f"{part.dist} {part.version}" for part in result)
            raise PluginConflict(f"{kind} {name!r}: provided by {dists}. {LEAVE_OUT}")
        return result[0] if result else self._missing(kind, name)

    def offered(self, kind: Literal["kernels", "guidances"]) -> dict[str, str]:
        """`module:Class` of each kernel or guidance that a loaded plugin offers -> the dist that provides it."""
        loaded = [record for record in self.records if record.status == "loaded"]
        return {name: record.dist for record in loaded for name in getattr(record, kind)}

    def resolve(self, target: str) -> Any:
        """The object that `"module:attribute"` names; imports the module.

        Raises PluginBroken, naming the plugin and the string, when the module cannot be imported or has no such name.
        """
        module, colon, path = target.partition(":")
        owner = self._owner(target)
        if not (colon and module and path):
            raise PluginBroken(f"{owner} names {target!r}; expected 'package.module:attribute'.")
        try:
            result: Any = import_module(module)
        except (Exception, SystemExit) as error:
            raise PluginBroken(f"{owner} names {target!r}; importing it raised {describe_failure(error)}") from error
        for attribute in path.split("."):
            try:
                result = getattr(result, attribute)
            except AttributeError as error:
                hint = did_you_mean(attribute, [n for n in dir(result) if not n.startswith("_")])
                raise PluginBroken(f"{owner} names {target!r}; it has no attribute {attribute!r}{hint}") from error
        return result

    def check_plan(self, plan: Plan) -> list[Reason]:
        """Reasons from plugins to refuse a plan.

        A check that raises refuses the plan if its plugin provides a part of it, or no parts at all (such a plugin
        exists only to check plans); it is recorded in `failures` in any case.
        """
        chosen = {choice.dist for choice in plan.choices}
        reasons: list[Reason] = []
        for plugin in self._implementing("unirl_check_plan"):
            record = plugin.record
            try:
                reasons += _reasons(plugin.call("unirl_check_plan", plan=plan))
            except Exception as error:  # noqa: BLE001 - recorded in `failures`
                self._record_failure(record, "unirl_check_plan", error)
                if record.dist in chosen or not record.specs:
                    text = f"its check of the plan raised {describe_failure(error)}"
                    reasons.append(Reason(key=f"plugin {record.name}", text=text))
        return reasons

    def emit(self, event: Event) -> None:
        """Send an event to every plugin that observes runs. One that raises is recorded and not called again."""
        for plugin in self._implementing("unirl_event"):
            try:
                plugin.call("unirl_event", event=event)
            except Exception as error:  # noqa: BLE001 - recorded in `failures`: an observer must not end a run
                self._record_failure(plugin.record, "unirl_event", error)
                self._silenced.add((plugin.record.dist, plugin.record.name))

    def explain_failure(self, plan: Plan, error: BaseException) -> str:
        """Notes of plugins on the error that ended a run, one a paragraph. A plugin that raises is recorded."""
        notes: list[str] = []
        for plugin in self._implementing("unirl_explain_failure"):
            try:
                notes += [note for note in plugin.call("unirl_explain_failure", plan=plan, error=error) if note]
            except Exception as failure:  # noqa: BLE001 - recorded in `failures`: the run failed for another reason
                self._record_failure(plugin.record, "unirl_explain_failure", failure)
        return "\n".join(notes)

    @property
    def writes_adapters(self) -> bool:
        return any(True for _ in self._implementing("unirl_write_adapters"))

    def write_adapters(
        self, plan: Plan, updates: Mapping[str, WeightUpdate], *, run: Path, folder: Path, step: int
    ) -> None:
        """Have the first plugin that can write the adapters of a run do so, see the hook. Raises what it raises."""
        for plugin in self._implementing("unirl_write_adapters"):
            named = {"plan": plan, "updates": updates, "run": run, "folder": folder, "step": step}
            if any(plugin.call("unirl_write_adapters", **named)):
                return

    def step_flops(self, plan: Plan) -> Mapping[str, float]:
        """Predicted operations of each device in a step, by the first plugin that predicts them; empty without one. A
        plugin that raises is recorded."""
        for plugin in self._implementing("unirl_step_flops"):
            try:
                for flops in plugin.call("unirl_step_flops", plan=plan):
                    if flops:
                        return flops
            except Exception as failure:  # noqa: BLE001 - recorded in `failures`: a run needs no prediction
                self._record_failure(plugin.record, "unirl_step_flops", failure)
        return {}

    def _implementing(self, hook: str) -> Iterable[Plugin]:
        for plugin in self._plugins:
            silenced = (plugin.record.dist, plugin.record.name) in self._silenced
            if plugin.record.status == "loaded" and plugin.implements(hook) and not silenced:
                yield plugin

    def _record_failure(self, record: PluginRecord, hook: str, error: BaseException) -> None:
        failure = HookFailure(plugin=record.name, dist=record.dist, hook=hook, error=describe_failure(error))
        self.failures.append(failure)
        log.warning("plugin %s: %s raised %s", record.label, hook, failure.error)

    def _missing(self, kind: Kind, name: str) -> NoReturn:
        part = self._registry.part(kind, name)
        for record in self.records:
            if record.status == "loaded" or not _would_provide(record, kind, name, part.dist if part else None):
                continue
            raise PluginBroken(
                f"{kind} {name!r}: plugin {record.label} is {record.status}: {record.error}"
            ) from record.cause
        names = self.names(kind)
        there = f"installed: {', '.join(names)}" if names else f"no {kind} is installed"
        if part is not None:
            installed = next((r for r in self.records if canonical(r.dist) == canonical(part.dist)), None)
            if installed is not None:
                hint = f"{installed.dist} {installed.version} is installed but does not provide it; upgrade it"
            else:
                hint = f"{part.hint[0].upper()}{part.hint[1:]}"
            if kind in ("engine", "backend") and names:
                # Recipes name one, and any that fits takes its place.
                hint += f", or choose {' or '.join(f'{kind}={other}' for other in names)}"
            raise PluginNotInstalled(f"{kind} {name!r} is not installed; {there}. {hint}.")
        offered = {*names, *self._registry.names(kind)}
        others = [other for other in KINDS if other != kind and name in self.names(other)]
        hint = did_you_mean(name, offered)
        if not hint and others:
            hint = f"; there is a part of that name, but its kind is {others[0]}."
        absent = [record.name for record in self.records if record.status != "loaded"]
        note = f" Not loaded: {', '.join(absent)}; `unirl plugins` says why." if absent else ""
        raise PluginNotFound(f"{kind} {name!r} is unknown; {there}{hint or '.'}{note}")

    def _owner(self, target: str) -> str:
        """The plugin that a target string belongs to, for the start of a message."""
        module = target.partition(":")[0]
        for record in self.records:
            if any(target in vars(spec).values() for spec in record.specs):
                return f"plugin {record.label}"
        for record in self.records:
            package = record.module.partition(":")[0].rpartition(".")[0]
            if package and f"{module}.".startswith(f"{package}."):
                return f"plugin {record.label}"
        return "a spec"


def _with_conflicts(plugin: Plugin, parts: Mapping[tuple[Kind, str], Sequence[Found]]) -> Plugin:
    """The plugin with a sentence for each part that another loaded plugin also provides."""
    record = plugin.record
    if record.status != "loaded":
        return plugin
    sentences = [
        f"{spec.kind} {spec.name!r} is also provided by {other.dist}"
        for spec in record.specs
        for other in parts[spec.kind, spec.name]
        if other.dist != record.dist
    ]
    return dataclasses.replace(plugin, record=dataclasses.replace(record, conflicts=tuple(sentences)))


def _would_provide(record: PluginRecord, kind: Kind, name: str, dist: str | None) -> bool:
    """Whether a plugin that is not loaded probably provides a part: by its specs, the registry or its own name."""
    if any((spec.kind, spec.name) == (kind, name) for spec in record.specs):
        return True
    return record.name == name if dist is None else canonical(record.dist) == canonical(dist)


def _reasons(answers: Iterable[Iterable[object]]) -> list[Reason]:
    """The reasons returned by one plugin's `unirl_check_plan` hooks. Raises TypeError for anything else."""
    reasons: list[Reason] = []
    for reason in (reason for answer in answers for reason in answer):
        if not isinstance(reason, Reason):
            raise TypeError(f"got {reason!r}, expected a unirl.core.limits.Reason(key=..., text=...)")
        reasons.append(reason)
    return reasons


def _module_of(plugin: object) -> str:
    name = getattr(plugin, "__name__", None)
    return name if isinstance(name, str) else f"{type(plugin).__module__}:{type(plugin).__name__}"
