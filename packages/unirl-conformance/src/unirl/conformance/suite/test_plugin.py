"""That a plugin loads, beside all others, and costs nothing to those who only list it."""

from __future__ import annotations

from unirl.conformance.claims import claim
from unirl.conformance.fixtures.plugin import HEAVY, PluginBench
from unirl.core.plugins.loading import canonical
from unirl.core.plugins.registry import known_parts


@claim("plugin", tier="static")
def test_the_plugin_loads(bench: PluginBench) -> None:
    """The plugin is imported, its hooks fit, and what they return are specs: its parts are there for recipes.

    If it fails: the sentence names what went wrong. Common are a package that the dist does not require, a hook without
    `@hookimpl`, and an entry point that names a module that has moved.
    """
    assert bench.plugin.status == "loaded", f"{bench.plugin.label} is {bench.plugin.status}: {bench.plugin.error}"


@claim("plugin", tier="static")
def test_no_other_dist_provides_its_parts(bench: PluginBench) -> None:
    """Each of its parts has one provider here, so that a name in a recipe means one thing.

    If it fails: two installed dists give the same kind and name. Uninstall one of them; if both are yours, rename one.
    """
    assert not bench.loaded.conflicts, f"{bench.plugin.label}: {' and '.join(bench.plugin.conflicts)}"


@claim("plugin", tier="static")
def test_its_names_are_unique(bench: PluginBench) -> None:
    """No part has a name that the registry of known parts gives to another dist, installed or planned.

    A user who follows the install line of an error message would otherwise get another part than a recipe means.

    If it fails: rename the part in its spec, or ask for the name in the registry.
    """
    registry = known_parts()
    known = [(spec, registry.part(spec.kind, spec.name)) for spec in bench.specs]
    taken = [
        f"{spec.kind} {spec.name!r} belongs to {part.dist}"
        for spec, part in known
        if part is not None and canonical(part.dist) != canonical(bench.plugin.dist)
    ]
    assert not taken, f"the registry says otherwise of {bench.plugin.dist}: {'; '.join(taken)}"


@claim("plugin", tier="static")
def test_importing_it_is_light(bench: PluginBench) -> None:
    """Listing its parts, adding its commands and composing a recipe with it import no torch, no engine, no client.

    Every command of everyone who has it installed pays for its imports. Tried in a fresh interpreter.

    If it fails: the sentence names the step and the package. Move the import into the function that needs it, name the
    implementation by string in the spec, and put imports for annotations under `if TYPE_CHECKING:`.
    """
    heavy = [(step.what, top) for step in bench.afresh.steps for top in step.imported if top in HEAVY]
    told = [f"{what} brings {top} ({HEAVY[top]})" for what, top in heavy]
    assert not told, "; ".join(told)


@claim("plugin", tier="static")
def test_importing_it_has_no_side_effects(bench: PluginBench) -> None:
    """Importing it leaves the process as it was: no logging, environment, files, output, threads, signals or patches.

    Other plugins, and programs that use UniRL as a library, run in the same process. Tried in a fresh interpreter with
    an audit hook, in an empty environment.

    If it fails: the sentence names the effect. Move it into `build` or into the function that needs it; a setting that
    must come before an import belongs to the process that starts the part.
    """
    assert not bench.afresh.effects, f"importing {bench.plugin.module} {'; '.join(bench.afresh.effects)}"
