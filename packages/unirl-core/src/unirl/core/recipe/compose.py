"""Composing recipes: Hydra merges files, the chosen parts' config dataclasses and the command line into a plan."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ..specs.config import RecipeConfig
from ..specs.leaves import leaves, plan_hash
from ..specs.part_config import PartConfig
from ..specs.plan import PER_STAGE, Choice, LeftOut, Origin, Plan
from ..specs.spec import AlgorithmSpec, Kind, Spec
from ..types.sampling import SamplingConfig
from .assets import asset, by_name_only
from .check import check_hydra_overrides, check_keys, check_missing, check_schema, check_slots, switched_off
from .env_resolver import env
from .errors import explain
from .exchanged import Exchange, exchanges
from .files import RecipeFile, find_recipe, list_recipes, recipe_roots
from .hydra_source import ROOT, Loader, config_class, exchanging, sources, sweep_jobs
from .origins import Layer, Slot, layers_of, origin_below, origin_of, trace
from .proposals import propose
from .stages import stages_of

if TYPE_CHECKING:
    from ..plugins.catalog import Catalog

__all__ = ["Composed", "RecipeFile", "compose", "compose_config", "list_recipes", "plan_of", "split_sweep"]


@dataclass(frozen=True, kw_only=True)
class Composed:
    """A recipe as Hydra composed it: typed, overrides applied, interpolations not yet resolved."""

    recipe: RecipeFile
    name: str
    """Name to compose the recipe again with: its own, or the path of the given file."""
    overrides: tuple[str, ...]
    config: DictConfig
    layers: tuple[Layer, ...]
    defaults: tuple[tuple[str, str, str], ...]
    """Hydra's defaults list: (config path, package, the file that names it)."""
    left_out: tuple[LeftOut, ...] = ()
    """Values for parts that were replaced, whose replacement has no such key."""

    @property
    def slots(self) -> dict[str, Slot]:
        """Package -> the part in it, for parts that the command line did not remove."""
        result = {layer.slot.package: layer.slot for layer in self.layers if layer.slot is not None}
        return {key: slot for key, slot in result.items() if OmegaConf.select(self.config, key) is not None}


def compose(name: str, overrides: Sequence[str] = (), *, catalog: Catalog, directory: Path | None = None) -> Plan:
    """The plan of a recipe.

    name: as `unirl recipes` lists it, or a path that ends in .yaml.  overrides: in Hydra's grammar.
    directory: where to look for `./recipes`; the current one when not given.
    Raises RecipeError for wrong keys, types and values, PluginNotFound for parts that are not installed, PluginBroken
    for those that do not load. Imports the config modules of the chosen parts and nothing heavier.
    """
    return plan_of(compose_config(name, overrides, catalog=catalog, directory=directory), catalog=catalog)


def compose_config(
    name: str, overrides: Sequence[str] = (), *, catalog: Catalog, directory: Path | None = None
) -> Composed:
    """A recipe as Hydra composes it, before values are resolved and mandatory ones checked. Raises as `compose`."""
    check_hydra_overrides(overrides)
    given_overrides, (overrides, emptied) = tuple(overrides), switched_off(overrides)
    OmegaConf.register_new_resolver("asset", asset, replace=True)
    OmegaConf.register_new_resolver("oc.env", env, replace=True)
    roots = recipe_roots(directory)
    recipe = find_recipe(name, roots)
    given = name.endswith(".yaml")
    if given:
        roots = [recipe.root, *roots]
    with sources(catalog, roots, recipe=recipe.name):
        try:
            loader = Loader(overrides)
            entries = tuple((d.config_path or "", d.package or "", d.parent or "") for d in loader.defaults)
            entries = tuple(entry for entry in entries if entry[0] != ROOT)
            check_schema(entries, recipe=recipe.name)
            exchanged = _exchanges(loader, catalog)
            with exchanging(exchanged) as left_out:
                if exchanged:
                    loader.reload()
                layers = layers_of(
                    loader.defaults, load=loader.loaded, overrides=loader.overrides, chosen_in=loader.chosen_in
                )
                config = loader.composed()
            with open_dict(config):
                for key in emptied:
                    config[key] = {}
            for_others = _for_other_algorithms(exchanged, overrides, catalog)
        except (HydraException, OmegaConfBaseException, ValueError, RecursionError) as error:
            raise explain(error, recipe=recipe.name, catalog=catalog) from error
    if given and not config.run.name:
        # Otherwise the name of a recipe given as a file would be its path.
        config.run.name = recipe.name
    composed = Composed(
        recipe=recipe,
        name=str(recipe.file) if given else recipe.name,
        overrides=given_overrides,
        config=config,
        layers=tuple(layers),
        defaults=entries,
        left_out=tuple(left_out),
    )
    proposals, gave_way = propose(
        config,
        layers,
        slots=composed.slots,
        exchanged=for_others,
        spec_of=lambda name: cast(AlgorithmSpec, catalog.get("algorithm", name).spec),
        config_class=partial(config_class, catalog),
    )
    return replace(composed, layers=(*layers, proposals), left_out=(*left_out, *gave_way))


