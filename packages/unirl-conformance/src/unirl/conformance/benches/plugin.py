"""A plugin as it is installed: what static claims need. Nothing of it is built, and nothing heavy imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, distribution
from typing import TypeVar

from unirl.core.catalog import Found
from unirl.core.plugin_loading import PluginRecord
from unirl.core.spec import Spec

from ..verdicts import NotApplicable, NotRun
from ..workbench.afresh import Imported, import_afresh
from ..workbench.installed import Installed
from .base import Bench

__all__ = ["HEAVY", "PluginBench"]

_ARRAYS = "an array library: 0.1 s and threads of its own"
_TRAINING = "brings torch: seconds, and it may start CUDA"
_ENGINE = "an engine: brings torch and its kernels, tens of seconds"
_MODELS = "a model library: seconds, and it looks for torch"
_CLIENT = "a tracker's client: a second, and it may start processes"
_MEDIA = "a media library: tenths of a second, for what no list needs"

HEAVY: Mapping[str, str] = {
    **dict.fromkeys(("numpy", "scipy", "pandas", "pyarrow", "sklearn", "numba"), _ARRAYS),
    **dict.fromkeys(("jax", "tensorflow", "triton"), "a framework: seconds, and it may take a GPU's memory"),
    "torch": "seconds, and it may start CUDA",
    **dict.fromkeys(("torchvision", "torchaudio", "accelerate", "peft", "deepspeed", "veomni", "trl"), _TRAINING),
    **dict.fromkeys(("transformers", "diffusers", "datasets", "tokenizers", "open_clip", "timm"), _MODELS),
    **dict.fromkeys(("vllm", "vllm_omni", "sglang", "flash_attn", "xformers"), _ENGINE),
    "ray": "a second, and it starts a logger of its own",
    **dict.fromkeys(("wandb", "swanlab", "mlflow", "tensorboard", "prometheus_client"), _CLIENT),
    **dict.fromkeys(("PIL", "matplotlib", "cv2", "imageio", "av", "skimage"), _MEDIA),
    **dict.fromkeys(("hydra", "omegaconf"), "composes recipes: a grammar and a registry, for what no list needs"),
    **dict.fromkeys(("requests", "httpx", "aiohttp", "fastapi"), "talks to the network, which no list does"),
}
"""Packages that listing parts and composing must not import, and why. `unirl --help` is to take 0.3 s."""

S = TypeVar("S", bound=Spec)


@dataclass(frozen=True, kw_only=True)
class PluginBench(Bench):
    @property
    def plugin(self) -> PluginRecord:
        """What became of it, loaded or not."""
        assert self.subject.plugin is not None
        return self.subject.plugin

    @property
    def loaded(self) -> PluginRecord:
        """The same, for claims about what it provides. Raises NotRun when it did not load."""
        if self.plugin.status != "loaded":
            raise NotRun(f"{self.plugin.label} is {self.plugin.status}, so nothing that it provides can be looked at")
        return self.plugin

    @property
    def specs(self) -> tuple[Spec, ...]:
        """Its parts. Raises NotApplicable when it provides none."""
        if not self.loaded.specs:
            raise NotApplicable(f"{self.plugin.label} provides no part")
        return self.plugin.specs

    def specs_of(self, cls: type[S]) -> list[S]:
        """Its parts of one class of spec. Raises NotApplicable when it provides none of them."""
        found = [spec for spec in self.specs if isinstance(spec, cls)]
        if not found:
            raise NotApplicable(f"{self.plugin.label} provides no {cls.kind}")
        return found

    def found(self, spec: Spec) -> Found:
        """One of its parts as the workshop takes it."""
        return Found(spec=spec, dist=self.plugin.dist, version=self.plugin.version)

    @cached_property
    def installed(self) -> Installed:
        """Its dist. Raises NotRun when the plugin comes from none, as one that a test makes."""
        try:
            return Installed(distribution(self.plugin.dist))
        except PackageNotFoundError as error:
            raise NotRun(f"no dist {self.plugin.dist!r} is installed here, so its metadata cannot be read") from error

    @property
    def afresh(self) -> Imported:
        """What importing it in a fresh interpreter did; one interpreter serves all plugins of the run."""
        records = [record for record in self.workshop.catalog.records if record.status == "loaded"]
        everything = self.workshop.shared("plugins imported afresh", lambda: import_afresh(records))
        found = everything[self.loaded.dist, self.loaded.name]
        if found.error:
            raise NotRun(f"{self.plugin.label} cannot be imported in a fresh interpreter: {found.error}")
        return found
