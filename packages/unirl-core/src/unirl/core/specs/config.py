"""The schema of a recipe: the sections that belong to no part, and the whole.

Plain dataclasses, used by Hydra as structured configs. Facts about a model are not here but on its spec.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ..acceleration import BF16, TF32, Acceleration
from ..limits import LARGEST_INT, limit, one_of

__all__ = [
    "AdvantageConfig",
    "DataConfig",
    "EvalConfig",
    "RecipeConfig",
    "RunConfig",
    "ScoutsConfig",
    "StageConfig",
    "TrainConfig",
]


@dataclass
class RunConfig:
    name: str = ""
    """Name of the run; empty takes the recipe's name."""
    max_steps: int = limit(100, least=0, most=10**9)
    """Training steps: one rollout and its updates each."""
    stop_at: int = limit(0, least=0)
    """Save and stop after this many steps, to be resumed later; 0 runs to the end."""
    seed: int = limit(0, least=0, most=LARGEST_INT)
    """Seed of the sampling noise, the data order and every other random choice."""
    dir: str = ""
    """Run folder; empty makes `runs/<name>-<time>`."""
    save_every: int = limit(0, least=0)
    """Steps between checkpoints; 0 saves at the end only. Ctrl-C also saves."""
    save_async: bool = False
    """Write checkpoints beside the steps that follow: a save then takes the time of a copy to CPU memory, and the copy
    stays there. The files are the same. Where a backend makes no copy, the run waits for the write."""
    restarts: int = limit(0, least=0)
    """How often a run starts again by itself, from its newest checkpoint, after it lost a process that it cannot
    replace: a train rank, an engine, or the machine of one. It waits ten minutes for machines that are missing."""
    keep: int = limit(2, least=0)
    """Number of newest checkpoints to keep; 0 keeps all."""
    export_every: int = limit(0, least=0)
    """Steps between exports of the adapters to `exports/step-<number>` in the run folder, as `unirl export` writes
    them, of the policy that `eval.policy` names. All are kept; `latest` links to the newest. 0 exports none."""
    export_best: bool = False
    """Also export the adapters after each evaluation with the highest mean score so far; `best` links to these."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    media_every: int = limit(10, least=0)
    """Steps between showing training samples: trackers get images and completions, and the run folder keeps the samples
    with tokens, log-probs, scores and advantages for `unirl show`; 0 shows none."""
    on_collapse: str = one_of("report", "fail", default="report")
    """When a trained reward has fallen to the worst score of the first steps: `report` a finding, or `fail`."""
    on_hacking: str = one_of("report", "fail", default="report")
    """When a trained reward has risen over the last steps while another reward or component fell: `report` a finding,
    or `fail`, with the weights saved as they are."""
    peak_tflops: float | None = limit(None, above=0)
    """Dense bf16 peak of a device in TFLOP/s, for model FLOPs utilisation (`perf/train_mfu`). None takes the published
    peak of a device that is known by name; of others only TFLOP/s are logged."""
    threads: int = limit(0, least=0, most=1024)
    """CPU threads for torch; 0 keeps torch's default."""
    matmul_precision: str = one_of("highest", "high", "medium", default="highest")
    """Precision of matrix products of fp32 tensors, in torch's words (`set_float32_matmul_precision`). `high` takes
    TF32 on GPUs, 10 bits of mantissa and several times as fast, for all that is in fp32: adapters on a 16-bit base,
    reward models, logits. `medium` may take bf16."""
    batch_invariant: bool = False
    """Make each sample's result bitwise independent of the rest of its batch, at some cost in speed; refused where the
    platform or the engine has no such mode. The first ratio is 1 without it too: the old log-probs are recomputed in
    the micro-batches of the update."""
    reward_overlap_groups: int = limit(0, least=0)
    """Groups per chunk: each chunk is scored while the next one is generated. 0 generates the whole rollout first."""
    max_staleness: int = limit(0, least=0)
    """Most rollouts that may be generated ahead of the one in training, each with weights up to that many steps old;
    0 generates every rollout with the newest weights, 1 is one-step off-policy."""

    accelerations: ClassVar[Mapping[str, Acceleration]] = {
        "matmul_precision": Acceleration(scope="both", error={"high": TF32, "medium": BF16})
    }


