"""Plugins: loading beside all others, at no cost to commands that only list them."""

from __future__ import annotations

from unirl.conformance.claims import claim
from unirl.conformance.fixtures.plugin import HEAVY, PluginCase
from unirl.core.names import canonical
from unirl.core.plugins.registry import known_parts


@claim("plugin", tier="static")
def test_the_plugin_loads(case: PluginCase) -> None:
    """The plugin imports, its hooks have the right signatures and return specs, so its parts can be used in recipes.

    If it fails: the message names the cause. Common ones are a package that the dist does not require, a hook without
    `@hookimpl`, and an entry point that names a module that has moved.
    """
    assert case.plugin.status == "loaded", f"{case.plugin.label} is {case.plugin.status}: {case.plugin.error}"


@claim("plugin", tier="static")
def test_no_other_dist_provides_its_parts(case: PluginCase) -> None:
    """Each of its parts has one provider here, so that a name in a recipe means one thing.

    If it fails: two installed dists provide the same kind and name. Uninstall one; if both are yours, rename one.
    """
    assert not case.loaded.conflicts, f"{case.plugin.label}: {' and '.join(case.plugin.conflicts)}"


@claim("plugin", tier="static")
def test_its_names_are_unique(case: PluginCase) -> None:
    """No part has a name that the registry of known parts assigns to another dist, installed or planned.

    Otherwise a user who follows the install line of an error message gets another part than the recipe means.

    If it fails: rename the part in its spec, or ask for the name in the registry.
    """
    registry = known_parts()
    taken = [
        f"{spec.kind} {spec.name!r} belongs to {part.dist}"
        for spec in case.specs
        if (part := registry.part(spec.kind, spec.name)) and canonical(part.dist) != canonical(case.plugin.dist)
    ]
    assert not taken, f"{case.plugin.dist} uses names of the registry: {'; '.join(taken)}"


@claim("plugin", tier="static")
def test_importing_it_is_light(case: PluginCase) -> None:
    """Listing its parts, importing its commands and composing a recipe with it import no torch, no engine, no client.

    Every command of everyone who has it installed pays for its imports. Tested in a fresh interpreter.

    If it fails: the message names the step and the package. Move the import into the function that needs it, name the
    implementation by string in the spec, and put imports for annotations under `if TYPE_CHECKING:`.
    """
    heavy = [
        f"{step} loads {package} ({HEAVY[package]})"
        for step, packages in case.fresh_import.loaded.items()
        for package in packages
        if package in HEAVY
    ]
    assert not heavy, "; ".join(heavy)


@claim("plugin", tier="static")
def test_importing_it_has_no_side_effects(case: PluginCase) -> None:
    """Importing it leaves the process as it was: no logging, environment, files, output, threads, signals or patches.

    Other plugins, and programs that use UniRL as a library, run in the same process. Tested in a fresh interpreter with
    an audit hook, in an empty environment.

    If it fails: the message names the effect. Move it into `build` or into the function that needs it; a setting that
    must come before an import belongs to the process that starts the part.
    """
    effects = case.fresh_import.effects
    assert not effects, f"importing {case.plugin.module} {'; '.join(effects)}"
