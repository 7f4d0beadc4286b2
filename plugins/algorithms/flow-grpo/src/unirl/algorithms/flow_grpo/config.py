"""Settings of Flow-GRPO. Fast, Dance, Mix and Guard are set here, by the SDE steps and by the kernel; Flow-DPPO,
TempFlow-GRPO and DDPO have the same settings with other defaults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.core.limits import Reason, limit, one_of
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.numerics.loss.kl_config import KlConfig

if TYPE_CHECKING:
    from unirl.core.specs.plan import Plan, Stage

__all__ = ["DdpoConfig", "FlowDppoConfig", "FlowGrpoConfig", "TempFlowConfig"]

_UNUSED = {
    "cispo": {"dual_clip": None, "ratio": "step", "ratio_norm": False},
    "divergence": {
        "dual_clip": None,
        "ratio": "step",
        "ratio_norm": False,
        "clip_range_high": None,
        "clip_schedule": "constant",
    },
}
"""Loss -> settings that it does not read, at the values that leave them out."""


@dataclass
class FlowGrpoConfig(KlConfig):
    loss: str = one_of("clip", "cispo", "divergence", default="clip")
    """`clip`: PPO's clipped surrogate. `cispo`: clips the importance weight of a step and keeps its gradient.
    `divergence` (Flow-DPPO): no clip; steps whose KL to the old policy reached `threshold` are left out where the loss
    would push them further away."""
    ratio: str = one_of("step", "sequence", default="step")
    """`step`: one ratio per SDE step. `sequence`: one per sample, the geometric mean over its steps (GSPO)."""
    threshold: float | None = limit(None, above=0)
    """KL per latent element of loss `divergence`, such as 1e-5; null with other losses."""
    clip_range: float = limit(1e-4, above=0, most=1)
    """Clip range of the ratio; 1 has no lower bound. Log-probs are averaged over the latent's elements, so 1e-4 here
    is a mean shift of 0.026 standard deviations at 65,536 elements. Use larger values for small latents. Loss
    `divergence` does not read it; for every loss it is the default of `train.logp_mismatch_max`."""
    clip_range_high: float | None = limit(None, above=0)
    """Upper clip range, if it differs from the lower one."""
    clip_schedule: str = one_of("constant", "linear", "cosine", default="constant")
    """How the clip range changes over the run: `constant`, `linear` (falls to half) or `cosine` (falls to 0)."""
    dual_clip: float | None = limit(None, above=1)
    """Upper bound on the loss of samples with negative advantage, as a multiple of |advantage|; above 1 + the upper
    clip range."""
    ratio_norm: bool = False
    """GRPO-Guard: remove the negative bias of the log-ratio and scale it by the step's noise."""
    step_weight: str = one_of("uniform", "inverse-dt", "noise", default="uniform")
    """Weight of each SDE step: `uniform`; `inverse-dt`, 1/(sigma - sigma') (GRPO-Guard); `noise`, the std of the step's
    noise over the mean of those of all steps of the schedule that may have noise (TempFlow-GRPO)."""
    step_rewards: bool = False
    """DenseGRPO: the reward of an SDE step is what it adds to the reward of the sample that would follow without noise.
    S SDE steps take S further samples for each one, which are drawn and scored and not trained on."""
    drop_zero_advantage: bool = False
    """Leave samples with zero advantage out of the loss average, so that the others weigh more."""
    kl_form: str = one_of("gaussian", "flow-grpo-code", "velocity", default="gaussian")
    """KL per step: `gaussian` is exact; `flow-grpo-code` omits the step length, to reproduce results of that code;
    `velocity` is the mean squared difference of the velocities, which weighs all steps alike, whatever their noise."""
    kl_step_weight: str = one_of("uniform", "inverse-dt", "noise", default="uniform")
    """Weight of each SDE step in the KL, as `step_weight` has them."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also settings of another loss, and a kernel whose log-probs or steps a term cannot use."""
        yield from super().problems(plan, stage)
        yield from self._of_the_loss()
        ahead = plan.run.max_staleness if plan is not None and self.loss == "divergence" else 0
        # A spec that says so itself is refused once.
        if ahead and stage is not None and stage.needs.staleness != "none":
            yield Reason(
                key="run.max_staleness",
                text=f"got {ahead}, expected 0: loss 'divergence' takes the KL to the weights at the start of a step.",
            )
        sampling = None if stage is None else stage.sampling
        if isinstance(sampling, LatentSamplingConfig):
            yield from self._of_the_kernel(sampling)

    def _of_the_loss(self) -> Iterator[Reason]:
        for key, unused in _UNUSED.get(self.loss, {}).items():
            if (value := getattr(self, key)) != unused:
                yield Reason(
                    key=f".{key}",
                    text=f"got {_yaml(value)}, expected {_yaml(unused)}: loss {self.loss!r} does not read it.",
                )
        if self.loss != "divergence" and self.threshold is not None:
            yield Reason(key=".threshold", text=f"got {self.threshold}, expected null: loss {self.loss!r} has none.")
        if self.loss == "divergence" and self.threshold is None:
            yield Reason(key=".threshold", text="got null, expected a KL for loss 'divergence', such as 1e-5.")
        if self.loss != "clip":
            return
        least = 1 + (self.clip_range if self.clip_range_high is None else self.clip_range_high)
        if self.dual_clip is not None and self.dual_clip <= least:
            yield Reason(
                key=".dual_clip",
                text=f"got {self.dual_clip}, expected more than {least:g}, the upper clip, such as 3; or null.",
            )

    def _of_the_kernel(self, sampling: LatentSamplingConfig) -> Iterator[Reason]:
        without_constants = sampling.kernel == "cps" and sampling.kernel_options.get("constants") is False
        divides = self.ratio_norm or self.kl_coef or self.loss == "divergence"
        if without_constants and divides:
            yield Reason(
                key="sampling.kernel_options.constants",
                text="got false, which drops the constants of the log-prob that ratio_norm, kl_coef and loss "
                "'divergence' compare with; set it to true or turn those off.",
            )
        whole = {
            "step_weight": self.step_weight == "noise",
            "kl_step_weight": bool(self.kl_coef) and self.kl_step_weight == "noise",
            "kl_form": bool(self.kl_coef) and self.kl_form == "velocity",
        }
        if ":" not in sampling.kernel or not any(whole.values()):
            return
        # It imports torch, so only kernels of plugins are checked with it.
        from unirl.numerics.diffusion.sampler_check import is_one_step

        if not is_one_step(sampling):
            key = next(key for key, reads in whole.items() if reads)
            yield Reason(
                key=f".{key}",
                text=f"got {getattr(self, key)}, which reads the coefficients of the kernel's steps; kernel "
                f"{sampling.kernel!r} is not a OneStepKernel and has none.",
            )


