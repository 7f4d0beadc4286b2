"""The program of an engine: what it is, its dtype, its device, where its log goes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from packaging.specifiers import SpecifierSet
from unirl.core.errors import RecipeError, RunFailed
from unirl.core.hosted import HostedConfig, hosted_settings
from unirl.core.model_files import DTYPES
from unirl.core.roles import Model

from .environment import EngineEnvironment
from .process import Program

__all__ = ["Product", "dtype_of", "log_path", "program", "refuse_extra"]


@dataclass(frozen=True, kw_only=True)
class Product:
    """What an engine is, for messages and for the check of its version."""

    title: str
    """As its project writes it: `vLLM`."""
    environment: EngineEnvironment
    tested: SpecifierSet
    """Versions that it was tried with."""
    says_cut_log_probs: bool = False
    """Of text: its log-probs are those of all tokens under top_p and top_k as well, not of the tokens that were
    left."""

    @property
    def name(self) -> str:
        """Of the engine in a recipe."""
        return self.environment.name

    def check_version(self, found: str) -> None:
        """Raises RunFailed, with the tested range, for a version outside of it."""
        if not self.tested.contains(found, prereleases=True):
            raise RunFailed(
                f"engine {self.name!r}: its environment holds {self.title} {found}; this engine was tried with "
                f"{self.tested}. Make the environment from the lock that comes with it: "
                f"`unirl engine-env {self.name} --recreate`."
            )


def dtype_of(config: HostedConfig, model: Model) -> torch.dtype:
    """The dtype that the engine is to hold. Raises RecipeError for a name that it does not take."""
    if config.dtype == "auto":
        return next(iter(model.trainable.parameters())).dtype
    if config.dtype not in DTYPES:
        raise RecipeError(f"engine.dtype: {config.dtype!r} was asked for; it is auto or one of {', '.join(DTYPES)}.")
    return getattr(torch, config.dtype)


def program(
    product: Product,
    config: HostedConfig,
    device: torch.device,
    *,
    variables: Mapping[str, str],
    cpu_variables: Mapping[str, str],
    modules: Sequence[str] = (),
    num_devices: int = 1,
    sleeps_on_cpu: bool = False,
) -> Program:
    """The process. Raises RecipeError for a setting or a device that the engine does not take, RunFailed without the
    environment.

    variables: environment variables of the engine.  cpu_variables: those besides on a CPU.  modules: those besides that
    go along.  num_devices: that it computes on, from `device` on.
    """
    within = Path(config.env_dir).expanduser() if config.env_dir else None
    for key, text in hosted_settings(config, name=product.name, releases=product.environment.earlier):
        raise RecipeError(f"{key}: {text}")
    environment = product.environment.of(config.release)
    if config.sleep_mode and device.type != "cuda" and not sleeps_on_cpu:
        raise RecipeError(
            f"engine.sleep_mode: {product.title} gives memory back on CUDA alone; this is {device.type!r}. Unset it."
        )
    found = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **variables}
    if device.type == "cpu":
        found |= cpu_variables
    elif device.index is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        wanted = range(device.index, device.index + num_devices)
        found["CUDA_VISIBLE_DEVICES"] = ",".join(visible[at] if visible != [""] else str(at) for at in wanted)
    return Program(
        name=product.name,
        python=environment.interpreter(device.type, within=within),
        serve=environment.serve,
        modules=(*environment.modules, *modules),
        variables=found,
        log=log_path(config, product),
        start_timeout_s=config.start_timeout_s,
    )


def log_path(config: HostedConfig, product: Product) -> Path | None:
    """Where the engine's output goes; None keeps it only while its process is there."""
    # A run has put its folder in place of {run}; there is none where an engine is built by itself.
    if not config.log_file or "{run}" in config.log_file:
        return None
    named = config.log_file.replace("{part}", product.name).replace("{pid}", str(os.getpid()))
    return Path(named).expanduser()


def refuse_extra(config: HostedConfig, taken: Mapping[str, object], forbidden: Sequence[str]) -> None:
    """Raises RecipeError for a name in `engine.extra` that has a key, or that cannot be.

    taken: arguments that other keys stand for.  forbidden: those that change how weights are held, which could then
    neither be loaded nor be checked.
    """
    for key in config.extra:
        if key in taken or key in forbidden:
            why = "another key of `engine` stands for it" if key in taken else "one GPU and plain weights are taken"
            raise RecipeError(f"engine.extra.{key}: it cannot be given; {why}. Leave it out.")
