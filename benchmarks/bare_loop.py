"""Flow-GRPO on the quickstart's checkpoint, hand-written in one file: the baseline for UniRL's overhead.

    python benchmarks/bare_loop.py --steps 80 --seed 0

Plain PyTorch on the components of diffusers' pipeline. From UniRL it takes only the checkpoint, the prompts and the
rule that scores images. Formulas: Flow-GRPO, arXiv 2505.05470.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor
from unirl.quickstart import checkpoint_path, prompts_path
from unirl.rewards.rules.shapes_reading import read_shapes
from unirl.rewards.rules.shapes_world import COLORS, PLACES, SHAPES

LORA_TARGETS = [
    f"attn.{name}"
    for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
]


@dataclass
class Settings:
    checkpoint: str = ""
    """Folder of another checkpoint in that layout; empty is the quickstart's."""
    trains: str = "full"
    """`full` or `lora`."""
    learning_rate: float = 1e-4
    weight_decay: float = 1e-4
    lora_rank: int = 16
    lora_alpha: int = 32
    prompts_per_step: int = 16
    samples_per_prompt: int = 12
    denoise_steps: int = 10
    sde_steps: tuple[int, ...] = (0, 1, 2, 3, 4)
    eta: float = 0.7
    clip_range: float = 1e-3
    advantage_clip: float = 5.0
    updates_per_step: int = 2
    max_grad_norm: float = 1.0
    text_tokens: int = 8
    decode_batch: int = 32
    eval_samples: int = 512
    eval_every: int = 0
    """Steps between evaluations; 0 evaluates before and after."""
    seed: int = 0


@dataclass
class StepRecord:
    """One step: seconds of its phases, and metrics."""

    step: int
    seconds: dict[str, float]
    reward_mean: float
    perfect: float
    clip_fraction: float
    ratio_gap: float
    """Maximum |ratio - 1| in the first update: 0 when rollout and replay agree."""
    eval: dict[str, float] = field(default_factory=dict)


@dataclass
class Transition:
    """One stochastic step of the sampler, for all samples."""

    index: int
    x: Tensor
    x_next: Tensor
    log_prob: Tensor


