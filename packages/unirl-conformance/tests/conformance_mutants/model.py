"""Models that are broken in one way each, next to the one that is well and its reference in NumPy."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.numpy import load_file as load_numpy
from torch import Tensor, nn
from unirl.conformance.doubles import model as latent_model
from unirl.conformance.doubles.model import WorkbenchConfig, WorkbenchModel
from unirl.conformance.fixtures.latent_model import NEGATIVE
from unirl.conformance.reference import ReferenceRun
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.spec import Miniature, ModelSpec
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig

from conformance_mutants import model_text
from conformance_mutants.mutant import Mutant

WELL = dataclasses.replace(latent_model.SPEC, build=f"{__name__}:build", parity=f"{__name__}:parity")
TINY = WELL.tiny
assert TINY is not None


def parity(folder: Path, *, prompts: Sequence[str], sampling: LatentSamplingConfig, initial: Tensor) -> ReferenceRun:
    """The workbench model's docstrings in fp64 NumPy, walked down evenly spaced sigmas by Euler steps, and decoded."""
    net = {name: value.astype(np.float64) for name, value in load_numpy(folder / latent_model.WEIGHTS_FILE).items()}
    sigmas = np.linspace(1, 0, sampling.num_inference_steps + 1)
    x = initial.double().cpu().numpy()

    def linear(name: str, value: Any) -> Any:
        return value @ net[f"{name}.weight"].T + net[f"{name}.bias"]

    def velocity(texts: Sequence[str], sigma: float) -> Any:
        tokens = x.reshape(*x.shape[:2], -1).swapaxes(1, 2)
        rows = np.array([[*words(text), sigma] for text in texts])
        hidden = np.concatenate([tokens, np.repeat(rows[:, None], tokens.shape[1], axis=1)], axis=2)
        hidden = linear("enter", hidden)
        for block in ("blocks.0", "blocks.1"):
            mixed = hidden + hidden.mean(axis=1, keepdims=True)
            hidden = hidden + linear(f"{block}.down", np.tanh(linear(f"{block}.up", mixed)))
        return linear("leave", hidden).swapaxes(1, 2).reshape(x.shape)

    for now, after in itertools.pairwise(sigmas):
        v = velocity(prompts, now)
        if sampling.guidance_scale != 1.0:
            away = velocity([sampling.negative_prompt] * len(prompts), now)
            v = away + sampling.guidance_scale * (v - away)
        x = x + (after - now) * v
    pixels = (1 / (1 + np.exp(-x[:, :3]))).repeat(latent_model.FACTOR, axis=2).repeat(latent_model.FACTOR, axis=3)
    return ReferenceRun(
        sigmas=torch.from_numpy(sigmas).float(),
        final=torch.from_numpy(x).float(),
        media=torch.from_numpy(pixels).float(),
    )


def words(prompt: str) -> list[float]:
    digest = hashlib.blake2b(prompt.encode(), digest_size=2 * latent_model.TEXT).digest()
    return [value / 32767.5 - 1 for value in np.frombuffer(digest, dtype="<u2")]


class CarriesAnotherSpec(WorkbenchModel):
    @property
    def spec(self) -> ModelSpec:
        return dataclasses.replace(self._spec, wrap_blocks=())

    @spec.setter
    def spec(self, spec: ModelSpec) -> None:
        self._spec = spec


class LeavesTheEncoderLoose(WorkbenchModel):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.parts = {"encoder": nn.Linear(2, 2)}


class ForgetsATensor(WorkbenchModel):
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        super().fill(dict(list(tensors.items())[:-1]))


class RoundsItsValues(WorkbenchModel):
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        self.values = {name: value.bfloat16() for name, value in self.values.items()}
        super().fill(tensors)


class IsNotLazy(WorkbenchModel):
    def __init__(self, *, lazy: bool = False, **settings: Any) -> None:
        super().__init__(**settings)


class Encodes(WorkbenchModel):
    """A model whose conditions are changed after the fact."""

    def changed(self, conditions: dict[str, Tensor], prompts: Sequence[str]) -> dict[str, Tensor]:
        raise NotImplementedError

    def encode(self, inputs: Inputs, **settings: Any) -> dict[str, Tensor]:
        return self.changed(super().encode(inputs, **settings), inputs.texts)


