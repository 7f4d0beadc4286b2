"""The factory: builds parts from their specs for the claims, on miniatures, and keeps what may be shared."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from omegaconf import OmegaConf
from unirl.core.errors import PluginBroken
from unirl.core.plugins.catalog import Catalog, Found
from unirl.core.roles import Model
from unirl.core.specs.capability import Cap
from unirl.core.specs.part_config import PartConfig
from unirl.core.specs.plan import Choice
from unirl.core.specs.spec import EngineSpec, Miniature, ModelSpec, RewardSpec
from unirl.core.types.data import MediaRef
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig

from .verdicts import NotRun

if TYPE_CHECKING:
    from .engine_pool import EnginePool

__all__ = ["PartFactory"]

T = TypeVar("T")


class PartFactory:
    """One per run. What it builds comes from the catalog's specs alone."""

    def __init__(self, catalog: Catalog, folder: Path) -> None:
        self.catalog = catalog
        self.folder = folder
        """An empty folder of this run, for whatever claims write."""
        self._shared: dict[str, Any] = {}
        self._contexts = ExitStack()

    def shared(self, key: str, make: Callable[[], T]) -> T:
        """The result of `make`, made once a run, for claims that only read it."""
        if key not in self._shared:
            self._shared[key] = make()
        return cast(T, self._shared[key])

    def entered(self, key: str, make: Callable[[], AbstractContextManager[T]]) -> T:
        """The same for something that has to be ended: a context that is entered once and left with the factory."""
        return self.shared(key, lambda: self._contexts.enter_context(make()))

    def close(self) -> None:
        self._contexts.close()

    def config(self, found: Found, settings: Mapping[str, Any] | None = None, *, enable: Cap | None = None) -> Any:
        """A config of the part: its defaults, its `trial`, the files of its `tiny` if it is a reward, what enables a
        capability, then `settings` by dotted key.

        Raises an OmegaConf error for a key or a type that the config does not have.
        """
        spec = found.spec
        laid = {**spec.trial, **self.reward_files(found)}
        if enable is not None:
            laid |= spec.enabled_by.get(enable, {})
        filled = self._filled(self.resolved(found, spec.config), {**laid, **(settings or {})})
        assert isinstance(filled, PartConfig)
        filled.use = spec.name
        return filled

    def choice(self, found: Found, config: PartConfig) -> Choice[Any, Any]:
        """The part as a plan holds it."""
        return Choice(key=found.spec.kind, spec=found.spec, config=config, dist=found.dist, version=found.version)

    def build(self, found: Found, config: PartConfig, **context: object) -> Any:
        """The part, made as a run makes it. Raises NotRun when it needs a package that is not installed."""
        build: Callable[..., Any] = self.resolved(found, found.spec.build)
        try:
            return build(config, **context)
        except ModuleNotFoundError as error:
            raise _absent(found, error) from error

    @property
    def engines(self) -> EnginePool:
        """Opens engines."""
        from .engine_pool import EnginePool

        return self.entered("engines", lambda: closing(EnginePool(self)))

    def miniature(self, found: Found) -> Miniature:
        """The miniature of a model. Raises NotRun when it states none."""
        spec = cast(ModelSpec, found.spec)
        if spec.tiny is None:
            raise NotRun(f"model {spec.name!r} states no `tiny` miniature, so nothing of it can be built here")
        return spec.tiny

    def checkpoint(self, found: Found, *, seed: int = 0, again: bool = False) -> Path:
        """A folder with the model's miniature; written once per seed, or into another folder with `again`."""
        folder = self.folder / "miniatures" / f"{found.spec.name}-{seed}{'-again' if again else ''}"
        if again and folder.exists():
            shutil.rmtree(folder)
        if not folder.exists():
            write: Callable[..., None] = self.resolved(found, self.miniature(found).write)
            partial = folder.with_name(f"{folder.name}.partial")
            partial.mkdir(parents=True)
            try:
                write(partial, seed=seed)
                partial.rename(folder)
            except ModuleNotFoundError as error:
                raise _absent(found, error) from error
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return folder

    def reward_files(self, found: Found) -> Mapping[str, Any]:
        """Settings that load the miniature of a reward; written once a run. Empty for other parts."""
        spec = found.spec
        if not isinstance(spec, RewardSpec) or not spec.tiny:
            return {}

        def written() -> Mapping[str, Any]:
            folder = self.folder / "reward-files" / spec.name
            folder.mkdir(parents=True)
            write: Callable[..., Mapping[str, Any]] = self.resolved(found, spec.tiny)
            try:
                return write(folder, seed=0)
            except ModuleNotFoundError as error:
                shutil.rmtree(folder)
                raise _absent(found, error) from error

        return self.shared(f"files of reward {spec.name}", written)

    def media(self, found: Found, number: int, *, engine: Found | None = None) -> tuple[MediaRef, ...]:
        """Media of sample `number` of the model's miniature; written once a run. None for an engine that is given
        none."""
        target = self.miniature(found).media
        is_blind = engine is not None and cast(ModelSpec, found.spec).lacks_media(cast(EngineSpec, engine.spec))
        if not target or is_blind:
            return ()

        def written() -> tuple[MediaRef, ...]:
            folder = self.folder / "media" / found.spec.name
            folder.mkdir(parents=True, exist_ok=True)
            write: Callable[..., tuple[MediaRef, ...]] = self.resolved(found, target)
            return write(folder, number=number)

        return self.shared(f"media {number} of {found.spec.name}", written)

    def needed_media(self, found: Found, number: int) -> tuple[MediaRef, ...]:
        """The same of a model that generates nothing without media; none for one that also goes by text alone."""
        return self.media(found, number) if cast(ModelSpec, found.spec).needs_media else ()

    def sampling(self, found: Found, **settings: object) -> LatentSamplingConfig:
        """Sampling settings of latents that the model's miniature takes, with `settings` laid over them."""
        laid = {"num_inference_steps": 4, **self._of_miniature(found, other=TextSamplingConfig), **settings}
        return cast(LatentSamplingConfig, self._filled(LatentSamplingConfig, laid))

    def text_sampling(self, found: Found, **settings: object) -> TextSamplingConfig:
        """Sampling settings of text that the model's miniature takes, with `settings` laid over them."""
        laid = {"max_new_tokens": 8, **self._of_miniature(found, other=LatentSamplingConfig), **settings}
        return cast(TextSamplingConfig, self._filled(TextSamplingConfig, laid))

    def _of_miniature(self, found: Found, *, other: type[Any]) -> dict[str, Any]:
        """Settings that the model's miniature takes, of a model with tracks of both kinds without those that only
        `other` has."""
        settings, tracks = self.miniature(found).sampling, cast(ModelSpec, found.spec).tracks
        if len(set(tracks.values())) == 1:
            return dict(settings)
        mine = LatentSamplingConfig if other is TextSamplingConfig else TextSamplingConfig
        left = {field.name for field in fields(other)} - {field.name for field in fields(mine)}
        return {key: value for key, value in settings.items() if key.partition(".")[0] not in left}

    def _filled(self, schema: type[Any], settings: Mapping[str, Any]) -> Any:
        """The dataclass with its defaults and these settings by dotted key, checked. A copy of the caller's own."""

        def fill() -> Any:
            config = OmegaConf.structured(schema)
            for key, value in settings.items():
                OmegaConf.update(config, key, value)
            return OmegaConf.to_object(config)

        # OmegaConf takes 15 ms for what claims ask for thousands of times.
        key = f"{schema.__module__}:{schema.__qualname__} {settings!r}"
        return copy.deepcopy(self.shared(key, fill))

    def track(self, found: Found, kind: Literal["latent", "text"]) -> str:
        """Name of the model's first track of a kind."""
        return next(name for name, of in cast(ModelSpec, found.spec).tracks.items() if of == kind)

    def fresh_model(
        self,
        found: Found,
        *,
        device: str = "cpu",
        seed: int = 0,
        lazy: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> Model:
        """The model on its miniature, for a claim that changes it. lazy: see `unirl.core.roles.Model`."""
        spec = cast(ModelSpec, found.spec)
        config = self.config(found, {spec.path_key: str(self.checkpoint(found, seed=seed)), **(settings or {})})
        return cast(Model, self.build(found, config, device=device, **({"lazy": True} if lazy else {})))

    def model(self, found: Found, *, device: str = "cpu") -> Model:
        """The model on its miniature, shared by all claims that only look at it."""
        return self.shared(f"model {found.spec.name} on {device}", lambda: self.fresh_model(found, device=device))

    def resolved(self, found: Found, target: str) -> Any:
        """The object that a `"module:attribute"` of its spec names. Raises NotRun when it needs an absent package."""
        try:
            return self.catalog.resolve(target)
        except PluginBroken as error:
            cause = error.__cause__
            if isinstance(cause, ModuleNotFoundError) and cause.name and cause.name != target.partition(":")[0]:
                raise _absent(found, cause) from error
            raise


def _absent(found: Found, error: ModuleNotFoundError) -> BaseException:
    """The error for a missing module: NotRun for a package that is not installed, itself for a part of the plugin."""
    missing = error.name or str(error)
    if missing.split(".")[0] == "unirl":
        return error
    kind, name = found.spec.kind, found.spec.name
    return NotRun(f"{kind} {name!r} needs the Python package {missing.split('.')[0]!r}, which is not installed here")