@dataclass
class ScoutsConfig:
    """Cheap samples that choose which of each prompt are drawn exactly and trained on (Sol-RL)."""

    samples_per_prompt: int = limit(0, least=0, most=10**6)
    """Scouts of each prompt. The `data.samples_per_prompt` of them with the best and the worst rewards, half each, are
    drawn again exactly, from the same initial noise. 0 draws no scouts."""
    num_inference_steps: int = limit(0, least=0, most=10_000)
    """Denoising steps of a scout; fewer than `sampling.num_inference_steps`."""


@dataclass
class DataConfig:
    train: str = "???"
    """Prompts: a `.txt`, `.jsonl`, `.json`, `.csv` or `.parquet` file, a folder that `datasets` has saved, a folder of
    images with captions, or `hf://datasets/OWNER/NAME@COMMIT/SPLIT`."""
    eval: str | None = ""
    """Held-out prompts, in any of these forms; null or empty disables evaluation."""
    columns: dict[str, str | None] = field(default_factory=lambda: dict[str, str | None]())
    """Field of ours -> column of the data that it is taken from, such as `prompt: caption`; null leaves a field out."""
    cache: str = ""
    """Folder for images that tables hold as bytes, and for datasets of the Hub; empty is `~/.cache/unirl/data`. Where
    parts run on several machines, all of them must see it."""
    prompts_per_step: int = limit(16, least=1, most=10**6)
    """Distinct prompts per rollout."""
    samples_per_prompt: int = limit(8, least=1, most=10**6)
    """Samples per prompt: the group within which advantages are computed."""
    dynamic_sampling_rounds: int = limit(0, least=0)
    """Dynamic sampling (DAPO): how often a step may draw further prompts to replace zero-variance groups, which are
    dropped. 0 keeps every group and draws no more."""
    scouts: ScoutsConfig = field(default_factory=ScoutsConfig)
    """Cheap samples that choose which samples are drawn exactly."""
    shuffle: bool = True
    """Shuffle the prompts each epoch, from the run's seed."""
    prompt_key: str = "prompt"
    """Key that holds the prompts in a `.json` object."""


@dataclass
class AdvantageConfig:
    scope: str = one_of("group", "global", default="group")
    """Samples that the standard deviation is taken over: each `group`, or all of the rollout (`global`). For the mean
    see `center`."""
    center: str = one_of("group", "global", default="group")
    """Samples that the mean is taken over: each `group`, or all of the rollout (`global`)."""
    normalize: bool = True
    """Divide by the standard deviation."""
    ddof: int = one_of(0, 1, default=0)
    """0 for the population standard deviation, 1 for Bessel's correction."""
    eps: float = limit(1e-4, least=0)
    """Added to the standard deviation."""
    leave_one_out: bool = False
    """Subtract the mean of the other samples of the group (RLOO)."""
    clip: float | None = limit(5.0, above=0)
    """Largest absolute advantage; None disables clipping."""
    values: str = one_of("scores", "win-rate", "normal-scores", default="scores")
    """Values of each reward that advantages are computed from: its `scores`; its `win-rate`, the share of the other
    samples of its group that a sample beats, a tie counting half (Pref-GRPO); or the `normal-scores` of its ranks in
    the group. With ranks, tiny differences between scores are not blown up, and outliers do not decide alone."""
    keep_best: int = limit(0, least=0, most=10**6)
    """Train only on this many samples of each group with the highest advantages, and on `keep_worst` with the lowest;
    the others cost no forward. Advantages are computed over the whole group first. Both 0 keep all samples."""
    keep_worst: int = limit(0, least=0, most=10**6)
    """Samples of each group with the lowest advantages to train on, see `keep_best`."""
    combine: str = one_of(
        "sum-then-normalize", "normalize-then-sum", "normalize-sum-normalize", default="sum-then-normalize"
    )
    """How several rewards are combined: summed before advantages are computed, or after that of each. The last also
    whitens the sum over the rollout, so its scale does not grow with the number of rewards (GDPO)."""
    spread_penalty: float = limit(0.0, least=0)
    """Subtract this times the spread of the rewards of a sample, their weighted standard deviation, before advantages
    or from them as `combine` says: what the rewards of an ensemble disagree on earns less."""
    positive_factor: str = ""
    """Key of a reward, under `reward`, whose scores multiply the positive advantages. With a distance to the other
    samples of the prompt, good samples that differ from them gain more (GARDO). Without a score, a positive advantage
    becomes 0."""
    constant_reward: str = one_of("skip", "fail", default="skip")
    """When all samples of a step get the same reward and no advantage: `skip` the update and report it, or `fail`. They
    have advantages where an algorithm compares them with earlier samples, or adds something to the reward."""


