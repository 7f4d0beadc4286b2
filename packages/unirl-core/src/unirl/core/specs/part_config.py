"""Base classes of the configs of parts, by kind.

Plain dataclasses, used by Hydra as structured configs. Facts about a model are not here but on its spec.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..acceleration import Acceleration
from ..limits import Reason, limit, one_of

if TYPE_CHECKING:
    from .memory import Processes, RewardProcesses, TrainingMemory
    from .plan import Plan, Stage

__all__ = [
    "CONFIG_BASES",
    "BackendConfig",
    "EnvironmentConfig",
    "GateConfig",
    "LauncherConfig",
    "PartConfig",
    "RewardConfig",
    "code_of_variables",
]


@dataclass
class PartConfig:
    """Base class of every part's config. A plugin's config dataclass inherits it."""

    use: str = ""
    """Short name of the part. Set by choosing the part (`engine=trainside`), never by hand."""
    rounding_only: ClassVar[tuple[str, ...]] = ()
    """Settings that change the results of a run by rounding at most. A resumed run may change them."""
    accelerations: ClassVar[Mapping[str, Acceleration]] = {}
    """Settings that trade exact numbers for speed or memory, see `unirl.core.acceleration`."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterable[Reason]:
        """Invalid combinations of settings, each within its own limits, and conflicts with the rest of the plan.

        Asked once for each stage that the part serves; launchers, transports and trackers serve all of them.
        plan, stage: None when the part is built on its own; then only its own settings are checked.
        A key that begins with a dot, such as `.lora.rank`, is relative to this config.
        """
        return ()

    def read_files(self) -> Mapping[str, Path]:
        """Files whose content changes what the part computes: relative key, such as `.image`, -> file.

        A run records their hashes, and a resume is refused when one has changed. Weights are not among them.
        """
        return {}

    def named_code(self) -> Mapping[str, str | Path]:
        """Settings that name code which the part runs: relative key, such as `.target` -> that code.

        `package.module:name` or a file is run without further questions if it belongs to an installed plugin or is in
        the current folder. Anything else, such as words of a command, is described, and needs `--allow-code`.
        """
        return {}

    def read_versions(self) -> Mapping[str, str]:
        """Versions of services that compute for the part, and of its checkpoint: relative key, such as `.urls` or
        `.path`, -> version.

        A run asks when it starts and when it resumes, and treats them like the hashes of files.
        """
        return {}


@dataclass
class GateConfig:
    reward: str = ""
    """Key of another reward, under `reward`: this one counts only for samples that pass it. A sample that does not
    gets the lowest score that this reward can have. Empty disables the gate."""
    at_least: float | None = limit(None, least=-1e9, most=1e9)
    """Score of that reward, before its own `clip`, from which a sample passes."""


@dataclass
class RewardConfig(PartConfig):
    """Base class of every reward's config."""

    other_names: ClassVar[tuple[str, ...]] = ()
    """Names that its code may take besides metadata; they are suggested where metadata is missing."""
    weight: float = limit(1.0, least=-1e9, most=1e9)
    """Weight of this reward in the combined reward."""
    schedule: list[Any] = limit([], least=0, most=1e9)
    """Factor of `weight` over the run, `[[step, factor], ...]`: linear between these steps, constant before the first
    and after the last. Empty is 1 throughout. Evaluation always counts the plain `weight`."""
    clip: list[float] | None = limit(None, least=-1e9, most=1e9, length=2)
    """Lowest and highest score that counts, `[low, high]`; scores beyond are moved there. None disables clipping."""
    gate: GateConfig = field(default_factory=GateConfig)
    """Count this reward only where another one passes."""
    stage: str = ""
    """Stage whose samples it scores; empty scores every stage that generates its medium."""

    def weight_at(self, step: float) -> float:
        """The weight in a step, counted from 0."""
        points: list[list[float]] = self.schedule or [[0.0, 1.0]]
        for (start, low), (end, high) in pairwise(points):
            if start <= step < end:
                return self.weight * (low + (high - low) * (step - start) / (end - start))
        return self.weight * points[0 if step < points[0][0] else -1][1]

    def required_metadata(self) -> Sequence[str]:
        """Metadata keys that every prompt must have with these settings, besides those of the spec."""
        return ()

    def frames_read(self, num_frames: int) -> Sequence[int] | None:
        """Frames that the reward reads of a video of this many, counted from 0 and rising; None is all.

        Where another process scores, the others are not sent there. The reward may get all frames or these alone, with
        the rate that is left of them, and scores both alike: of a video of these frames it reads all.
        """
        return None

    def further_parts(self) -> Sequence[str]:
        """Names of the components that the reward reports with these settings, besides those of the spec."""
        return ()

    def device_weights(self) -> Mapping[str, str]:
        """Checkpoints that the reward loads onto its device with these settings: relative key of the file, folder or
        hub id, such as `.path`, -> dtype that the weights have there.

        Launchers give a GPU to rewards that have some, and `unirl plan` counts their bytes. Empty for a reward that
        computes on the CPU.
        """
        return {}


