"""Config shared by all external engines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from unirl.core.acceleration import NARROW, Acceleration
from unirl.core.limits import Reason, limit, one_of
from unirl.core.specs.part_config import PartConfig, code_of_variables
from unirl.model_host.model_files import DTYPES

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["OTHER_LAYOUT", "SPLIT", "ExternalConfig"]

SPLIT = "only one device, and weights that are not split over several, are supported"
OTHER_LAYOUT = "weights of another layout or dtype could be neither synced nor compared with those that train"
"""Reasons of `ExternalConfig.unsupported`."""


@dataclass
class ExternalConfig(PartConfig):
    """Settings common to all external engines, under the same names whatever the engine calls them."""

    path: str = ""
    """Checkpoint folder; empty uses the one the trained model was loaded from."""
    dtype: str = one_of("auto", *DTYPES, default="auto")
    """Dtype of the engine's weights and computation; `auto` uses that of the trained module. If set explicitly and
    narrower than the weights sent, these are rounded to it."""
    enforce_eager: bool = False
    """Run without CUDA graphs and compilation: faster start, slower generation. Always on for CPUs."""
    sleep_mode: bool = False
    """Release the memory of the weights while training runs on the same device."""
    log_level: str = one_of("DEBUG", "INFO", "WARNING", "ERROR", default="WARNING")
    """Level of the engine's log: `DEBUG`, `INFO`, `WARNING` or `ERROR`."""
    log_file: str = "{run}/logs/{part}-{pid}.log"
    """File to append the engine's output to. `{run}` is the run's folder, `{part}` the engine's name, `{pid}` the host
    process; with several stages each has a subfolder. If empty, or with `{run}` outside a run, the output is kept only
    while the engine runs, for error messages."""
    release: str = ""
    """Release of the engine, one of those with lock files; empty is the newest. `unirl engine-env --release` creates
    its environment."""
    env_dir: str = ""
    """Folder of environments, as in `unirl engine-env --dir`; empty uses the default."""
    transfer_dir: str = ""
    """Folder for weight transfers; empty uses shared memory, or the temporary folder if they do not fit."""
    start_timeout_s: float = limit(900.0, above=0)
    """Timeout for importing the engine and loading the checkpoint."""
    generate_timeout_s: float = limit(3600.0, above=0)
    """Timeout for one rollout."""
    sync_timeout_s: float = limit(600.0, above=0)
    """Timeout for one weight update."""
    environment: dict[str, str] = field(default_factory=lambda: dict[str, str]())
    """Environment variables of the engine's process. Of this process it inherits those about CUDA, NCCL, caches of
    compiled kernels and the engine itself, and no others."""
    extra: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Further engine arguments, by the engine's own names; arguments covered by other keys are rejected."""

    accelerations: ClassVar[Mapping[str, Acceleration]] = {"dtype": Acceleration(scope="rollout", error=NARROW)}
    unsupported: ClassVar[Mapping[str, str]] = {}
    """Arguments, as `extra.NAME`, and environment variables, as `environment.NAME`, that no plan may set -> why."""
    has_batch_invariant_mode: ClassVar[bool] = False
    """Whether the engine has a batch-invariant mode, and a setting `batch_invariant` for it."""

    def named_code(self) -> Mapping[str, str | Path]:
        """Environments, whose interpreter is started, variables of its process, and arguments by which engines import
        code or run a checkpoint's: `trust_remote_code`, and any text that may be a path or a dotted name."""
        code: dict[str, str | Path] = {".env_dir": Path(self.env_dir).expanduser()} if self.env_dir else {}
        code |= code_of_variables(".environment", self.environment)
        for name, value in self.extra.items():
            if not all(map(_PLAIN.fullmatch, _texts({name: value}))):
                code[f".extra.{name}"] = f"the engine's {name}={value!r}"
        return code

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Unsupported arguments and modes, and a release without a lock file, which the environment reports where there
        is no plan."""
        for key, why in self.unsupported.items():
            field, _, name = key.partition(".")
            if name in getattr(self, field):
                yield Reason(key=f".{key}", text=f"not allowed; {why}. Remove it.")
        if plan is None or stage is None:
            return
        if plan.run.batch_invariant and not self.has_batch_invariant_mode:
            yield Reason(
                key="run.batch_invariant",
                text=f"got true; engine {stage.engine.name!r} is an external engine without a batch-invariant "
                "mode. Use an in-process engine, such as trainside, or unset it.",
            )
        if self.release in ("", *stage.engine.spec.releases):
            return
        releases = stage.engine.spec.releases
        has = f"{', '.join(releases)}, or empty for the newest" if releases else "empty, for its only release"
        yield Reason(key=".release", text=f"got {self.release!r}; engine {stage.engine.spec.name!r} accepts {has}.")


_PLAIN = re.compile(r"[\w+-]*")


def _texts(value: Any) -> Iterator[str]:
    """Texts in an argument, and the name of each that asks for the code of a checkpoint, with its value."""
    if isinstance(value, Mapping):
        for name, item in cast("Mapping[Any, Any]", value).items():
            yield from [f"{name}: {item}"] if name == "trust_remote_code" and item else _texts(item)
    elif isinstance(value, list | tuple):
        for item in cast("list[Any]", value):
            yield from _texts(item)
    elif isinstance(value, str):
        yield value
