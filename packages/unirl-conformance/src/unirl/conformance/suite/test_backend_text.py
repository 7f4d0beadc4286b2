"""Training on completions."""

from __future__ import annotations

from unirl.conformance.claims import claim
from unirl.conformance.doubles.plain_training import plain_of
from unirl.conformance.doubles.tiny_decoder import TinyDecoder
from unirl.conformance.doubles.trainer import largest_gap
from unirl.conformance.fixtures.backend import BackendCase
from unirl.core.specs.config import TrainConfig

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
def test_training_on_text_is_torchs_adamw(case: BackendCase) -> None:
    """Two updates on completions change the trained weights as torch's AdamW does on the plain module, one completion
    at a time: at the temperature of the rollout, and the same for a whole batch and for micro-batches by tokens, packed
    and padded.

    If it fails while training on latents is right: look at the temperature, at whether `train.micro_batch_tokens` and
    `train.packing` reach the train stack, and at modules (embeddings, an output projection) that are left out.
    """
    for training in case.trainings:
        for how, train in SPLITS.items():
            model = TinyDecoder(device=case.device)
            with case.backend(training, model=model, train=train, **ADAMW) as trainer:
                start, plain = trainer.trained(), plain_of(trainer, **ADAMW)
                for number in range(2):
                    trainer.train(case.text_track(number))
                    plain.step(case.text_track(number))
                after = trainer.trained()
            assert largest_gap(after, start) > 0, f"{training}, {how}: two updates changed nothing"
            gap = largest_gap(after, plain.weights) / 1e-2
            case.record(f"{training}, {how}: off, in learning rates", gap, bound=BOUND)
