"""LoRA: adapted layers, initialisation, frozen base weights, merging."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from unirl.conformance.claims import claim
from unirl.conformance.doubles.plain_training import with_adapters
from unirl.conformance.doubles.tiny_denoiser import SPEC
from unirl.conformance.doubles.trainer import largest_gap
from unirl.conformance.fixtures.backend import GRADIENT, BackendCase, refuses
from unirl.core.errors import RecipeError
from unirl.core.specs.capability import Cap


@claim("backend", proves=Cap.TRAIN_LORA)
def test_lora_adapts_the_layers_that_the_targets_match(case: BackendCase) -> None:
    """LoRA adapts exactly the layers in the model's spec, each with A and B.

    If it fails: match targets against the ends of module names, whole components at a time (`up` does not match
    `pick_up`), and take them from the spec of the model that was given, not from a list of the backend.
    """
    for targets in (SPEC.lora_targets, ("blocks.1.up", "leave")):
        model = case.model()
        layers = {
            name: part
            for name, part in model.net.named_modules()
            if isinstance(part, nn.Linear) and any(f".{name}".endswith(f".{target}") for target in targets)
        }
        expected = {f"{name}.lora_{part}.weight" for name in layers for part in "AB"}
        model.spec = dataclasses.replace(SPEC, lora_targets=targets)
        with case.backend("lora", model=model) as trainer:
            result = trainer.trained()
        assert result.keys() == expected, (
            f"targets {targets} match {sorted(layers)}; exported are {sorted(result)[:8]}, ... ({len(result)} tensors)"
        )
        for name, layer in layers.items():
            a, b = result[f"{name}.lora_A.weight"], result[f"{name}.lora_B.weight"]
            shapes = (a.shape[1], b.shape[0], a.shape[0] == b.shape[1])
            assert shapes == (layer.in_features, layer.out_features, True), (
                f"{name}: A is {list(a.shape)} and B is {list(b.shape)} of a layer {list(layer.weight.shape)}"
            )


@claim("backend", proves=Cap.TRAIN_LORA)
def test_lora_targets_that_match_nothing_are_refused(case: BackendCase) -> None:
    """A target that matches no layer, usually a typo, is an error and never silently ignored.

    If it fails: check every target by itself when adapters are made, and raise a RecipeError that names it.
    """
    model = case.model()
    model.spec = dataclasses.replace(SPEC, lora_targets=("up", "dwon"))
    with (
        refuses(RecipeError, "the LoRA target 'dwon', which matches no layer,"),
        case.backend("lora", model=model),
    ):
        pass


@claim("backend", proves=Cap.TRAIN_LORA)
def test_lora_starts_at_the_base_model(case: BackendCase) -> None:
    """Before the first step the adapted model equals the base model, bit for bit, in weights and outputs.

    If it fails: one of A and B must start at 0 (B, by custom).
    """
    with case.backend("lora") as trainer:
        expected, result = trainer.velocity(case.model().velocity), trainer.velocity()
        case.record("gap of the velocity", float((result - expected).abs().max()), bound=0.0)
        case.record("gap of the merged weights", largest_gap(trainer.whole(), trainer.plain), bound=0.0)


@claim("backend", proves=Cap.TRAIN_LORA)
def test_adapters_start_from_the_seed_alone(case: BackendCase) -> None:
    """The run's seed alone determines the initial adapters, so ranks and restarts agree.

    If it fails: draw A under a generator of the seed that `build` is given, and give torch's global one back as it was.
    """
    starts = []
    state = torch.random.get_rng_state()
    try:
        for noise, seed in ((1, 5), (2, 5), (1, 6)):
            torch.manual_seed(noise)
            before = torch.random.get_rng_state()
            with case.backend("lora", seed=seed) as trainer:
                assert torch.equal(torch.random.get_rng_state(), before), "building moved torch's global generator"
                starts.append(trainer.trained())
    finally:
        torch.random.set_rng_state(state)
    first, again, other = starts
    case.record("gap between two starts from one seed", largest_gap(again, first), bound=0.0)
    assert largest_gap(other, first) > 0, "another seed gives the same adapters"


@claim("backend", proves=Cap.TRAIN_LORA)
def test_lora_leaves_the_base_weights_alone(case: BackendCase) -> None:
    """Training adapters never changes the base model, bit for bit, including biases, norms and other layers.

    If it fails: look for parameters that were not frozen (biases, by peft's `bias` setting), for a merge that was never
    undone, and for weight decay on what does not train.
    """
    caps = [cap for cap in (Cap.REFERENCE_ADAPTER_OFF,) if case.promises(cap)]
    with case.backend("lora", *caps, **{**GRADIENT, "weight_decay": 0.01}) as trainer:
        adapted = {name.replace(".lora_A", "") for name in trainer.trained()}
        for number in range(2):
            trainer.train(case.track(number))
            trainer.backend.end_rollout()
        looked_at = {name: value for name, value in trainer.whole().items() if name not in adapted}
        if caps:
            looked_at |= trainer.whole("reference")
    changed = [name for name, value in looked_at.items() if not torch.equal(value, trainer.plain[name])]
    assert not changed, f"{len(changed)} base weights changed, such as {changed[0]!r}"


@claim("backend", proves=Cap.TRAIN_LORA)
def test_merged_weights_are_the_base_plus_scaled_b_a(case: BackendCase) -> None:
    """Merged weights are W + scale B A, with the A, B and scale that the same backend exports as LoRA.

    If it fails: see whether merging leaves out alpha / rank, applies it twice, or merges into weights that are merged
    already.
    """
    with case.backend("lora", **GRADIENT) as trainer:
        for number in range(2):
            trainer.train(case.track(number))
        scale = trainer.backend.export_weights(kind="lora").adapter_scale
        expected = with_adapters(
            {name: value.double() for name, value in trainer.plain.items()},
            {name: value.double() for name, value in trainer.trained().items()},
            scale=scale,
        )
        result = {name: value.double() for name, value in trainer.whole().items()}
        change = largest_gap(expected, {name: value.double() for name, value in trainer.plain.items()})
    size = max(float(value.abs().max()) for value in expected.values())
    # Products of fp32 numbers and their sum, each rounded to 6e-8 of its size.
    case.record("relative gap", largest_gap(result, expected) / size, bound=1e-6)
    assert change > 1e-3 * size, "two updates changed the weights too little to tell"
