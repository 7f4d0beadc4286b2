"""Recipes: composed by Hydra from files, the chosen parts' config dataclasses and the command line, into a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra import compose as hydra_compose
from hydra import initialize
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from .assets import asset, by_name_only
from .config import PartConfig, RecipeConfig, SamplingConfig
from .errors import RecipeError
from .eval_sampling import typed_evaluation
from .exchanged import LeftOut, exchanges
from .hydra_source import ROOT, config_class, exchanging, sources
from .origins import Layer, Slot, layers_of, origin_below, origin_of, trace
from .plan import Choice, Origin, Plan, leaves, plan_hash
from .recipe_check import check_hydra_overrides, check_keys, check_missing, check_schema, check_slots
from .recipe_errors import explain
from .recipe_files import RecipeFile, find_recipe, list_recipes, recipe_roots
from .spec import Kind, Spec

if TYPE_CHECKING:
    from .catalog import Catalog

__all__ = ["Composed", "RecipeFile", "compose", "compose_config", "list_recipes", "plan_of", "split_sweep"]


@dataclass(frozen=True, kw_only=True)
class Composed:
    """A recipe as Hydra composed it: typed, overrides applied, interpolations not yet resolved."""

    recipe: RecipeFile
    name: str
    """What finds the recipe again: its name, or the path of a file that was given."""
    overrides: tuple[str, ...]
    config: DictConfig
    layers: tuple[Layer, ...]
    defaults: tuple[tuple[str, str, str], ...]
    """Hydra's defaults list without Hydra's own entries: (config path, package, the file that names it)."""
    left_out: tuple[LeftOut, ...] = ()
    """Values for a part that another one took the place of."""

    @property
    def slots(self) -> dict[str, Slot]:
        """Package -> the part in it, for parts that the command line did not take out."""
        found = {layer.slot.package: layer.slot for layer in self.layers if layer.slot is not None}
        return {key: slot for key, slot in found.items() if OmegaConf.select(self.config, key) is not None}


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
    """What Hydra makes of a recipe, before anything is resolved or required. Raises as `compose` does."""
    check_hydra_overrides(overrides)
    OmegaConf.register_new_resolver("asset", asset, replace=True)
    roots = recipe_roots(directory)
    recipe = find_recipe(name, roots)
    given = name.endswith(".yaml")
    if given:
        roots = [recipe.root, *roots]
    with sources(catalog, roots, recipe=recipe.name), _hydra():
        try:
            loader = GlobalHydra.instance().config_loader()
            listed = loader.compute_defaults_list(ROOT, list(overrides), RunMode.RUN)
            entries = tuple((d.config_path or "", d.package or "", d.parent or "") for d in listed.defaults)
            entries = tuple(entry for entry in entries if entry[0] != ROOT and entry[0].split("/")[0] != "hydra")
            check_schema(entries, recipe=recipe.name)
            chosen_in = {
                key: None if meta.external_override else meta.containing_config_path
                for key, meta in listed.overrides.override_metadata.items()
            }
            with exchanging(
                exchanges(listed.defaults, chosen_in=chosen_in, config_class=partial(config_class, catalog))
            ) as left_out:
                config = hydra_compose(ROOT, overrides=list(overrides), return_hydra_config=True)
                searched = [_source(found) for found in config.hydra.runtime.config_sources]
                with open_dict(config):
                    del config["hydra"]
                layers = layers_of(listed.defaults, sources=searched, overrides=_parsed(overrides), chosen_in=chosen_in)
        except (HydraException, OmegaConfBaseException, ValueError, RecursionError) as error:
            raise explain(error, recipe=recipe.name, catalog=catalog) from error
    if given and not config.run.name:
        # The name of a recipe that was given as a file would be its path.
        config.run.name = recipe.name
    return Composed(
        recipe=recipe,
        name=str(recipe.file) if given else recipe.name,
        overrides=tuple(overrides),
        config=config,
        layers=tuple(layers),
        defaults=entries,
        left_out=tuple(left_out),
    )


def plan_of(composed: Composed, *, catalog: Catalog) -> Plan:
    """The plan of a composed recipe: parts looked up, values resolved, every key checked. Raises as `compose` does."""
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

    def choice(key: str, config: Any) -> Choice[Any]:
        slot = slots[key]
        found = catalog.get(cast(Kind, slot.group), slot.name)
        assert isinstance(config, PartConfig)
        return Choice[Spec](key=key, spec=found.spec, config=config, dist=found.dist, version=found.version)

    model = choice("model", filled.model)
    parts = {
        "model": model,
        "engine": choice("engine", filled.engine),
        "backend": choice("backend", filled.backend),
        "algorithm": choice("algorithm", filled.algorithm),
    }
    rewards = {key: choice(f"reward.{key}", value) for key, value in filled.reward.items()}
    trackers = {key: choice(f"tracker.{key}", value) for key, value in filled.tracker.items()}
    launcher = choice("launcher", filled.launcher) if filled.launcher is not None else None
    transport = choice("transport", filled.transport) if filled.transport is not None else None
    sampling, found = _sampling(filled.sampling, model), trace(composed.layers)
    try:
        evaluated = typed_evaluation(filled.eval.sampling, sampling.values())
    except OmegaConfBaseException as error:
        origin = origin_below(str(error.full_key), found)
        raise explain(error, recipe=composed.recipe.name, catalog=catalog, origin=origin) from error
    if composed.name != composed.recipe.name:
        found["run.name"] = _name_origin(found["run.name"], composed)
    return Plan(
        recipe=composed.name,
        **parts,
        rewards=rewards,
        trackers=trackers,
        launcher=launcher,
        transport=transport,
        sampling=sampling,
        run=filled.run,
        data=filled.data,
        advantage=filled.advantage,
        train=filled.train,
        eval=replace(filled.eval, sampling=evaluated),
        resolved=resolved,
        origins={path: origin_of(path, found) for path in leaves(resolved)},
        hash=plan_hash(portable),
        left_out=composed.left_out,
    )


def split_sweep(
    name: str, overrides: Sequence[str], *, catalog: Catalog, directory: Path | None = None
) -> list[list[str]]:
    """The jobs of a sweep, each a list of overrides: the product of all `a=1,2`, `range`, `choice` and `glob`.

    Raises RecipeError for overrides that cannot be parsed and for sweeps over intervals, which have no end.
    """
    recipe = find_recipe(name, recipe_roots(directory))
    with sources(catalog, recipe_roots(directory), recipe=recipe.name), _hydra():
        from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

        try:
            parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
            (jobs,) = BasicSweeper.split_arguments(parser.parse_overrides(list(overrides)), None)
        except HydraException as error:
            raise explain(error, recipe=recipe.name, catalog=catalog) from error
    return jobs


def _hydra() -> AbstractContextManager[None]:
    return initialize(version_base="1.3", config_path=None, job_name="unirl")


def _source(found: DictConfig) -> ConfigSource:
    """A source of Hydra's search path, opened again: Hydra keeps those of `hydra.searchpath` to itself."""
    from hydra._internal.sources_registry import SourcesRegistry

    return SourcesRegistry.instance().resolve(found.schema)(found.provider, f"{found.schema}://{found.path}")


