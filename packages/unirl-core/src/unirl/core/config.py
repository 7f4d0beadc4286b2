"""The schema of a recipe: what every part's config inherits, and the sections that belong to no part.

Plain dataclasses, used by Hydra as structured configs. Facts of a model are not here; they stay on its spec.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "AdvantageConfig",
    "BackendConfig",
    "DataConfig",
    "EvalConfig",
    "LatentSamplingConfig",
    "PartConfig",
    "RecipeConfig",
    "RewardConfig",
    "RunConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "SdeStepsConfig",
    "TextSamplingConfig",
    "TrainConfig",
]


@dataclass
class PartConfig:
    """What the config of every part has. A plugin's config dataclass inherits it."""

    use: str = ""
    """Short name of the part. Set by choosing it (`engine=trainside`), never by hand."""


@dataclass
class RewardConfig(PartConfig):
    """What the config of every reward has."""

    weight: float = 1.0
    """Factor of this reward in the combined one."""


@dataclass
class BackendConfig(PartConfig):
    """What the config of every backend has: what trains, and AdamW's settings."""

    trains: str = "lora"
    """`lora` trains adapters, `full` all weights. What trains is kept in fp32 whatever the model's dtype."""
    lr: float = 1e-4
    """Learning rate."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay of Adam's two averages."""
    eps: float = 1e-8
    """Added to the root of Adam's second average."""
    weight_decay: float = 0.0
    """Decoupled decay: each step takes lr x weight_decay of every weight."""
    max_grad_norm: float | None = 1.0
    """Bound of the global gradient norm; None clips nothing."""


@dataclass
class RunConfig:
    name: str = ""
    """Name of the run; empty takes the recipe's name."""
    steps: int = 100
    """Rollout-to-update rounds."""
    stop_at: int = 0
    """Stop, resumable, once this many steps are done; 0 goes on to the end."""
    seed: int = 0
    """Seed of all counter-based noise, the data order and every random choice."""
    dir: str = ""
    """Run folder; empty makes `runs/<name>-<time>`."""
    save_every: int = 0
    """Steps between checkpoints; 0 saves at the end only. Ctrl-C saves as well."""
    keep: int = 2
    """Checkpoints kept, newest first; 0 keeps all."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    media_every: int = 10
    """Steps between training samples, images or texts, sent to the trackers; 0 sends none."""
    threads: int = 0
    """CPU threads of torch; 0 leaves torch's own choice."""
    stream_groups: int = 0
    """Groups of a piece: each piece is scored while the next one is generated. 0 generates a whole rollout first."""
    rollout_ahead: int = 0
    """Rollouts at most that are generated and scored ahead of the one that is trained on, with weights from as many
    steps before; 0 makes each rollout with the newest weights."""


@dataclass
class DataConfig:
    train: str = "???"
    """Prompt file, `.txt`, `.jsonl` or `.json`."""
    eval: str = ""
    """Held-out prompt file; empty evaluates nothing."""
    prompts_per_step: int = 16
    """Distinct prompts of one rollout."""
    samples_per_prompt: int = 8
    """Samples of one prompt: the group that advantages compare."""
    refill_rounds: int = 0
    """Rounds of further prompts that a step may draw in place of groups whose samples all got one reward; those groups
    are then left out. 0 draws none and keeps all."""
    shuffle: bool = True
    """Draw a new order each epoch, from the run's seed."""
    prompt_key: str = "prompt"
    """Key that holds the prompts of a `.json` object."""


@dataclass
class ScheduleConfig:
    variant: str = "exact"
    """`exact` shifts once; `diffusers-default` repeats diffusers' double shift, for paper reproduction."""
    shift: float | None = None
    """Static shift; None takes the checkpoint's scheduler config."""


@dataclass
class SdeStepsConfig:
    """Which denoise steps are stochastic, and so trained on."""

    mode: str = "all"
    """`all`, `fraction`, `random`, `window`, `fixed` or `none`."""
    first: float = 0.0
    """Start of the pool, as a fraction of the steps."""
    last: float = 1.0
    """End of the pool (exclusive), as a fraction of the steps."""
    count: int | None = None
    """Steps drawn from the pool in mode `random`."""
    steps: list[int] = field(default_factory=lambda: list[int]())
    """The steps of mode `fixed`, counted from 0."""
    window: int = 4
    """Width of the sliding window."""
    strategy: str = "progressive"
    """`progressive` or `random` motion of the window."""
    move_every: int | None = None
    """Steps of the run between moves of the window; None is 25 for a progressive window, 1 for a random one."""
    overlap: int = 0
    """Steps that two neighbouring windows share."""
    roll_back: bool = False
    """Start over after the last window instead of staying there."""
    per_group: bool = False
    """Draw for each group of its own; a group always shares its steps."""