class KeepsTheEncodersGradient(Encodes):
    def changed(self, conditions: dict[str, Tensor], prompts: Sequence[str]) -> dict[str, Tensor]:
        return {name: value.requires_grad_() for name, value in conditions.items()}


class CountsRepeatedPrompts(Encodes):
    def changed(self, conditions: dict[str, Tensor], prompts: Sequence[str]) -> dict[str, Tensor]:
        before = [list(prompts[:row]).count(prompt) for row, prompt in enumerate(prompts)]
        return {name: value + 1e-6 * torch.tensor(before)[:, None] for name, value in conditions.items()}


class WidensEmptyPrompts(Encodes):
    def changed(self, conditions: dict[str, Tensor], prompts: Sequence[str]) -> dict[str, Tensor]:
        return conditions if any(prompts) else {name: value.double() for name, value in conditions.items()}


class DropsItsSecondCondition(Encodes):
    def changed(self, conditions: dict[str, Tensor], prompts: Sequence[str]) -> dict[str, Tensor]:
        return {**conditions, "pooled": conditions["text"].flip(1)}


class Misreads(WorkbenchModel):
    """A model that takes some prompts for others."""

    taken_for: ClassVar[Mapping[str, str]]

    def encode(self, inputs: Inputs, **settings: Any) -> dict[str, Tensor]:
        texts = [self.taken_for.get(text, text) for text in inputs.texts]
        return super().encode(Inputs.of_texts(texts), **settings)


class MissesThePlural(Misreads):
    taken_for: ClassVar = {"a dogs": "a dog"}


class MisreadsTheNegative(Misreads):
    taken_for: ClassVar = {NEGATIVE: ""}


class Bends(WorkbenchModel):
    """A model whose velocity is changed after the fact."""

    def bent(self, v: Tensor, sigma: Tensor) -> Tensor:
        raise NotImplementedError

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        return self.bent(super().velocity(x, sigma, conditions), sigma)


class GivesFp64(Bends):
    def bent(self, v: Tensor, sigma: Tensor) -> Tensor:
        return v.double()


class LetsRowsMeet(Bends):
    """Where rows are at different sigmas, each gets a trace of the others."""

    def bent(self, v: Tensor, sigma: Tensor) -> Tensor:
        return v if len(sigma.unique()) == 1 else v + 4e-5 * v.mean(dim=0)


class BendsWithGradients(Bends):
    def bent(self, v: Tensor, sigma: Tensor) -> Tensor:
        return v * (1 + 2e-5 * torch.is_grad_enabled())


class RoundsLargeBatches(Bends):
    def bent(self, v: Tensor, sigma: Tensor) -> Tensor:
        return v if len(v) <= 8 else v.bfloat16().float()


class DividesItsGradient(Bends):
    def bent(self, v: Tensor, sigma: Tensor) -> Tensor:
        return v.detach() + (v - v.detach()) / len(v)


class IsTooFast(Bends):
    def bent(self, v: Tensor, sigma: Tensor) -> Tensor:
        return 1.001 * v


class RemembersItsLastAnswer(WorkbenchModel):
    """The velocity of the last call again, where sigma and conditions are those of the last call."""

    last: tuple[Tensor, Tensor, Tensor] | None = None

    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            return super().velocity(x, sigma, conditions)
        text = conditions["text"]
        if self.last is None or not (torch.equal(self.last[0], sigma) and torch.equal(self.last[1], text)):
            self.last = sigma, text, super().velocity(x, sigma, conditions)
        return self.last[2]


