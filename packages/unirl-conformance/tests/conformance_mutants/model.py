"""Models with one fault each, next to healthy ones and their reference in NumPy."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.numpy import load_file as load_numpy
from torch import Tensor, nn
from unirl.conformance.doubles import tiny_decoder as text_model
from unirl.conformance.doubles import tiny_denoiser as latent_model
from unirl.conformance.fixtures.latent_model import NEGATIVE
from unirl.conformance.reference import ReferenceRun
from unirl.core.acceleration import NARROW, Acceleration
from unirl.core.plugins.catalog import Catalog
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig

from conformance_mutants import model_text
from conformance_mutants.changes import Change, returns, takes
from conformance_mutants.mutant import Mutant, builder, catalog_of, plugin, specs

HEALTHY = replace(latent_model.SPEC, build=f"{__name__}:build", parity=f"{__name__}:parity")
TINY = HEALTHY.tiny
assert TINY is not None
FINAL, GUIDED = (f"{name}-latents-are-those-of-the-reference-pipeline" for name in ("final", "guided"))
SCHEDULE, DECODED = (f"{name}-of-the-reference-pipeline" for name in ("schedule-is-that", "decoded-media-are-those"))
LORA, REACHED = "lora-targets-match-what-the-miniature-promises", "gradient-reaches-every-layer-that-lora-adapts"
FROZEN, INSIDE = "conditions-do-not-depend-on-what-trains", "trained-weights-are-used-inside-the-root-forward"
LAZY, BATCHING = "a-lazy-build-is-filled-with-the-weights-of-an-eager-one", "gradient-does-not-depend-on-batching"


def parity(folder: Path, *, prompts: Sequence[str], sampling: LatentSamplingConfig, initial: Tensor) -> ReferenceRun:
    """The tiny denoiser's docstrings in fp64 NumPy, walked down evenly spaced sigmas by Euler steps, and decoded."""
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


def write_large(folder: Path, *, seed: int) -> None:
    latent_model.write(folder, seed=seed)
    with (folder / "vocabulary.bin").open("wb") as file:
        file.truncate(21_000_000)


def write_seedless(folder: Path, *, seed: int) -> None:
    latent_model.write(folder, seed=0)


def conditions(change: Callable[[dict[str, Tensor], Sequence[str]], dict[str, Tensor]]) -> dict[str, Change]:
    """Other conditions. change: gets the healthy ones and the prompts."""
    return {"encode": lambda _, encode, inputs, **settings: change(encode(inputs, **settings), inputs.texts)}


def misreading(taken_for: Mapping[str, str]) -> dict[str, Change]:
    """Takes some prompts for others."""
    return {"encode": takes(lambda inputs: Inputs.of_texts([taken_for.get(text, text) for text in inputs.texts]))}


def velocities(change: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Change]:
    """Other velocities. change: gets the healthy ones and sigma."""
    return {"velocity": lambda _, velocity, x, sigma, conditions: change(velocity(x, sigma, conditions), sigma)}


def counted(conditions: dict[str, Tensor], prompts: Sequence[str]) -> dict[str, Tensor]:
    before = [list(prompts[:row]).count(prompt) for row, prompt in enumerate(prompts)]
    return {name: value + 1e-6 * torch.tensor(before)[:, None] for name, value in conditions.items()}


def wide_if_empty(conditions: dict[str, Tensor], prompts: Sequence[str]) -> dict[str, Tensor]:
    return conditions if any(prompts) else {name: value.double() for name, value in conditions.items()}