@dataclass
class TrainConfig:
    updates_per_step: int = limit(1, least=1)
    """Optimizer steps per rollout: its samples are split into that many mini-batches."""
    micro_batch_size: int = limit(0, least=0)
    """Samples per forward and backward pass; 0 takes the whole mini-batch. Never changes the gradient."""
    micro_batch_tokens: int = limit(0, least=0)
    """Text: tokens per forward and backward pass, prompts included; replaces `micro_batch_size`. A longer sample gets a
    micro-batch to itself. 0 counts samples instead."""
    replay: str = one_of("auto", "stacked", "serial", default="auto")
    """`stacked` trains on all SDE steps (or drawn points) of a micro-batch in one forward and backward pass, `serial`
    on one after the other: the activations of one of them are in memory at a time, of all with losses that couple the
    steps of a sample. `auto`: serial on accelerators, stacked on the CPU. Never changes the gradient."""
    detach_negative: bool = False
    """Latents: the gradient goes through the positive branch of the guidance alone, as in flow_grpo's code; the others
    have forward passes of their own, of which nothing is kept. Another gradient, of the same loss."""
    packing: bool = True
    """Text: pack the samples of a micro-batch into one sequence without padding, where the model supports it. The
    numbers are the same."""
    old_log_probs: str = one_of("auto", "replay", "detached", "engine", default="auto")
    """Source of the old log-probs: `replay` recomputes them with the training model. `detached` saves that pass for the
    first update: its old log-probs are its new ones, detached. The numbers are the same, but `ratio_max_dev_first` is 0
    by construction. `auto`: `replay` in the first step of a run, which measures that ratio, and with a critic; else
    `detached`. `engine` takes the engine's, where the measured log-prob mismatch allows it; losses that take no
    log-probs of the rollout, such as AWM's, compute their own."""
    logp_mismatch_max: float | None = limit(None, least=0)
    """Largest log-prob mismatch allowed, |engine - recomputed|. None: for latents the algorithm's clip range; for text
    0.01 nats per token in fp32, or 1 where the model, the engine or the backend computes in 16 bits."""
    logp_mismatch_mean: float | None = limit(None, least=0)
    """Largest mean log-prob mismatch over a rollout. None: no bound for latents; for text 0.001 in fp32, or 0.05 in
    16 bits."""

    accelerations: ClassVar[Mapping[str, Acceleration]] = {
        "old_log_probs": Acceleration(scope="training", error={"detached": 0.0}),
        "detach_negative": Acceleration(scope="training", error=math.inf),
    }

    def detaches(self, *, critic: bool, progress: float = 1.0) -> bool:
        """Whether the first update's own forward pass gives its old log-probs; `auto` depends on the rest.

        critic: whether the algorithm trains one.  progress: fraction of the run that is done.
        """
        return self.old_log_probs == "detached" or (self.old_log_probs == "auto" and not critic and progress > 0.0)

    def replayed_share(self, *, critic: bool) -> float:
        """Fraction of the old log-probs that are recomputed before the first update, in a step that is not the first.

        critic: whether the algorithm trains one.
        """
        if self.old_log_probs == "engine":
            return 0.0
        return 1.0 - 1.0 / self.updates_per_step if self.detaches(critic=critic) else 1.0

    def is_serial(self, device: str) -> bool:
        """Whether steps are replayed one by one on a device such as `cuda:0`; `auto` counts as an accelerator."""
        return self.replay == "serial" or (self.replay == "auto" and device.partition(":")[0] != "cpu")