@dataclass
class EnvironmentConfig(PartConfig):
    """Base class of every environment's config. The return of an episode is the sum of discount^t x reward_t over its
    turns t, from 0."""

    rounding_only: ClassVar[tuple[str, ...]] = ("timeout_s",)
    max_turns: int = limit(8, least=1, most=10**4)
    """Most answers of an episode. One that the environment has not ended by then has the status TRUNCATED."""
    max_tokens: int = limit(0, least=0, most=10**7)
    """Most tokens of an episode after its prompt, answers and observations; an episode that reaches them has the status
    TRUNCATED. Each answer is limited by `sampling.max_new_tokens` besides. 0 sets no limit."""
    discount: float = limit(1.0, least=0, most=1)
    """Discount of the rewards of later turns; 1 weighs all turns alike."""
    weight: float = limit(1.0, least=-1e9, most=1e9)
    """Weight of the return in the combined reward, beside those of `reward`."""
    role: str = one_of("user", "tool", default="user")
    """Role of the environment in the chat template."""
    same_start: bool = True
    """Give all samples of a group the same seed, so that their episodes start alike and can be compared."""
    timeout_s: float = limit(60.0, above=0, most=10**6)
    """Most seconds of a call of the environment, which is one turn of all episodes; a longer one ends the run."""

    def required_metadata(self) -> Sequence[str]:
        """Metadata keys that every prompt must have with these settings, besides those of the spec."""
        return ()


@dataclass
class BackendConfig(PartConfig):
    """Base class of every backend's config: the trainable parameters, and AdamW's settings."""

    trains: str = one_of("lora", "full", default="lora")
    """`lora` trains adapters, `full` trains all weights. Trainable parameters are kept in fp32 whatever the model's
    dtype."""
    lr: float = limit(1e-4, above=0)
    """Learning rate."""
    betas: list[float] = limit([0.9, 0.999], least=0, below=1, length=2)
    """Decay rates of Adam's first and second moments."""
    eps: float = limit(1e-8, above=0)
    """Added to the square root of Adam's second moment."""
    weight_decay: float = limit(0.0, least=0)
    """Decoupled weight decay: each step shrinks every weight by lr x weight_decay."""
    max_grad_norm: float | None = limit(1.0, above=0)
    """Largest global gradient norm; None disables clipping."""

    @property
    def copies(self) -> int:
        """Number of neighbouring ranks that hold the same rows, because they share the work on each."""
        return 1

    @property
    def fills_weights(self) -> bool:
        """Whether it reads the checkpoint's values itself, tensor by tensor, also where one process trains: the model
        is then built without values, if both have the capability `lazy-build`."""
        return False

    def memory(self, plan: Plan | None) -> TrainingMemory | None:
        """Memory that it needs with these settings, for `unirl plan`; None if unknown. plan: as in `problems`."""
        return None


def code_of_variables(key: str, variables: Mapping[str, str]) -> Mapping[str, str]:
    """Environment variables by which an interpreter, its loader or an engine takes code from elsewhere, and all that
    hold paths, as `PartConfig.named_code` has them. key: relative key of the variables."""
    return {
        f"{key}.{name}": f"what {name}={value!r} leads to"
        for name, value in variables.items()
        if name.startswith(("LD_", "PYTHON", "UNIRL_", "RAY_")) or "PLUGIN" in name or "/" in value
    }


@dataclass
class LauncherConfig(PartConfig):
    """Base class of every launcher's config."""

    @property
    def processes(self) -> Processes:
        """Number of processes with these settings, for `unirl plan`."""
        from .memory import Processes

        return Processes()

    def reward_processes(self, plan: Plan) -> Sequence[RewardProcesses]:
        """Processes that score, with these settings; empty where the process that trains does."""
        return ()


CONFIG_BASES: Mapping[str, type[PartConfig]] = {
    "reward": RewardConfig,
    "environment": EnvironmentConfig,
    "backend": BackendConfig,
    "launcher": LauncherConfig,
}
"""Kind of part -> base class of its config; PartConfig for every other kind."""