def remembers(model: Any, velocity: Any, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
    """The velocity of the last call again, where sigma and conditions are those of the last call."""
    if torch.is_grad_enabled():
        return velocity(x, sigma, conditions)
    text, last = conditions["text"], vars(model).get("last")
    if last is None or not (torch.equal(last[0], sigma) and torch.equal(last[1], text)):
        model.last = sigma, text, velocity(x, sigma, conditions)
    return model.last[2]


def rounds_values(model: Any, fill: Any, tensors: Mapping[str, Tensor]) -> None:
    model.values = {name: value.bfloat16() for name, value in model.values.items()}
    fill(tensors)


@torch.no_grad()
def with_hidden_states(model: Any, encode: Any, inputs: Inputs, **settings: Any) -> dict[str, Tensor]:
    """Adds a trace of the trained net's velocity, too small for any bound on numbers."""
    text = encode(inputs, **settings)["text"]
    states = model.net(text.new_zeros(len(text), latent_model.CHANNELS, 1, 1), text, text.new_ones(len(text)))
    return {"text": text + 1e-6 * states.flatten(1)[:, :1]}


def below_the_root(model: Any, _: Any, x: Tensor, sigma: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
    """Calls the layers of the net, one by one, and not the net."""
    return latent_model.Net.forward(model.net, x, conditions["text"], sigma).float()


def at_most_20_steps(sampling: LatentSamplingConfig) -> LatentSamplingConfig:
    return replace(sampling, num_inference_steps=min(sampling.num_inference_steps, 20))


def decodes_without_gradient(_: Any, decode: Any, latents: Tensor) -> Tensor:
    with torch.no_grad():
        return decode(latents)


def model(
    name: str, claim: str, breaks: str, changes: Mapping[str, Change] | None = None, *, spec: Any = None, **more: Any
) -> Mutant:
    stated = replace(HEALTHY, **{"build": latent_model.SPEC.build, **(spec or {})})
    return Mutant(name=name, claim=claim, breaks=breaks, changes=changes or {}, spec=stated, **more)


@dataclass
class NarrowConfig(latent_model.TinyDenoiserConfig):
    dtype: str = "float32"
    accelerations: ClassVar[Mapping[str, Acceleration]] = {"dtype": Acceleration(scope="both", error=NARROW)}


def build_narrow(config: NarrowConfig, **context: Any) -> Any:
    """In bf16 weights have 1 bit, where bf16 has 8."""
    model = latent_model.build(config, **context)
    if config.dtype == "bfloat16":
        for param in model.net.parameters():
            mantissa, exponent = torch.frexp(param.data)
            param.data.copy_(torch.ldexp((mantissa * 2).round() / 2, exponent))
    return model


def tiny(**fields: Any) -> dict[str, Any]:
    return {"tiny": replace(TINY, **fields)}


# fmt: off
LATENT = [
    model("large", "miniature-is-small-and-quick", "writes 21 MB", spec=tiny(write=f"{__name__}:write_large")),
    model("seedless", "miniature-is-the-same-bytes-for-the-same-seed", "ignores the seed",
          spec=tiny(write=f"{__name__}:write_seedless")),
    model("other-spec", "model-follows-its-config", "carries another spec"),
    model("loose", "only-the-named-module-trains", "leaves its encoder unfrozen",
          after_build=lambda model: setattr(model, "parts", {"encoder": nn.Linear(2, 2)})),
    model("no-such-layer", LORA, "names a target that no layer has", spec={"lora_targets": ("up", "down", "gate")}),
    model("miscounts", LORA, "promises one LoRA layer too many", spec=tiny(lora_layers=5)),
    model("no-such-block", "wrap-blocks-match-what-the-miniature-promises", "names a class that no block has",
          spec={"wrap_blocks": ("Block", "Attention")}),
    model("forgets-a-tensor", LAZY, "leaves a tensor empty",
          {"fill": takes(lambda tensors: dict(list(tensors.items())[:-1]))}),
    model("rounds-values", LAZY, "fills in values of 16 bits", {"fill": rounds_values}),
    model("not-lazy", LAZY, "has its values at once", arguments={"lazy": lambda _: False}),
    model("keeps-gradient", "conditions-have-a-row-for-each-prompt", "gives conditions with a gradient",
          conditions(lambda given, _: {name: value.requires_grad_() for name, value in given.items()})),
    model("no-plural", "different-prompts-give-different-conditions", "drops the last letter of a prompt",
          misreading({"a dogs": "a dog"})),
    model("counts", "conditions-do-not-depend-on-the-batch", "moves repeated prompts", conditions(counted)),
    model("states-as-conditions", FROZEN, "puts hidden states of the trained net into its conditions",
          {"encode": with_hidden_states}),
    model("calls-layers", INSIDE, "calls the layers of the trained net from outside", {"velocity": below_the_root}),
    model("widens", "negative-conditions-have-the-shapes-of-positive-ones", "encodes the empty prompt in fp64",
          conditions(wide_if_empty)),
    model("fp64", "velocity-is-fp32-of-the-shape-of-x", "gives fp64", velocities(lambda v, _: v.double())),
    model("remembers", "velocity-depends-on-every-element-of-x", "answers from a cache that forgets x",
          {"velocity": remembers}),
    model("rounds-sigma", "velocity-follows-sigma-without-rounding", "rounds sigma to hundredths",
          {"velocity": lambda _, velocity, x, sigma, conditions: velocity(x, (100 * sigma).round() / 100, conditions)}),
    model("half-deaf", "velocity-follows-every-condition", "drops one of its conditions",
          conditions(lambda given, _: {**given, "pooled": given["text"].flip(1)})),
    # Where rows are at different sigmas, each gets a trace of the others.
    model("rows-meet", "batch-rows-are-independent", "mixes a trace of other rows in",
          velocities(lambda v, sigma: v if len(sigma.unique()) == 1 else v + 4e-5 * v.mean(dim=0))),
    model("20-steps", "schedule-falls-to-0-in-the-requested-steps", "makes at most 20 steps",
          {"schedule": takes(at_most_20_steps)}),
    model("turned", "media-has-the-requested-size", "swaps height and width",
          {"decode": returns(lambda images: images.transpose(2, 3))}, also=(DECODED,)),
    model("unclamped", "media-lies-between-0-and-1", "does not clamp its pixels",
          {"decode": returns(lambda images: 1.2 * images - 0.1)}, also=(DECODED,)),
    model("rounds-height", "sizes-that-do-not-fit-are-refused", "rounds the height down",
          {"latent_shape": takes(lambda sampling: replace(sampling, height=sampling.height // 8 * 8))}),
    model("no-gradient", "decoder-keeps-the-gradient", "decodes without gradient",
          {"decode": decodes_without_gradient}),
    model("grad-mode", "own-sample-replays-at-ratio-1", "computes otherwise where gradients are on",
          velocities(lambda v, _: v * (1 + 2e-5 * torch.is_grad_enabled()))),
    # Another arithmetic of larger batches is another gradient of theirs.
    model("rounds-batches", "stacked-replay-agrees-with-the-rollout", "takes large batches in bf16",
          velocities(lambda v, _: v if len(v) <= 8 else v.bfloat16().float()), also=(BATCHING,)),
    model("divides", BATCHING, "divides its gradient by the rows of a batch",
          velocities(lambda v, _: v.detach() + (v - v.detach()) / len(v))),
    model("detached", REACHED, "detaches a layer", after_build=model_text.detach_a_layer),
    model("not-idle", REACHED, "calls a layer idle that is not", spec=tiny(idle_layers=("blocks.1.up",))),
    model("moved-schedule", SCHEDULE, "moves its sigmas",
          {"schedule": returns(lambda sigmas: sigmas + 1e-5 * sigmas * (1 - sigmas))}),
    # What is wrong without guidance is wrong with it.
    model("too-fast", FINAL, "is a tenth of a percent too fast", velocities(lambda v, _: 1.001 * v), also=(GUIDED,)),
    model("misread-negative", GUIDED, "drops the negative prompt", misreading({NEGATIVE: ""})),
    model("no-parity", SCHEDULE, "names no reference run", spec={"parity": ""}, also=(FINAL, GUIDED, DECODED)),
    model("mirrored", DECODED, "mirrors its images", {"decode": returns(lambda images: images.flip(3))}),
    model("no-vae-shift", DECODED, "leaves out the shift of the VAE's latents",
          {"decode": takes(lambda latents: latents - 0.0609)}),
    model("narrower", "settings-that-round-a-model-keep-their-bound", "rounds to 1 bit where it declares bf16",
          spec={"build": f"{__name__}:build_narrow", "config": f"{__name__}:NarrowConfig"}),
    model("columns-first", DECODED, "unpacks its latents by columns",
          {"decode": takes(lambda latents: latents.transpose(2, 3).reshape(latents.shape))}),
]
# fmt: on
MUTANTS = [*LATENT, *model_text.MUTANTS]
BROKEN = specs(MUTANTS, module=__name__)
SPECS = {spec.name: spec for spec in (HEALTHY, model_text.HEALTHY, model_text.RULED, *BROKEN)}
BUILDS = {
    HEALTHY.name: latent_model.build,
    model_text.HEALTHY.name: text_model.build,
    model_text.RULED.name: text_model.build_ruled,
}
build_mutant = builder(MUTANTS)


def build(config: Any, **context: Any) -> Any:
    """The model that the config's `use` names, with its spec; `other-spec` carries another one."""
    model, spec = BUILDS.get(config.use, build_mutant)(config, **context), SPECS[config.use]
    model.spec = replace(spec, wrap_blocks=()) if spec.name == "other-spec" else spec
    return model


def catalog() -> Catalog:
    return catalog_of(plugin(models=[HEALTHY, model_text.HEALTHY, model_text.RULED]), models=BROKEN)
