"""Hydra as recipes use it, with config sources for part options from the catalog and for the folders of recipes.

The only module that imports Hydra's internals. Two config sources and one search-path plugin are registered with Hydra
once. They are active only inside `sources(...)`; other users of Hydra in this process see no change.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml
from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.defaults_list import create_defaults_list
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from ..errors import PluginBroken, RecipeError
from ..specs.config import RecipeConfig
from ..specs.part_config import CONFIG_BASES, PartConfig
from ..specs.plan import LeftOut
from ..specs.spec import Kind
from ..types.sampling import LatentSamplingConfig, SamplingConfig, TextSamplingConfig
from .exchanged import Exchange, leave_out
from .files import PART_GROUPS, RecipeRoot

if TYPE_CHECKING:
    from ..plugins.catalog import Catalog

__all__ = [
    "PARTS",
    "ROOT",
    "SAMPLING",
    "SCHEMA",
    "Loader",
    "PartsSource",
    "RecipesSource",
    "config_class",
    "exchanging",
    "sources",
    "sweep_jobs",
]

PARTS = "unirl"
"""Provider of the options of part groups, as Hydra calls the owner of a config."""
SCHEMA = "unirl"
"""The schema of a recipe, first in every defaults list: `- /unirl`."""
ROOT = "_recipe_"
"""The primary config that Hydra composes: it only names the recipe. Hydra takes the groups of `+group@package=option`
relative to the primary config's folder, and a recipe may lie in one."""
MAX_BYTES = 2**20
"""Largest recipe file: hundreds of times what any recipe needs."""
MAX_VALUES = 100_000
"""Most values of a recipe file, with aliases expanded."""
DEFAULT_LAUNCHER = "local"
"""Used where it is installed. Without a launcher the parts are built in this process, with the same result."""
SAMPLING: dict[str, type[SamplingConfig]] = {"latent": LatentSamplingConfig, "text": TextSamplingConfig}
"""Options of the group `sampling`, which belongs to the core."""


@dataclass(frozen=True, kw_only=True)
class _Sources:
    catalog: Catalog
    roots: tuple[RecipeRoot, ...]
    recipe: str
    exchanged: tuple[Exchange, ...] = ()
    left_out: list[LeftOut] = field(default_factory=lambda: list[LeftOut]())


_active: ContextVar[_Sources | None] = ContextVar("_active", default=None)


@contextmanager
def sources(catalog: Catalog, roots: Sequence[RecipeRoot], *, recipe: str) -> Generator[None]:
    """Inside, Hydra composes the config `ROOT` from this recipe, the parts of this catalog and the files of these
    folders, first come first."""
    plugins = Plugins.instance()
    for plugin in (PartsSource, RecipesSource, UniRLSearchPath):
        plugins.register(plugin)
    token = _active.set(_Sources(catalog=catalog, roots=tuple(roots), recipe=recipe))
    try:
        yield
    finally:
        _active.reset(token)


@contextmanager
def exchanging(exchanged: Sequence[Exchange]) -> Generator[list[LeftOut]]:
    """Within this context, recipe files are loaded without values that these parts have no key for. Yields a list that
    collects them."""
    active = _active.get()
    assert active is not None, "exchanging() stands inside of sources()"
    inner = replace(active, exchanged=tuple(exchanged), left_out=[])
    token = _active.set(inner)
    try:
        yield inner.left_out
    finally:
        _active.reset(token)


def config_class(catalog: Catalog, group: str, name: str) -> type[Any]:
    """The config dataclass of an option. Imports the module that holds it, and no other part's.

    Raises PluginNotFound for an unknown name, PluginBroken when the spec does not name a PartConfig.
    """
    if group == "sampling":
        return SAMPLING[name]
    result = catalog.get(cast(Kind, group), name)
    target = catalog.resolve(result.spec.config)
    base = CONFIG_BASES.get(group, PartConfig)
    if not (isinstance(target, type) and is_dataclass(target) and issubclass(target, base)):
        raise PluginBroken(
            f"{group} {name!r} ({result.dist} {result.version}): its spec names the config {result.spec.config!r}, "
            f"which is not a dataclass that inherits unirl.core.specs.part_config.{base.__name__}."
        )
    return target


def search_path() -> ConfigSearchPath:
    """Hydra's config search path, set up as `hydra.initialize` does but without replacing the process-wide Hydra
    instance, which belongs to the user. Call inside `sources()`."""
    version.setbase("1.3")
    setup_globals()
    return create_config_search_path(None)