def plan_of(composed: Composed, *, catalog: Catalog) -> Plan:
    """The plan of a composed recipe: parts looked up, values resolved, every key checked. Raises as `compose`."""
    config, slots = composed.config, composed.slots
    check_slots(composed.layers, slots, recipe=composed.recipe.name)
    try:
        check_keys(config, slots)
        check_missing(config)
        resolved = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True, enum_to_str=True))
        with by_name_only():
            portable = cast(dict[str, Any], OmegaConf.to_container(config, resolve=True, enum_to_str=True))
        filled = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise explain(error, recipe=composed.recipe.name, catalog=catalog) from error
    assert isinstance(filled, RecipeConfig)

    def choice(key: str, config: Any) -> Choice[Any, Any]:
        slot = slots[key]
        result = catalog.get(cast(Kind, slot.group), slot.name)
        assert isinstance(config, PartConfig)
        return Choice[Spec, PartConfig](
            key=key, spec=result.spec, config=config, dist=result.dist, version=result.version
        )

    def chosen(group: str, section: Any) -> dict[str, Choice[Any, Any]]:
        """The parts of a section by name; one that is the section itself is ""."""
        if group in slots:
            return {"": choice(group, section)}
        named = cast("dict[str, Any]", section or {})
        return {key: choice(f"{group}.{key}", value) for key, value in named.items()}

    rewards, trackers = chosen("reward", filled.reward), chosen("tracker", filled.tracker)
    launcher = choice("launcher", filled.launcher) if filled.launcher is not None else None
    transport = choice("transport", filled.transport) if filled.transport is not None else None
    result = trace(composed.layers)
    try:
        parts = {group: chosen(group, getattr(filled, group)) for group in PER_STAGE}
        stages = stages_of(filled, parts, rewards)
    except OmegaConfBaseException as error:
        origin = origin_below(str(error.full_key), result)
        raise explain(error, recipe=composed.recipe.name, catalog=catalog, origin=origin) from error
    if composed.name != composed.recipe.name:
        result["run.name"] = _name_origin(result["run.name"], composed)
    plan = Plan(
        recipe=composed.name,
        stages=stages,
        rewards=rewards,
        trackers=trackers,
        launcher=launcher,
        transport=transport,
        run=filled.run,
        data=filled.data,
        eval=filled.eval,
        resolved=resolved,
        origins={path: origin_of(path, result) for path in leaves(resolved)},
        hash="",
        left_out=composed.left_out,
        sampler_dists=_sampler_dists(
            [settings for stage in stages for settings in (stage.sampling, stage.evaluation)], catalog
        ),
    )
    return replace(plan, hash=plan_hash(plan.numeric_leaves(portable)))


def split_sweep(name: str, overrides: Sequence[str], *, catalog: Catalog) -> list[list[str]]:
    """The jobs of a sweep, each a list of overrides: the product of all `a=1,2`, `range`, `choice` and `glob`.

    Raises RecipeError for overrides that cannot be parsed and for sweeps over intervals, which have no end.
    """
    roots = recipe_roots()
    recipe = find_recipe(name, roots)
    with sources(catalog, roots, recipe=recipe.name):
        try:
            return sweep_jobs(overrides)
        except HydraException as error:
            raise explain(error, recipe=recipe.name, catalog=catalog) from error


def _exchanges(loader: Loader, catalog: Catalog) -> tuple[Exchange, ...]:
    return exchanges(loader.defaults, chosen_in=loader.chosen_in, config_class=partial(config_class, catalog))


def _for_other_algorithms(exchanged: Sequence[Exchange], overrides: Sequence[str], catalog: Catalog) -> list[Exchange]:
    """The exchanges of algorithms, except one that the command line names as the recipe does."""
    result = [one for one in exchanged if one.group == "algorithm"]
    kept = [override for override in overrides if re.split("[@=]", override)[0] != "algorithm"]
    if not result or len(kept) == len(overrides):
        return result
    try:
        loader = Loader(kept)
    except MissingConfigException:
        # The recipe's own algorithm is not installed, so it is another one.
        return result
    paths = {default.package or "": default.config_path or "" for default in loader.defaults}
    before = _exchanges(loader, catalog)
    same = {one.package for one in result if paths.get(one.package) == f"algorithm/{one.name}"}
    return [one for one in result if one.package not in same] + [one for one in before if one.package in same]


def _sampler_dists(settings: Iterable[SamplingConfig], catalog: Catalog) -> tuple[str, ...]:
    """Dists of the plugins that offer the kernels and guidances of these sampling settings."""
    offered = catalog.offered("kernels") | catalog.offered("guidances")
    named = {str(vars(one).get(key)) for one in settings for key in ("kernel", "guidance_mode")}
    return tuple(sorted({offered[name] for name in named if name in offered}))


def _name_origin(origin: Origin, composed: Composed) -> Origin:
    return Origin(source="recipe", detail=composed.recipe.file.name) if origin.source == "default" else origin