class BareLoop:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        torch.manual_seed(settings.seed)
        folder = settings.checkpoint or checkpoint_path()
        pipeline = StableDiffusion3Pipeline.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        self.vae, self.transformer = pipeline.vae, pipeline.transformer
        self.transformer.eval()
        self.vae.requires_grad_(False)
        if settings.trains == "lora":
            self._add_lora()
        self.parameters = [p for p in self.transformer.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, settings.learning_rate, weight_decay=settings.weight_decay)
        self.train_prompts = _read_prompts("train")
        self.held_out_prompts = _read_prompts("heldout")
        self.embeddings = self._encode(pipeline, [*self.train_prompts, *self.held_out_prompts])
        steps = settings.denoise_steps
        shift = pipeline.scheduler.config.shift
        linear = torch.linspace(1, 0, steps + 1)
        self.sigmas = shift * linear / (1 + (shift - 1) * linear)
        self.generator = torch.Generator().manual_seed(settings.seed)

    def _add_lora(self) -> None:
        from peft import LoraConfig

        self.transformer.requires_grad_(False)
        self.transformer.add_adapter(
            LoraConfig(
                r=self.settings.lora_rank,
                lora_alpha=self.settings.lora_alpha,
                init_lora_weights="gaussian",
                target_modules=LORA_TARGETS,
            )
        )

    @torch.no_grad()
    def _encode(self, pipeline: StableDiffusion3Pipeline, prompts: list[dict]) -> dict[str, tuple[Tensor, Tensor]]:
        """Embeddings of every caption, encoded once: the text encoders are frozen."""
        captions = [prompt["prompt"] for prompt in prompts]
        embeds, _, pooled, _ = pipeline.encode_prompt(
            captions,
            None,
            None,
            do_classifier_free_guidance=False,
            max_sequence_length=self.settings.text_tokens,
        )
        return {caption: (embeds[i], pooled[i]) for i, caption in enumerate(captions)}

    def _conditions(self, prompts: list[dict]) -> tuple[Tensor, Tensor]:
        rows = [self.embeddings[prompt["prompt"]] for prompt in prompts]
        return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])

    def _velocity(self, x: Tensor, index: int, conditions: tuple[Tensor, Tensor]) -> Tensor:
        return self.transformer(
            hidden_states=x,
            timestep=(self.sigmas[index] * 1000).expand(len(x)),
            encoder_hidden_states=conditions[0],
            pooled_projections=conditions[1],
            return_dict=False,
        )[0]

    def _sde_step(self, x: Tensor, velocity: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the Flow-SDE transition, equation 9 of the paper."""
        sigma, dt = self.sigmas[index], self.sigmas[index + 1] - self.sigmas[index]
        # At sigma 1 the noise would be infinite; the next sigma replaces it, as in the paper's code.
        below_one = self.sigmas[1] if index == 0 else sigma
        g_squared = self.settings.eta**2 * sigma / (1 - below_one)
        mean = x * (1 + g_squared / (2 * sigma) * dt)
        mean = mean + velocity * (1 + g_squared * (1 - sigma) / (2 * sigma)) * dt
        return mean, torch.sqrt(g_squared * -dt)

    @torch.no_grad()
    def sample(
        self, prompts: list[dict], *, sde_steps: tuple[int, ...], generator: torch.Generator
    ) -> tuple[Tensor, list[Transition]]:
        """Final latents, and the transitions of the stochastic steps."""
        conditions = self._conditions(prompts)
        channels, size = self.transformer.config.in_channels, self.transformer.config.sample_size
        x = torch.randn(len(prompts), channels, size, size, generator=generator)
        transitions = []
        for index, (sigma, sigma_next) in enumerate(pairwise(self.sigmas)):
            velocity = self._velocity(x, index, conditions)
            if index in sde_steps:
                mean, std = self._sde_step(x, velocity, index)
                x_next = mean + std * torch.randn(x.shape, generator=generator)
                log_prob = gaussian_log_prob(x_next, mean, std)
                transitions.append(Transition(index=index, x=x, x_next=x_next, log_prob=log_prob))
            else:
                x_next = x + (sigma_next - sigma) * velocity
            x = x_next
        return x, transitions

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Images [N, 3, H, W] in [0, 1]."""
        latents = latents / self.vae.config.scaling_factor + self.vae.config.shift_factor
        chunks = latents.split(self.settings.decode_batch)
        return torch.cat([(self.vae.decode(chunk).sample / 2 + 0.5).clamp(0, 1) for chunk in chunks])

    def train_step(self, step: int) -> StepRecord:
        settings, clock = self.settings, Stopwatch()
        chosen = torch.randperm(len(self.train_prompts), generator=self.generator)[: settings.prompts_per_step]
        prompts = [self.train_prompts[i] for i in chosen.tolist() for _ in range(settings.samples_per_prompt)]
        latents, transitions = self.sample(prompts, sde_steps=settings.sde_steps, generator=self.generator)
        clock.lap("rollout")
        images = self.decode(latents)
        clock.lap("decode")
        scores, perfect = score(images, prompts)
        clock.lap("reward")
        groups = scores.view(settings.prompts_per_step, settings.samples_per_prompt)
        advantages = (groups - groups.mean(dim=1, keepdim=True)) / (groups.std(correction=0) + 1e-4)
        advantages = advantages.flatten().clamp(-settings.advantage_clip, settings.advantage_clip)
        clip_fraction, ratio_gap = self._update(prompts, transitions, advantages)
        clock.lap("train")
        return StepRecord(
            step=step,
            seconds=clock.laps,
            reward_mean=scores.mean().item(),
            perfect=perfect.mean().item(),
            clip_fraction=clip_fraction,
            ratio_gap=ratio_gap,
        )

    def _update(self, prompts: list[dict], transitions: list[Transition], advantages: Tensor) -> tuple[float, float]:
        settings = self.settings
        embeds, pooled = self._conditions(prompts)
        order = torch.randperm(len(prompts), generator=self.generator)
        clipped, ratio_gap = [], 0.0
        for update, rows in enumerate(order.chunk(settings.updates_per_step)):
            self.optimizer.zero_grad()
            advantage = advantages[rows]
            for transition in transitions:
                velocity = self._velocity(transition.x[rows], transition.index, (embeds[rows], pooled[rows]))
                mean, std = self._sde_step(transition.x[rows], velocity, transition.index)
                log_prob = gaussian_log_prob(transition.x_next[rows], mean, std)
                ratio = torch.exp(log_prob - transition.log_prob[rows])
                bounded = ratio.clamp(1 - settings.clip_range, 1 + settings.clip_range)
                loss = torch.maximum(-advantage * ratio, -advantage * bounded).mean() / len(transitions)
                loss.backward()
                distance = (ratio.detach() - 1).abs()
                clipped.append((distance > settings.clip_range).float().mean())
                if update == 0:
                    ratio_gap = max(ratio_gap, distance.max().item())
            torch.nn.utils.clip_grad_norm_(self.parameters, settings.max_grad_norm)
            self.optimizer.step()
        return torch.stack(clipped).mean().item(), ratio_gap

    def evaluate(self) -> dict[str, float]:
        """Mean score and fraction of perfect images on the held-out captions, from the same noise every time."""
        count = self.settings.eval_samples // len(self.held_out_prompts)
        prompts = self.held_out_prompts * count
        generator = torch.Generator().manual_seed(1_000_003)
        latents, _ = self.sample(prompts, sde_steps=(), generator=generator)
        scores, perfect = score(self.decode(latents), prompts)
        return {"score": scores.mean().item(), "perfect": perfect.mean().item()}


class Stopwatch:
    """Seconds between laps."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name], self._last = now - self._last, now


def gaussian_log_prob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """[B] log-density of x, averaged over the elements of a sample."""
    log_density = -((x - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)
    return log_density.mean(dim=tuple(range(1, x.ndim)))


def score(images: Tensor, prompts: list[dict]) -> tuple[Tensor, Tensor]:
    """Fraction of correct attributes of each image, and whether colour, shape and place are all correct."""
    seen = read_shapes(images)
    right = torch.zeros(len(images))
    for key, result, names in (
        ("color", seen.color, list(COLORS)),
        ("shape", seen.shape, list(SHAPES)),
        ("place", seen.place, list(PLACES)),
    ):
        right += result == torch.tensor([names.index(prompt["metadata"][key]) for prompt in prompts])
    return right / 3, (right == 3).float()


def run(steps: int, settings: Settings | None = None) -> list[StepRecord]:
    """Train for this many steps. The first and last record hold evaluations before and after."""
    settings = settings or Settings()
    loop = BareLoop(settings)
    before = loop.evaluate()
    records = []
    for step in range(steps):
        record = loop.train_step(step)
        if step == 0:
            record.eval = before
        if step == steps - 1 or (settings.eval_every and step and step % settings.eval_every == 0):
            record.eval = loop.evaluate()
        records.append(record)
    return records


def _read_prompts(split: str) -> list[dict]:
    with prompts_path(split).open() as file:
        return [json.loads(line) for line in file]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 leaves torch's own choice")
    for name, value in asdict(Settings()).items():
        if isinstance(value, (int, float, str)):
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = vars(parser.parse_args())
    steps, threads = args.pop("steps"), args.pop("threads")
    if threads:
        torch.set_num_threads(threads)
    started = time.perf_counter()
    for record in run(steps, Settings(**args)):
        timing = " ".join(f"{name} {seconds:.2f}" for name, seconds in record.seconds.items())
        print(
            f"{record.step:4d} reward {record.reward_mean:.3f} perfect {record.perfect:.3f} "
            f"clipped {record.clip_fraction:.2f} ratio gap {record.ratio_gap:.1e} | {timing} s {record.eval or ''}"
        )
    print(f"{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