@dataclass
class LatentSamplingConfig:
    """How a latent track is sampled."""

    kind: str = "latent"
    """Kind of the track that these settings are for."""
    steps: int = 10
    """Denoise steps."""
    height: int = 512
    """Pixels."""
    width: int = 512
    """Pixels."""
    frames: int = 1
    """Frames of a video; 1 for images."""
    guidance_scale: float = 1.0
    """Classifier-free guidance; 1 is none and needs no negative prompt."""
    guidance_mode: str = "batched"
    """`batched`, `two-pass` or `norm-corrected`."""
    negative_prompt: str = ""
    """What guidance leads away from, the same for all prompts."""
    kernel: str = "flow-sde"
    """SDE kernel: `flow-sde`, `dance-sde`, `cps`, `ddim-eta`, `euler`, `dpm2`."""
    eta: float = 0.7
    """Noise level of the kernel; 0 is deterministic."""
    kernel_options: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Further arguments of the kernel, such as `constants: false` for cps."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """How the sigmas are made."""
    sde: SdeStepsConfig = field(default_factory=SdeStepsConfig)
    """Which steps are stochastic."""
    same_initial_noise: bool = False
    """Give all samples of a group the same initial noise."""
    max_sequence_length: int = 256
    """Text tokens of the longest encoder."""
    decode: bool = True
    """Decode the final latents to media for the rewards."""


@dataclass
class TextSamplingConfig:
    """How a text track is sampled."""

    kind: str = "text"
    """Kind of the track that these settings are for."""
    temperature: float = 1.0
    """Divides the logits, in sampling and in training; 0 takes the likeliest token, and has no ratio to train on."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that reach this probability; below 1 for evaluation only, because the log-probs
    that train are those of all tokens."""
    top_k: int = 0
    """Sample from that many of the likeliest tokens, for evaluation only; 0 takes all."""
    max_new_tokens: int = 1024
    """Longest text; one that reaches it has the status TRUNCATED."""
    max_prompt_tokens: int = 0
    """Longest prompt, in tokens; a longer one is an error, for cutting it would ask another question. 0 is no bound."""
    stop: list[str] = field(default_factory=lambda: list[str]())
    """Strings that end a text; they are generated and trained on, and are no part of what rewards see."""
    stop_token_ids: list[int] = field(default_factory=lambda: list[int]())
    """Tokens that end a text, besides those of the model."""
    chat: bool = True
    """Put each prompt in the chat template of the tokenizer; False takes it as it stands."""
    system_prompt: str = ""
    """What the chat template says before the prompt; empty says nothing."""
    thinking: bool | None = None
    """Switch of chat templates that have one, `enable_thinking`; None is the template's own choice."""


SamplingConfig = LatentSamplingConfig | TextSamplingConfig
"""How a track is sampled."""


@dataclass
class AdvantageConfig:
    scope: str = "group"
    """Where the standard deviation comes from: `group` or `global`. The mean is always the group's with
    `group` centring, see `center`."""
    center: str = "group"
    """Where the mean comes from: `group` or `global`."""
    normalize: bool = True
    """Divide by the standard deviation."""
    ddof: int = 0
    """0 population, 1 Bessel."""
    eps: float = 1e-4
    """Added to the standard deviation."""
    leave_one_out: bool = False
    """Compare with the mean of the other samples of the group (RLOO)."""
    clip: float | None = 5.0
    """Bound of the absolute advantage; None is none."""
    combine: str = "sum-then-normalize"
    """Several rewards: `sum-then-normalize` or `normalize-then-sum`."""
    constant_reward: str = "fail"
    """When every sample of a step has one reward: `fail`, or `skip` the update and count it."""


@dataclass
class TrainConfig:
    updates_per_step: int = 1
    """Optimizer steps per rollout: its rows are split in that many mini-batches."""
    micro_batch: int = 0
    """Samples per forward and backward; 0 takes a whole mini-batch. Never changes the gradient."""
    micro_batch_tokens: int = 0
    """Text: tokens, prompts included, per forward and backward, in place of `micro_batch`; a longer sample goes alone.
    0 counts samples."""
    replay: str = "stacked"
    """`stacked` runs all SDE steps of a micro-batch in one forward, `serial` one after the other."""
    packing: bool = True
    """Text: put the samples of a micro-batch after each other without padding, where the model can. The numbers are the
    same."""
    old_log_probs: str = "replay"
    """Where the old log-probs come from: `replay`, or `engine` where the measured gap allows it."""
    logp_gap_max: float | None = None
    """Largest |log-prob of the engine - of the replay| allowed. None: of latents the clip range of the algorithm; of
    texts 0.01 nats per token in fp32, and 1 where the model, the engine or the backend computes in 16 bits."""
    logp_gap_mean: float | None = None
    """Largest mean of it over a rollout. None: of latents no bound; of texts 0.001 in fp32, and 0.05 in 16 bits."""


@dataclass
class EvalConfig:
    every: int = 0
    """Steps between evaluations; 0 evaluates at the start and the end only when there is held-out data."""
    num_prompts: int = 0
    """Prompts evaluated, in file order; 0 takes all."""
    samples_per_prompt: int = 1
    """Samples of each evaluated prompt."""
    policy: str = "live"
    """Weights that are evaluated: `live`, `ema`, `lagged` or `reference`."""
    seed: int = 20_000
    """Evaluation noise, the same every time, apart from that of training."""
    sampling: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Keys of `sampling` that evaluation changes. Unless they are named here, latent tracks take `kernel: euler` and
    `eta: 0`, text tracks `temperature: 0`."""
    threshold: float | None = None
    """Also report the share of samples whose reward reaches this value."""


@dataclass
class RecipeConfig:
    """A whole recipe. The part sections take the config dataclass of the part that is chosen."""

    run: RunConfig = field(default_factory=RunConfig)
    """The run itself: length, seed, folder, checkpoints."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts, and how many of them a step takes."""
    sampling: Any = None
    """How the model's tracks are sampled."""
    model: Any = None
    """The model that trains."""
    engine: Any = None
    """The engine that makes rollouts."""
    backend: Any = None
    """The backend that trains."""
    algorithm: Any = None
    """The loss and what it needs."""
    launcher: Any = None
    """Where the parts run: in this process unless one is chosen."""
    transport: Any = None
    """How tensors go from worker to worker; launchers with workers have a way of their own unless one is chosen."""
    reward: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Rewards by name; their weighted sum counts."""
    tracker: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    """Trackers by name; none is needed."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """How rewards become advantages."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How a rollout is trained on."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation on held-out prompts."""