@dataclass
class FlowDppoConfig(FlowGrpoConfig):
    loss: str = "divergence"
    """A mask by the KL to the old policy in place of the clip."""
    threshold: float | None = 1e-5
    """KL per latent element, as in the paper."""


@dataclass
class TempFlowConfig(FlowGrpoConfig):
    step_weight: str = "noise"
    """The std of the step's noise over the mean of those of all steps of the schedule that may have noise."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also several SDE steps in a trajectory, and samples of a group that start apart."""
        yield from super().problems(plan, stage)
        sampling = None if stage is None else stage.sampling
        if not isinstance(sampling, LatentSamplingConfig):
            return
        sde, count = sampling.sde, sampling.sde.sde_count
        if count != 1:
            yield Reason(
                key="sampling.sde",
                text=f"got mode {sde.mode!r}{f' of {count} steps' if count else ''}, expected one SDE step for "
                "each trajectory, where it branches: sampling.sde.mode=window sampling.sde.window=1.",
            )
        if not sampling.same_initial_noise:
            yield Reason(
                key="sampling.same_initial_noise",
                text="got false, expected true: the samples of a group differ by their SDE step alone, so that their "
                "rewards are of that step.",
            )


@dataclass
class DdpoConfig(FlowGrpoConfig):
    buffer_size: int = limit(16, least=1)
    """Rewards of a prompt that its mean and standard deviation are taken over: those of this step, and before them the
    latest of earlier steps, up to this number."""
    min_count: int = limit(16, least=1)
    """Rewards that a prompt needs; one with fewer takes mean and standard deviation of the whole rollout."""

    def problems(self, plan: Plan | None, stage: Stage | None) -> Iterator[Reason]:
        """Also a count that no buffer reaches, and a mean that is not the prompt's."""
        yield from super().problems(plan, stage)
        if self.step_rewards:
            yield Reason(
                key=".step_rewards",
                text="got true, expected false: running statistics are of whole samples. Use algorithm=flow-grpo.",
            )
        if self.min_count > self.buffer_size:
            yield Reason(
                key=".min_count",
                text=f"got {self.min_count}, expected at most algorithm.buffer_size, {self.buffer_size}.",
            )
        if stage is not None and stage.advantage.center != "group":
            yield Reason(
                key="advantage.center",
                text=f"got {stage.advantage.center!r}, expected 'group': a sample is compared with its prompt's mean. "
                "Use algorithm=flow-grpo for one mean over all prompts.",
            )


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