def _sampling(filled: Any, model: Choice[Any]) -> Mapping[str, SamplingConfig]:
    """Track name -> its settings. One track takes the section as it stands, several have one section each."""
    tracks = list(model.spec.tracks)
    if isinstance(filled, SamplingConfig):
        if len(tracks) != 1:
            keys = ", ".join(f"/sampling@sampling.{track}" for track in tracks)
            raise RecipeError(
                f"sampling: model {model.name!r} has the tracks {', '.join(tracks)}, and one section was given; "
                f"give each its own: {keys}."
            )
        found: Mapping[str, SamplingConfig] = {tracks[0]: filled}
    else:
        found = cast(Mapping[str, SamplingConfig], filled)
    if set(found) != set(tracks):
        raise RecipeError(
            f"sampling: sections for {', '.join(sorted(found))} were given; model {model.name!r} has the tracks "
            f"{', '.join(tracks)}. Name them `/sampling@sampling.<track>`."
        )
    for track, kind in cast(Mapping[str, str], model.spec.tracks).items():
        if found[track].kind != kind:
            raise RecipeError(
                f"sampling: settings of a {found[track].kind} track were given; track {track!r} of model "
                f"{model.name!r} is a {kind} track. Choose `/sampling: {kind}`."
            )
    return {track: found[track] for track in tracks}


def _name_origin(origin: Origin, composed: Composed) -> Origin:
    return Origin(source="recipe", detail=composed.recipe.file.name) if origin.source == "default" else origin


def _parsed(overrides: Sequence[str]) -> list[Override]:
    """The overrides that concern the recipe, parsed."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return [override for override in parsed if not override.is_hydra_override()]