@dataclass
class EvalConfig:
    every: int = limit(0, least=0)
    """Steps between evaluations; 0 evaluates at the start and the end only. Without held-out data there are none."""
    num_prompts: int = limit(0, least=0)
    """Number of prompts to evaluate, in file order; 0 takes all."""
    samples_per_prompt: int = limit(1, least=1, most=10**6)
    """Samples per evaluated prompt."""
    policy: str = one_of("live", "ema", "lagged", "reference", default="live")
    """Weights to evaluate: `live`, `ema`, `lagged` or `reference`."""
    seed: int = limit(20_000, least=0, most=LARGEST_INT)
    """Seed of the evaluation noise, which is the same at every evaluation and separate from that of training."""
    sampling: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Overrides of `sampling` for evaluation, by stage where there are several. Unless set here, latent tracks use
    `kernel: euler`, `eta: 0` and `trajectory_dtype: float32`, text tracks `temperature: 0`."""
    threshold: float | None = None
    """Also report the fraction of samples whose reward is at least this value."""


@dataclass
class StageConfig:
    """One track of a rollout, in a recipe with several models or stages."""

    model: str = ""
    """Key of the model that generates it, under `model`; empty where there is one."""
    track: str = ""
    """Which track of a model with several; empty takes the one named like the stage, or the only one."""
    parent: str = ""
    """Stage whose completions, or images, this one is made from; empty takes the prompts."""
    instruction: str = ""
    """Text that goes with the image of a parent, `{prompt}` replaced by the prompt; empty is the prompt alone. In a
    track that continues from the stages above it, the user's words that come last."""
    marker: str = ""
    """Where its input begins in a text of the parent: behind the last of these words. A text without them, or with
    nothing behind them, is replaced by the prompt, and counted. Empty takes whole texts."""
    shows: list[str] = field(default_factory=lambda: list[str]())
    """Stages above the parent whose images it takes as well, where it does not continue from all of them anyway."""
    samples: int = limit(0, least=0, most=10**6)
    """Samples of each row of the parent stage. 0 is 1 below a parent, and data.samples_per_prompt without one."""
    group: str = one_of("parent", "prompt", default="parent")
    """Samples that advantages compare: those of one sample of the `parent`, or of one `prompt`."""
    credit: str = one_of("none", "mean", "max", "sum", "best", default="none")
    """Credit that a sample of the parent stage gets from the rewards of its samples here: none, their `mean`, `max` or
    `sum`, or that of the `best`, with the others left out of training."""
    unfinished: str = one_of("continue", "leave-out", "fail", default="continue")
    """Texts of the parent that are truncated, aborted or empty: `continue` from them like from others, `leave-out`
    (they get no samples here), or `fail`."""
    unfinished_credit: float | None = None
    """Credit of a text that was left out, in place of the rewards that it cannot have: a low one punishes thoughts that
    never end. null leaves it out of training as well."""
    reference: str = ""
    """Key of another model, under `model`, as the reference policy of its KL penalty: a frozen teacher. Empty takes the
    initial weights."""
    teachers: list[str] = field(default_factory=lambda: list[str]())
    """In place of `reference`, keys of several models: the reference policy of a sample is the one that the metadata
    `teacher` of its prompt names."""
    reference_guidance: float | None = limit(None, least=0)
    """Scale of classifier-free guidance of the reference policy alone, for a guided teacher of an unguided student;
    needs samples with negative conditions. null takes the student's guidance in a KL penalty, and none in a loss on
    unguided velocities."""
    weight: float = limit(1.0, above=0)
    """Weight of this stage's loss beside those of other stages of the same model."""
    advantage: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Overrides of `advantage` for this stage."""
    train: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Overrides of `train` for this stage."""


@dataclass
class RecipeConfig:
    """A whole recipe. A part's section has the fields of the chosen part's config dataclass."""

    run: RunConfig = field(default_factory=RunConfig)
    """The run itself: length, seed, folder, checkpoints."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompt files, and how many prompts a step takes."""
    sampling: Any = None
    """How each track is sampled."""
    model: Any = None
    """The model to train."""
    engine: Any = None
    """The engine that generates rollouts."""
    backend: Any = None
    """The training backend: optimizer, sharding, checkpoints."""
    algorithm: Any = None
    """The RL algorithm and its loss."""
    environment: Any = None
    """The environment that a text track talks with; optional."""
    stages: dict[str, StageConfig] = field(default_factory=lambda: dict[str, StageConfig]())
    """Tracks of a rollout by name, where several models or stages work together; by default those of the model."""
    launcher: Any = None
    """Where the parts run; in this process by default."""
    transport: Any = None
    """How tensors move between workers; by default the launcher's own transport."""
    reward: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Rewards by name; the policy is trained on their weighted sum."""
    tracker: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Trackers by name; optional."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """How rewards become advantages."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Mini-batches, micro-batches and old log-probs of the update."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation on held-out prompts."""