class RoundsSigma(WorkbenchModel):
    def velocity(self, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
        return super().velocity(x, (100 * sigma).round() / 100, conditions)


class MakesAtMost20Steps(WorkbenchModel):
    def schedule(self, sampling: LatentSamplingConfig) -> Tensor:
        return super().schedule(
            dataclasses.replace(sampling, num_inference_steps=min(sampling.num_inference_steps, 20))
        )


class MovesItsSchedule(WorkbenchModel):
    def schedule(self, sampling: LatentSamplingConfig) -> Tensor:
        sigmas = super().schedule(sampling)
        return sigmas + 1e-5 * sigmas * (1 - sigmas)


class RoundsTheHeight(WorkbenchModel):
    def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, int, int]:
        return super().latent_shape(dataclasses.replace(sampling, height=sampling.height // 8 * 8))


class TurnsItsImages(WorkbenchModel):
    def decode(self, latents: Tensor) -> Tensor:
        return super().decode(latents).transpose(2, 3)


class LeavesItsImagesUnclamped(WorkbenchModel):
    def decode(self, latents: Tensor) -> Tensor:
        return 1.2 * super().decode(latents) - 0.1


class MirrorsItsImages(WorkbenchModel):
    def decode(self, latents: Tensor) -> Tensor:
        return super().decode(latents).flip(3)


class ShiftsItsLatents(WorkbenchModel):
    """As one does that leaves the shift of its VAE out."""

    def decode(self, latents: Tensor) -> Tensor:
        return super().decode(latents - 0.0609)


class UnpacksItsLatentsByColumns(WorkbenchModel):
    def decode(self, latents: Tensor) -> Tensor:
        return super().decode(latents.transpose(2, 3).reshape(latents.shape))


class DecodesWithoutGradient(WorkbenchModel):
    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        return super().decode(latents)


class DetachesALayer(WorkbenchModel):
    class Detached(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch calls it
            return nn.functional.linear(input, self.weight.detach(), self.bias)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        first = self.net.blocks[0]
        assert isinstance(first, latent_model.Block)
        first.down.__class__ = self.Detached


def write_large(folder: Path, *, seed: int) -> None:
    latent_model.write(folder, seed=seed)
    with (folder / "vocabulary.bin").open("wb") as file:
        file.truncate(21_000_000)


def write_seedless(folder: Path, *, seed: int) -> None:
    latent_model.write(folder, seed=0)


@dataclass(frozen=True)
class Broken:
    claim: str
    name: str
    broken: str
    model: type[WorkbenchModel] = WorkbenchModel
    spec: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()


def writing(write: Callable[..., None]) -> dict[str, Miniature]:
    return {"tiny": dataclasses.replace(TINY, write=f"{__name__}:{write.__name__}")}


FINAL, GUIDED = (f"{name}-latents-are-those-of-the-reference-pipeline" for name in ("final", "guided"))
DECODED = "decoded-media-are-those-of-the-reference-pipeline"
ROW_BY_ROW = "gradient-does-not-depend-on-batching"
# fmt: off
BROKEN = (
    Broken("miniature-is-small-and-quick", "large", "writes 21 MB", spec=writing(write_large)),
    Broken("miniature-is-the-same-bytes-for-the-same-seed", "seedless", "ignores the seed", spec=writing(write_seedless)),
    Broken("model-follows-its-config", "other-spec", "carries another spec", CarriesAnotherSpec),
    Broken("only-the-named-module-trains", "loose", "leaves its encoder unfrozen", LeavesTheEncoderLoose),
    Broken("lora-targets-match-what-the-miniature-promises", "no-such-layer", "names a target that no layer has",
           spec={"lora_targets": ("up", "down", "gate")}),
    Broken("lora-targets-match-what-the-miniature-promises", "miscounts", "promises one LoRA layer too many",
           spec={"tiny": dataclasses.replace(TINY, lora_layers=5)}),
    Broken("wrap-blocks-match-what-the-miniature-promises", "no-such-block", "names a class that no block has",
           spec={"wrap_blocks": ("Block", "Attention")}),
    Broken("a-lazy-build-is-filled-with-the-weights-of-an-eager-one", "forgets-a-tensor", "leaves a tensor empty",
           ForgetsATensor),
    Broken("a-lazy-build-is-filled-with-the-weights-of-an-eager-one", "rounds-values", "fills in values of 16 bits",
           RoundsItsValues),
    Broken("a-lazy-build-is-filled-with-the-weights-of-an-eager-one", "not-lazy", "has its values at once", IsNotLazy),
    Broken("conditions-have-a-row-for-each-prompt", "keeps-gradient", "gives conditions with a gradient",
           KeepsTheEncodersGradient),
    Broken("different-prompts-give-different-conditions", "no-plural", "drops the last letter of a prompt", MissesThePlural),
    Broken("conditions-do-not-depend-on-the-batch", "counts", "moves repeated prompts",
           CountsRepeatedPrompts),
    Broken("negative-conditions-have-the-shapes-of-positive-ones", "widens", "encodes the empty prompt in fp64",
           WidensEmptyPrompts),
    Broken("velocity-is-fp32-of-the-shape-of-x", "fp64", "gives fp64", GivesFp64),
    Broken("velocity-depends-on-every-element-of-x", "remembers", "answers from a cache that forgets x",
           RemembersItsLastAnswer),
    Broken("velocity-follows-sigma-without-rounding", "rounds-sigma", "rounds sigma to hundredths", RoundsSigma),
    Broken("velocity-follows-every-condition", "half-deaf", "drops one of its conditions", DropsItsSecondCondition),
    Broken("batch-rows-are-independent", "rows-meet", "mixes a trace of other rows in", LetsRowsMeet),
    Broken("schedule-falls-to-0-in-the-requested-steps", "20-steps", "makes at most 20 steps", MakesAtMost20Steps),
    Broken("media-has-the-requested-size", "turned", "swaps height and width", TurnsItsImages, also=(DECODED,)),
    Broken("media-lies-between-0-and-1", "unclamped", "does not clamp its pixels", LeavesItsImagesUnclamped,
           also=(DECODED,)),
    Broken("sizes-that-do-not-fit-are-refused", "rounds-height", "rounds the height down", RoundsTheHeight),
    Broken("decoder-keeps-the-gradient", "no-gradient", "decodes without gradient", DecodesWithoutGradient),
    Broken("own-sample-replays-at-ratio-1", "grad-mode", "computes otherwise where gradients are on", BendsWithGradients),
    # Another arithmetic of larger batches is another gradient of theirs.
    Broken("stacked-replay-agrees-with-the-rollout", "rounds-batches", "takes large batches in bf16", RoundsLargeBatches,
           also=(ROW_BY_ROW,)),
    Broken(ROW_BY_ROW, "divides", "divides its gradient by the rows of a batch", DividesItsGradient),
    Broken("gradient-reaches-every-layer-that-lora-adapts", "detached", "detaches a layer", DetachesALayer),
    Broken("gradient-reaches-every-layer-that-lora-adapts", "not-idle", "calls a layer idle that is not",
           spec={"tiny": dataclasses.replace(TINY, idle_layers=("blocks.1.up",))}),
    Broken("schedule-is-that-of-the-reference-pipeline", "moved-schedule", "moves its sigmas", MovesItsSchedule),
    # What is wrong without guidance is wrong with it.
    Broken(FINAL, "too-fast", "is a tenth of a percent too fast", IsTooFast, also=(GUIDED,)),
    Broken(GUIDED, "misread-negative", "drops the negative prompt", MisreadsTheNegative),
    Broken("schedule-is-that-of-the-reference-pipeline", "no-parity", "names no reference run", spec={"parity": ""},
           also=(FINAL, GUIDED, DECODED)),
    Broken(DECODED, "mirrored", "mirrors its images", MirrorsItsImages),
    Broken(DECODED, "no-vae-shift", "leaves out the shift of the VAE's latents", ShiftsItsLatents),
    Broken(DECODED, "columns-first", "unpacks its latents by columns", UnpacksItsLatentsByColumns),
)
# fmt: on
MUTANTS = [
    *(Mutant(claim=one.claim, name=one.name, breaks=one.broken, also=one.also) for one in BROKEN),
    *model_text.MUTANTS,
]
SPECS = {"workbench": WELL, **{one.name: dataclasses.replace(WELL, name=one.name, **one.spec) for one in BROKEN}}


def build(config: WorkbenchConfig, *, device: Any, lazy: bool = False) -> WorkbenchModel:
    """The model that the config's `use` names."""
    kind = {one.name: one.model for one in BROKEN}.get(config.use, WorkbenchModel)
    model = latent_model.load(kind(device=device, lazy=lazy), config)
    model.spec = SPECS[config.use]
    return model


def catalog() -> Catalog:
    well = [WELL, model_text.WELL]
    specs = [*SPECS.values(), *model_text.SPECS.values()]
    broken = [spec for spec in specs if spec not in well]
    return Catalog.of(
        {
            "unirl-well": SimpleNamespace(unirl_models=hookimpl(lambda: well)),
            "unirl-mutants": SimpleNamespace(unirl_models=hookimpl(lambda: broken)),
        }
    )
