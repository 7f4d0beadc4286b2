"""Sampling settings of tracks, sent to engines with every request."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ..acceleration import NARROW, Acceleration
from ..limits import Reason, limit, one_of

__all__ = [
    "PLAIN_GUIDANCE",
    "TRAJECTORY_BYTES",
    "LatentSamplingConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "SdeStepsConfig",
    "TextSamplingConfig",
]

PLAIN_GUIDANCE = ("batched", "two-pass", "norm-corrected")
"""Guidances that a scale of 1 turns off."""

TRAJECTORY_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Values of `trajectory_dtype` -> bytes of a stored element."""


@dataclass
class ScheduleConfig:
    variant: str = one_of("exact", "diffusers-default", default="exact")
    """`exact` shifts once; `diffusers-default` applies diffusers' double shift, to reproduce papers."""
    shift: float | None = limit(None, above=0)
    """Static shift; None takes it from the checkpoint's scheduler config."""


@dataclass
class SdeStepsConfig:
    """Which denoising steps are stochastic, and which of them are trained on."""

    mode: str = one_of("all", "fraction", "random", "window", "fixed", "none", default="all")
    """`all`, `fraction`, `random`, `window`, `fixed` or `none`."""
    first: float = limit(0.0, least=0, below=1)
    """Start of the pool, as a fraction of the steps."""
    last: float = limit(1.0, above=0, most=1)
    """End of the pool (exclusive), as a fraction of the steps."""
    count: int | None = limit(None, least=1)
    """Number of steps drawn from the pool in mode `random`."""
    steps: list[int] = limit(list[int](), least=0)
    """The steps of mode `fixed`, counted from 0."""
    window: int = limit(4, least=1)
    """Width of the sliding window, in steps."""
    strategy: str = one_of("progressive", "random", default="progressive")
    """How the window moves: `progressive` or `random`."""
    move_every: int | None = limit(None, least=1)
    """Training steps between moves of the window; None is 25 for a progressive window, 1 for a random one."""
    overlap: int = limit(0, least=0)
    """Steps shared by two neighbouring windows."""
    roll_back: bool = False
    """Start over after the last window instead of staying there."""
    per_group: bool = False
    """Draw the steps separately for each group; samples of a group always share them."""
    train_fraction: float = limit(1.0, above=0, most=1)
    """Fraction of the stochastic steps that are trained on, rounded down to at least one. Drawn anew for each sample
    and rollout; 1 trains on all of them."""
    min_noise_std: float = limit(0.0, least=0)
    """Smallest standard deviation of the noise of the stochastic step (E-GRPO): a step with less takes in the steps
    after it until it has as much, so samples take fewer steps. Needs one stochastic step that all groups share. 0
    leaves the schedule as it is."""
    branch_steps: list[int] = limit(list[int](), least=0)
    """Stochastic steps at which the samples of a group branch, rising: a tree whose paths share their noise up to
    there. Empty gives each sample its own noise."""
    branch_factor: int = limit(2, least=2)
    """Children of every path at a branch step; a group has `branch_factor ** len(branch_steps)` samples."""

    def problems(self, num_steps: int) -> Iterator[Reason]:
        """Why these settings do not fit `num_steps` denoising steps; keys begin with a dot."""
        if not self.first < self.last:
            yield Reason(
                key=".first",
                text=f"got first {self.first} and last {self.last}, expected first < last.",
            )
            return
        if self.mode in ("all", "fixed") and (self.first, self.last) != (0, 1):
            yield Reason(
                key=".first" if self.first else ".last",
                text=f"got the range {self.first} to {self.last}; mode {self.mode!r} takes no range. Use mode "
                "'fraction'.",
            )
        pool = len(self._pool(num_steps))
        if self.mode in ("fraction", "random", "window") and pool < 1:
            yield Reason(
                key=".last",
                text=f"the range {self.first} to {self.last} of {num_steps} steps has no step in it; widen it.",
            )
        elif self.mode == "random" and not 1 <= (self.count or 0) <= pool:
            yield Reason(
                key=".count",
                text=f"got {self.count}, expected 1 to {pool}, the steps of the pool (from {self.first} to {self.last} "
                f"of {num_steps}).",
            )
        elif self.mode == "window" and self.window > pool:
            yield Reason(key=".window", text=f"got {self.window}, expected at most {pool}, the steps of the pool.")
        if self.mode == "window" and self.overlap >= self.window:
            yield Reason(
                key=".overlap", text=f"got {self.overlap}, expected less than the window of {self.window} steps."
            )
        if self.mode == "none" and self.train_fraction != 1:
            yield Reason(
                key=".train_fraction",
                text=f"got {self.train_fraction}, expected 1: mode 'none' has no stochastic step.",
            )
        if self.mode == "fixed" and not self.steps:
            yield Reason(key=".steps", text="got none, expected the steps of mode 'fixed', such as [0,1].")
        if self.mode == "fixed" and len(set(self.steps)) < len(self.steps):
            yield Reason(key=".steps", text=f"got {self.steps}, which names a step twice.")
        if self.per_group and not (self.mode == "random" or (self.mode == "window" and self.strategy == "random")):
            mode = f"mode {self.mode!r}" + " with strategy 'progressive'" * (self.mode == "window")
            yield Reason(
                key=".per_group",
                text=f"got true, but {mode} draws no steps. Set it to false, or use mode=random, or mode=window with "
                "strategy=random.",
            )
        for step in self.steps if self.mode == "fixed" else ():
            if step >= num_steps:
                yield Reason(
                    key=".steps", text=f"step {step} is past the last step {num_steps - 1}. Steps count from 0."
                )
        if self.branch_steps:
            yield from self._branch_problems(num_steps)
        if self.min_noise_std and (self.per_group or self.sde_count != 1):
            yield Reason(
                key=".min_noise_std",
                text=f"got {self.min_noise_std}, which needs one stochastic step that all groups share; set "
                "mode=window, window=1 and per_group=false.",
            )

    @property
    def sde_count(self) -> int | None:
        """Number of stochastic steps of a sample; None in modes where it depends on the number of all steps."""
        return {"window": self.window, "random": self.count, "fixed": len(self.steps), "none": 0}.get(self.mode)

    def possible_steps(self, num_steps: int) -> list[int]:
        """The steps that are stochastic in some rollout, rising."""
        pool = self._pool(num_steps)
        if self.mode == "window":
            stride = max(1, self.window - self.overlap) if self.strategy == "progressive" else 1
            starts = range(pool.start, pool.stop - self.window + 1, stride)
            return sorted({start + place for start in starts for place in range(self.window)})
        return {"fixed": sorted(self.steps), "none": []}.get(self.mode, [*pool])

    def known_steps(self, num_steps: int) -> list[int]:
        """The stochastic steps where they are the same in every rollout and group; none where they move."""
        return self.possible_steps(num_steps) if self.mode in ("all", "fraction", "fixed") else []

    def _pool(self, num_steps: int) -> range:
        return range(int(num_steps * self.first + 1e-9), int(num_steps * self.last + 1e-9))

    def _branch_problems(self, num_steps: int) -> Iterator[Reason]:
        key, asked, steps = ".branch_steps", self.branch_steps, self.known_steps(num_steps)
        if not steps:
            yield Reason(key=key, text=f"mode {self.mode!r} may leave these steps out; use all, fraction or fixed.")
        elif asked != sorted(set(asked) & set(steps)):
            yield Reason(key=key, text=f"got {asked}, expected rising stochastic steps, some of {steps}.")