class Loader(ConfigLoaderImpl):
    """Hydra's steps from overrides to a config, one by one, so that what lies between them needs no second list of
    defaults. Hydra's own configuration decides nothing here and is not loaded. Used inside of `sources()`."""

    def __init__(self, overrides: Sequence[str]) -> None:
        super().__init__(search_path())
        parsed, self._files = self._parse_overrides_and_create_caching_repo(ROOT, [*overrides])
        for override in parsed:
            if override.is_sweep_override():
                raise _sweep(override.input_line or "")
        self._listed = create_defaults_list(self._files, ROOT, parsed, prepend_hydra=False, skip_missing=False)
        self.defaults: list[ResultDefault] = self._listed.defaults
        """The configs that are merged, in order."""
        self.overrides = [override for override in parsed if not override.is_hydra_override()]
        """Those that concern the recipe."""

    @property
    def chosen_in(self) -> dict[str, str | None]:
        """Override key of a group -> the file whose `override` decided it, None when the command line did."""
        metadata = self._listed.overrides.override_metadata
        return {key: None if one.external_override else one.containing_config_path for key, one in metadata.items()}

    def reload(self) -> None:
        """Load every file again: inside `exchanging()`, without what it leaves out."""
        self._files.cache.clear()

    def loaded(self, path: str) -> ConfigResult:
        """The config of an entry of the list. `composed()` merges the others into it."""
        result = self._files.load_config(path)
        assert result is not None, f"{path} is in the defaults list and was loaded for it"
        return result

    def composed(self) -> DictConfig:
        """The files of the list, merged, with the overrides."""
        config = self._compose_config_from_defaults_list(self.defaults, repo=self._files)
        OmegaConf.set_struct(config, True)
        # Its keys are the user's, so that they are set without a plus.
        OmegaConf.set_struct(config.data.columns, False)
        settings = [override for override in self._listed.config_overrides if not override.is_hydra_override()]
        self._apply_overrides_to_config(settings, config)
        return config


def sweep_jobs(overrides: Sequence[str]) -> list[list[str]]:
    """The jobs of a sweep, each a list of overrides. Raises HydraException. Call inside `sources()`."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    parser = OverridesParser.create(config_loader=ConfigLoaderImpl(search_path()))
    (jobs,) = BasicSweeper.split_arguments(parser.parse_overrides([*overrides]), None)
    return jobs


def _sweep(override: str) -> RecipeError:
    """The error for several values where one run is asked for."""
    key, _, values = override.partition("=")
    as_list = "" if "(" in values else f", or write {key}=[{values}] for a list"
    return RecipeError(f"{key}: {values!r} is a sweep; add --multirun to run each{as_list}.")


class UniRLSearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        active = _active.get()
        if active is not None:
            search_path.append(provider=PARTS, path="unirl://parts")
            for root in active.roots:
                search_path.append(provider=root.owner or "recipes", path=f"recipes://{root.folder}")


class PartsSource(ConfigSource):
    """Options of the part groups. Listing takes names alone; the chosen one's config class is imported."""

    @staticmethod
    def scheme() -> str:
        return "unirl"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", *PART_GROUPS)

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        return (not group and name in (SCHEMA, ROOT)) or (group in PART_GROUPS and name in self._options(group))

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        groups: list[str] = sorted(PART_GROUPS) if not config_path and results_filter is not ObjectType.CONFIG else []
        if results_filter is ObjectType.GROUP:
            return groups
        return [*groups, *([SCHEMA] if not config_path else self._options(config_path))]

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        if not self.is_config(config_path):
            raise ConfigLoadError(f"Config not found: {config_path}")
        if name == ROOT:
            config = OmegaConf.create({"defaults": [f"/{self._sources.recipe}"]})
        elif not group:
            config = _structured(RecipeConfig)
            # Listed so that `launcher=ray` and `transport=...` replace them as every other part is replaced.
            launcher = [{"launcher": DEFAULT_LAUNCHER}] if DEFAULT_LAUNCHER in self._options("launcher") else []
            with open_dict(config):
                config.defaults = ["_self_", *launcher, {"transport": None}]
        else:
            config = _structured(config_class(self._sources.catalog, group, name))
            if group != "sampling":
                config.use = name
        header = {"package": None if group else "_global_"}
        return ConfigResult(provider=self.provider, path=self.full_path(), config=config, header=header)

    def _options(self, group: str) -> list[str]:
        if group == "sampling":
            return sorted(SAMPLING)
        return sorted(self._sources.catalog.names(cast(Kind, group)))

    @property
    def _sources(self) -> _Sources:
        active = _active.get()
        assert active is not None, "unirl:// is on the search path only inside sources()"
        return active


