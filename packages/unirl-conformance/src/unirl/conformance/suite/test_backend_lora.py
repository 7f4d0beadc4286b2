"""LoRA: adapted layers, initialisation, frozen base weights, merging."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from unirl.conformance.claims import claim
from unirl.conformance.doubles.model import SPEC
from unirl.conformance.doubles.plain_training import with_adapters
from unirl.conformance.doubles.trainee import largest_gap
from unirl.conformance.fixtures.backend import GRADIENT, BackendBench, refuses
from unirl.core.errors import RecipeError
from unirl.core.specs.capability import Cap


@claim("backend", proves=Cap.TRAIN_LORA)
def test_lora_adapts_the_layers_that_the_targets_match(bench: BackendBench) -> None:
    """LoRA adapts exactly the layers in the model's spec, each with A and B.

    If it fails: match targets against the ends of module names, whole components at a time (`up` is no match for
    `pick_up`), and take them from the spec of the model that was given, not from a list of the backend.
    """
    for targets in (SPEC.lora_targets, ("blocks.1.up", "leave")):
        model = bench.model()
        layers = {
            name: part
            for name, part in model.net.named_modules()
            if isinstance(part, nn.Linear) and any(f".{name}".endswith(f".{target}") for target in targets)
        }
        expected = {f"{name}.lora_{part}.weight" for name in layers for part in "AB"}
        model.spec = dataclasses.replace(SPEC, lora_targets=targets)
        with bench.backend("lora", model=model) as trainee:
            result = trainee.trained()
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
def test_lora_targets_that_match_nothing_are_refused(bench: BackendBench) -> None:
    """A target that matches no layer, usually a typo, is an error and never silently ignored.

    If it fails: check every target by itself when adapters are made, and raise a RecipeError that names it.
    """
    model = bench.model()
    model.spec = dataclasses.replace(SPEC, lora_targets=("up", "dwon"))
    with (
        refuses(RecipeError, "the LoRA target 'dwon', which matches no layer,"),
        bench.backend("lora", model=model),
    ):
        pass


@claim("backend", proves=Cap.TRAIN_LORA)
def test_lora_starts_at_the_base_model(bench: BackendBench) -> None:
    """Before the first step the adapted model equals the base model, bit for bit, in weights and outputs.

    If it fails: one of A and B must start at 0 (B, by custom).
    """
    with bench.backend("lora") as trainee:
        expected, result = trainee.velocity(bench.model().velocity), trainee.velocity()
        bench.record("gap of the velocity", float((result - expected).abs().max()), bound=0.0)
        bench.record("gap of the merged weights", largest_gap(trainee.whole(), trainee.plain), bound=0.0)


@claim("backend", proves=Cap.TRAIN_LORA)
def test_adapters_start_from_the_seed_alone(bench: BackendBench) -> None:
    """The run's seed alone determines the initial adapters, so ranks and restarts agree.

    If it fails: draw A under a generator of the seed that `build` is given, and give torch's global one back as it was.
    """
    starts = []
    state = torch.random.get_rng_state()
    try:
        for noise, seed in ((1, 5), (2, 5), (1, 6)):
            torch.manual_seed(noise)
            before = torch.random.get_rng_state()
            with bench.backend("lora", seed=seed) as trainee:
                assert torch.equal(torch.random.get_rng_state(), before), "building moved torch's global generator"
                starts.append(trainee.trained())
    finally:
        torch.random.set_rng_state(state)
    first, again, other = starts
    bench.record("gap between two starts from one seed", largest_gap(again, first), bound=0.0)
    assert largest_gap(other, first) > 0, "another seed gives the same adapters"


@claim("backend", proves=Cap.TRAIN_LORA)
def test_lora_leaves_the_base_weights_alone(bench: BackendBench) -> None:
    """Training adapters never changes the base model, bit for bit, including biases, norms and other layers.

    If it fails: look for parameters that were not frozen (biases, by peft's `bias` setting), for a merge that was never
    undone, and for weight decay on what does not train.
    """
    caps = [cap for cap in (Cap.REFERENCE_ADAPTER_OFF,) if bench.promises(cap)]
    with bench.backend("lora", *caps, **{**GRADIENT, "weight_decay": 0.01}) as trainee:
        adapted = {name.replace(".lora_A", "") for name in trainee.trained()}
        for number in range(2):
            trainee.train(bench.track(number))
            trainee.backend.end_rollout()
        looked_at = {name: value for name, value in trainee.whole().items() if name not in adapted}
        if caps:
            looked_at |= trainee.whole("reference")
    changed = [name for name, value in looked_at.items() if not torch.equal(value, trainee.plain[name])]
    assert not changed, f"{len(changed)} base weights changed, such as {changed[0]!r}"


@claim("backend", proves=Cap.TRAIN_LORA)
def test_merged_weights_are_the_base_plus_scaled_b_a(bench: BackendBench) -> None:
    """Merged weights are W + scale B A, with the A, B and scale that the same backend exports as LoRA.

    If it fails: see whether merging leaves out alpha / rank, applies it twice, or merges into weights that are merged
    already.
    """
    with bench.backend("lora", **GRADIENT) as trainee:
        for number in range(2):
            trainee.train(bench.track(number))
        scale = trainee.backend.export_weights(kind="lora").adapter_scale
        expected = with_adapters(
            {name: value.double() for name, value in trainee.plain.items()},
            {name: value.double() for name, value in trainee.trained().items()},
            scale=scale,
        )
        result = {name: value.double() for name, value in trainee.whole().items()}
        change = largest_gap(expected, {name: value.double() for name, value in trainee.plain.items()})
    size = max(float(value.abs().max()) for value in expected.values())
    # Products of fp32 numbers and their sum, each rounded to 6e-8 of its size.
    bench.record("relative gap", largest_gap(result, expected) / size, bound=1e-6)
    assert change > 1e-3 * size, "two updates changed the weights too little to tell"