@dataclass
class LatentSamplingConfig:
    """Sampling settings of a latent (diffusion) track."""

    kind: str = "latent"
    """Kind of track that these settings are for."""
    num_inference_steps: int = limit(10, least=1, most=10_000)
    """Denoising steps."""
    height: int = limit(512, least=1, most=65_535)
    """Height in pixels."""
    width: int = limit(512, least=1, most=65_535)
    """Width in pixels."""
    frames: int = limit(1, least=1, most=100_000)
    """Frames of a video; 1 for images."""
    fps: float = limit(0.0, least=0, most=1000)
    """Frames per second at which videos are meant to be played; 0 takes the model's own."""
    guidance_scale: float = 1.0
    """Scale of classifier-free guidance; 1 disables it and needs no negative prompt."""
    guidance_mode: str = "batched"
    """Guidance: `batched`, `two-pass`, `norm-corrected`, `interval`, `two-scale`, `text-image`, or `module:Class` of a
    plugin."""
    guidance_options: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Further arguments of the guidance, such as `scale_low: 3.0` for two-scale."""
    negative_prompt: str = ""
    """Negative prompt of classifier-free guidance, the same for all prompts."""
    kernel: str = "flow-sde"
    """SDE kernel: `flow-sde`, `dance-sde`, `cps`, `ddim-eta`, `euler`, `dpm2`, or `module:Class` of a plugin."""
    eta: float = limit(0.7, least=0)
    """Noise level of the kernel; 0 is deterministic."""
    kernel_options: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Further arguments of the kernel, such as `constants: false` for cps."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """The sigma schedule."""
    sde: SdeStepsConfig = field(default_factory=SdeStepsConfig)
    """Which steps are stochastic."""
    same_initial_noise: bool = False
    """Give all samples of a group the same initial noise."""
    max_sequence_length: int = limit(256, least=1, most=10**7)
    """Token limit of the longest text encoder."""
    trajectory_dtype: str = one_of(*TRAJECTORY_BYTES, default="float32")
    """Dtype of stored latents: `float32`, `bfloat16` or `float16`. The sampler rounds its latents to it after every
    step and before scoring, so the ratio of the first update stays 1."""
    options: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Settings that only the model has, see its README and `ModelSpec.options`."""
    decode: bool = True
    """Decode the final latents to images or videos for the rewards."""

    accelerations: ClassVar[Mapping[str, Acceleration]] = {"trajectory_dtype": Acceleration(scope="both", error=NARROW)}

    @property
    def is_guided(self) -> bool:
        """Whether guidance may be on. Only the plain modes are known to be off at a scale of 1."""
        return self.guidance_scale != 1.0 or self.guidance_mode not in PLAIN_GUIDANCE

    def for_evaluation(self, given: Collection[str]) -> LatentSamplingConfig:
        """The base of `eval.sampling`: without noise, by `euler`, and with nothing stored for training.

        given: keys of `eval.sampling`.
        """
        # Options belong to the kernel, or the guidance, that they were written for.
        guidance: dict[str, Any] = {"guidance_options": {}} if "guidance_mode" in given else {}
        plain: dict[str, Any] = {"kernel": "euler", "eta": 0.0, "kernel_options": {}, "trajectory_dtype": "float32"}
        return replace(self, **plain, **guidance, sde=SdeStepsConfig(mode="none"))


