"""The program of an engine: product, dtype, device and log file."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from packaging.specifiers import SpecifierSet
from unirl.core.errors import RecipeError, RunFailed
from unirl.core.roles import Model
from unirl.core.specs.check import check_config
from unirl.engine_host.config import ExternalConfig
from unirl.engine_host.text_config import ExternalTextConfig
from unirl.model_host import model_files

from .environment import EngineEnvironment
from .process import Program

__all__ = ["Product", "dtype_of", "log_path", "program", "refuse_extra"]


@dataclass(frozen=True, kw_only=True)
class Product:
    """An engine's product, for messages and the version check."""

    title: str
    """The project's spelling: `vLLM`."""
    environment: EngineEnvironment
    tested: SpecifierSet
    """Tested versions."""
    says_cut_log_probs: bool = False
    """For text: with top_p or top_k its log-probs are normalised over the whole vocabulary, not over the kept
    tokens."""

    @property
    def name(self) -> str:
        """The engine's name in a recipe."""
        return self.environment.name

    def check_version(self, found: str) -> None:
        """Raises RunFailed for a version outside the tested range."""
        if not self.tested.contains(found, prereleases=True):
            raise RunFailed(
                f"engine {self.name!r}: its environment has {self.title} {found}; this engine was tested with "
                f"{self.tested}. Recreate the environment from its lock file: "
                f"`unirl engine-env {self.name} --recreate`."
            )


def dtype_of(config: ExternalConfig, model: Model) -> torch.dtype:
    """The engine's dtype. Raises RecipeError for an unsupported name."""
    if config.dtype == "auto":
        return next(iter(model.trainable.parameters())).dtype
    return model_files.dtype_of(config.dtype, key="engine.dtype", model="the engine")


def program(
    product: Product,
    config: ExternalConfig,
    device: torch.device,
    *,
    variables: Mapping[str, str],
    cpu_variables: Mapping[str, str],
    modules: Sequence[str] = (),
    num_devices: int = 1,
    sleeps_on_cpu: bool = False,
) -> Program:
    """The engine's program. Raises RecipeError for an unsupported setting or device, RunFailed if the environment is
    missing.

    variables: environment variables of the engine.  cpu_variables: additional ones on a CPU.  modules: further
    ones than `EngineEnvironment.modules`.  num_devices: number of devices it uses, starting at `device`.
    """
    within = Path(config.env_dir).expanduser() if config.env_dir else None
    check_config(config, key="engine")
    environment = product.environment.of(config.release)
    if config.sleep_mode and device.type != "cuda" and not sleeps_on_cpu:
        raise RecipeError(
            f"engine.sleep_mode: {product.title} releases memory only on CUDA; got {device.type!r}. Unset it."
        )
    if isinstance(config, ExternalTextConfig) and config.batch_invariant and device.type != "cuda":
        raise RecipeError(
            f"engine.batch_invariant: got true on {device.type!r}; {product.title} has this mode only on "
            "CUDA. Unset it."
        )
    # All ranks of an engine are on one host, so nothing needs to listen on another interface.
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    result = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", **loopback, **variables}
    if device.type == "cpu":
        result |= cpu_variables
    elif device.index is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        expected = range(device.index, device.index + num_devices)
        result["CUDA_VISIBLE_DEVICES"] = ",".join(visible[at] if visible != [""] else str(at) for at in expected)
    if clash := sorted(config.environment.keys() & result.keys()):
        raise RecipeError(
            f"engine.environment.{clash[0]}: {product.title} is started with {clash[0]}={result[clash[0]]!r}, on which "
            "other settings rest. Leave it out."
        )
    return Program(
        name=product.name,
        python=environment.interpreter(device.type, within=within),
        serve=environment.serve,
        modules=(*environment.modules, *modules),
        variables={**result, **config.environment},
        log=log_path(config, product),
        start_timeout_s=config.start_timeout_s,
    )


def log_path(config: ExternalConfig, product: Product) -> Path | None:
    """File for the engine's output; None keeps it only while its process runs."""
    # A run has already replaced {run} by its folder; an engine built on its own has none.
    if not config.log_file or "{run}" in config.log_file:
        return None
    named = config.log_file.replace("{part}", product.name).replace("{pid}", str(os.getpid()))
    return Path(named).expanduser()


def refuse_extra(config: ExternalConfig, taken: Collection[str]) -> None:
    """Raises RecipeError for an argument in `engine.extra` that another key covers, or that is unsupported.

    taken: arguments covered by other keys.
    """
    for key in config.extra:
        why = "another key of `engine` sets it" if key in taken else config.unsupported.get(f"extra.{key}")
        if why:
            raise RecipeError(f"engine.extra.{key}: not allowed; {why}. Remove it.")