class RecipesSource(ConfigSource):
    """A folder of recipes. A recipe is a whole config wherever its file lies, so its package is `_global_`."""

    @staticmethod
    def scheme() -> str:
        return "recipes"

    def available(self) -> bool:
        return self.is_group("")

    def is_group(self, config_path: str) -> bool:
        return (Path(self.path) / config_path).is_dir()

    def is_config(self, config_path: str) -> bool:
        return self.file(config_path).is_file()

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        names: list[str] = []
        for entry in (Path(self.path) / config_path).iterdir():
            self._list_add_result(names, str(Path(config_path) / entry.name), entry.name, results_filter)
        return sorted(set(names))

    def load_config(self, config_path: str) -> ConfigResult:
        file = self.file(config_path)
        text = _text(file)
        header = self._get_header_dict(text)
        if header["package"] is None and config_path.split("/")[0] not in PART_GROUPS:
            header["package"] = "_global_"
        try:
            config = deepcopy(_parsed(file, text))
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise RecipeError(f"{file}:{line}: not valid YAML: {error.problem}.") from error
        except yaml.YAMLError as error:
            raise RecipeError(f"{file}: not valid YAML: {' '.join(str(error).split())}.") from error
        except RecursionError as error:
            raise RecipeError(f"{file}: nested too deeply to be read.") from error
        if not isinstance(config, DictConfig):
            raise RecipeError(f"{file}: got a list, expected a mapping of sections.")
        if isinstance(config.get("hydra"), DictConfig) and set(config.hydra) - {"searchpath"}:
            unused = sorted(str(key) for key in config.hydra if key != "searchpath")
            raise RecipeError(f"{file}: hydra.{unused[0]}: this Hydra setting has no effect here; remove it.")
        active = _active.get()
        if active is not None and header["package"] == "_global_":
            path = config_path.removesuffix(".yaml")
            result = leave_out(config, file=path, exchanged=active.exchanged)
            # Hydra may read a file more than once.
            active.left_out.extend(one for one in result if one not in active.left_out)
        return ConfigResult(provider=self.provider, path=self.full_path(), config=config, header=header)

    def file(self, config_path: str) -> Path:
        """The file of a config path, whether it exists or not."""
        return Path(self.path) / self._normalize_file_name(config_path)


def _structured(schema: type[Any]) -> DictConfig:
    """A fresh config, since Hydra merges into it. Composing again copies it, in a third of the time."""
    return deepcopy(_first(schema))


@lru_cache(maxsize=256)
def _first(schema: type[Any]) -> DictConfig:
    return OmegaConf.structured(schema)


@lru_cache(maxsize=256)
def _parsed(file: Path, text: str) -> DictConfig | ListConfig:
    # Every value takes at least one character, except those of an alias.
    if "*" in text or len(text) >= MAX_VALUES:
        _check_size(file, text)
    return OmegaConf.create(text)


def _text(file: Path) -> str:
    """The text of a recipe file. Raises RecipeError when it cannot be read, is not UTF-8 or is too large."""
    try:
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise RecipeError(f"{file}: got {size} bytes, expected at most {MAX_BYTES} for a recipe.")
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{file}: not UTF-8 text (byte {error.start}); save the file as UTF-8.") from error
    except OSError as error:
        raise RecipeError(f"{file}: the recipe cannot be read: {error.strerror or error}.") from error


def _check_size(file: Path, text: str) -> None:
    """Refuse aliases that expand to an absurd number of values: a few lines can expand to billions."""
    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        """Values in a node, with aliases expanded."""
        if not isinstance(node, yaml.CollectionNode):
            return 1
        if id(node) not in sizes:
            sizes[id(node)] = MAX_VALUES  # what holds itself has no end
            entries = cast("list[Any]", node.value)
            sizes[id(node)] = 1 + sum(
                sum(size(part) for part in cast("tuple[Any, ...]", entry)) if isinstance(entry, tuple) else size(entry)
                for entry in entries
            )
        return sizes[id(node)]

    if size(cast(Any, yaml).compose(text, Loader=yaml.SafeLoader)) >= MAX_VALUES:
        raise RecipeError(f"{file}: its aliases stand for {MAX_VALUES} values or more; write out what is meant.")