@dataclass
class TextSamplingConfig:
    """Sampling settings of a text track."""

    kind: str = "text"
    """Kind of track that these settings are for."""
    temperature: float = limit(1.0, least=0)
    """Divides the logits, in sampling and in training; 0 is greedy decoding, for evaluation only."""
    top_p: float = limit(1.0, above=0, most=1)
    """Nucleus sampling: the most likely tokens that reach this probability. Below 1 for evaluation only, because
    training takes log-probs over the whole vocabulary."""
    top_k: int = limit(0, least=0)
    """Sample from this many of the most likely tokens, for evaluation only; 0 takes all."""
    max_new_tokens: int = limit(1024, least=1, most=10**7)
    """Longest completion, in tokens; one that reaches it has the status TRUNCATED."""
    max_prompt_tokens: int = limit(0, least=0, most=10**7)
    """Longest prompt, in tokens; a longer one is an error, never truncated. 0 sets no limit."""
    stop: list[str] = field(default_factory=lambda: list[str]())
    """Stop strings. They are generated and trained on, but rewards do not see them."""
    stop_token_ids: list[int] = limit(list[int](), least=0)
    """Stop tokens, in addition to the model's own."""
    chat: bool = True
    """Format each prompt with the tokenizer's chat template; False uses it verbatim."""
    system_prompt: str = ""
    """System message of the chat template; empty for none."""
    thinking: bool | None = None
    """Passed to the chat template as `enable_thinking`; None keeps the template's default."""
    options: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Settings that only the model has, see its README and `ModelSpec.options`."""

    def for_evaluation(self, given: Collection[str]) -> TextSamplingConfig:
        """The base of `eval.sampling`: greedy."""
        return replace(self, temperature=0.0)


SamplingConfig = LatentSamplingConfig | TextSamplingConfig
"""Sampling settings of a track."""
