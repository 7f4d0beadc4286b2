"""Training on completions."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from unirl.conformance.claims import claim
from unirl.conformance.doubles.requests import make_text_request
from unirl.conformance.doubles.rollouts import sample_text
from unirl.conformance.doubles.text_model import TextWorkbenchModel
from unirl.conformance.doubles.text_surrogate import TextSurrogate, trained_plainly
from unirl.conformance.doubles.trainee import largest_gap
from unirl.conformance.fixtures.backend import BackendBench
from unirl.conformance.fixtures.trial import digest
from unirl.core.roles import Backend, Job
from unirl.core.specs.config import TrainConfig
from unirl.core.types.sampling import TextSamplingConfig
from unirl.core.types.track import Track

ADAMW = {"lr": 1e-2, "betas": [0.8, 0.95], "eps": 1e-4, "weight_decay": 0.0, "max_grad_norm": None}
BOUND = 2e-3
"""In units of the learning rate, after two steps. Gradients differ by fp32 rounding, 1e-8 here, and Adam divides them
by no less than eps = 1e-4; a token that weighs otherwise is 1e-2 and more."""
SPLITS = {
    "whole": TrainConfig(),
    "by tokens, packed": TrainConfig(micro_batch_tokens=60),
    "by tokens, padded": TrainConfig(micro_batch_tokens=60, packing=False),
}


@claim("backend", track="text")
def test_training_on_text_is_torchs_adamw(bench: BackendBench) -> None:
    """Two updates on completions change the trained weights as torch's AdamW does on the plain module, one completion
    at a time: at the temperature of the rollout, and the same for a whole batch and for micro-batches by tokens, packed
    and padded.

    If it fails while training on latents is right: look at the temperature, at whether `train.micro_batch_tokens` and
    `train.packing` reach the train stack, and at modules (embeddings, an output projection) that are left out.
    """
    tracks = [bench.workshop.shared(f"text {number} of backends", partial(_track, number)) for number in range(2)]
    for training in bench.trainings:
        for how, train in SPLITS.items():
            model = TextWorkbenchModel(device=bench.device)
            plain = {name: param.detach().clone() for name, param in model.net.named_parameters()}
            result = bench.subject.found("backend")
            config = bench.config(training, **ADAMW)
            backend: Backend = bench.workshop.build(result, config, model=model, train=train, steps=100, seed=3)
            try:
                before = backend.export_weights(kind=training)
                start = {name: value.clone().cpu() for name, value in before.tensors.items()}
                for track in tracks:
                    backend.train([Job(track=track.to(bench.device), algorithm=TextSurrogate())], progress=0.25)
                after = {
                    name: value.clone().cpu() for name, value in backend.export_weights(kind=training).tensors.items()
                }
            finally:
                backend.close()
            base = {name: value.cpu() for name, value in plain.items()} if training == "lora" else None
            # Backends start alike, from the model or from adapters of a seed: seldom is it another training.
            expected = bench.workshop.shared(
                f"plain training on text, {digest(start, base, before.adapter_scale)}",
                partial(
                    trained_plainly,
                    start,
                    tracks,
                    base=base,
                    scale=before.adapter_scale,
                    **{name: value for name, value in ADAMW.items() if name != "max_grad_norm"},
                ),
            )
            assert largest_gap(after, start) > 0, f"{training}, {how}: two updates changed nothing"
            gap = largest_gap(after, expected) / 1e-2
            bench.record(f"{training}, {how}: off, in learning rates", gap, bound=BOUND)


def _track(number: int) -> Track:
    """Six completions in two groups, sampled with the initial weights, with advantages of all sizes; numbers differ."""
    model = TextWorkbenchModel()
    sampling = TextSamplingConfig(max_new_tokens=10, temperature=0.7, chat=False)
    track = sample_text(model, make_text_request(model, sampling, track="text", rollout=number))
    return dataclasses.replace(track, advantages=torch.tensor([1.3, -0.4, 0.7, -1.9, 0.2, 1.1]).roll(number))
