"""Settings of a model that trade numbers for speed or memory."""

from __future__ import annotations

import torch
from unirl.conformance.claims import claim
from unirl.conformance.fixtures.model import ModelCase, evaluating
from unirl.core.errors import RecipeError


@claim("model", track="any")
def test_settings_that_round_a_model_keep_their_bound(case: ModelCase) -> None:
    """With each setting that the model declares as an acceleration, such as a narrow dtype or another attention, its
    velocities, decoded media and log-probs stay within the declared error, and one declared to lose nothing gives the
    same bits.

    If it fails: look for arithmetic that the setting rounds twice or where sums cancel, such as norms, softmax and
    timesteps, which stay in fp32 in most models; or declare the error that it has in `accelerations` of the config.
    """
    with case.model() as model:
        expected = case.numbers(model)
    for settings, bound in case.accelerations():
        ((key, value),) = settings.items()
        try:
            model = case.fresh_model(**settings)
        except RecipeError as error:
            # Some are known of a checkpoint's classes alone, such as one without a choice of attention.
            if not str(error).startswith(f"model.{key}: got"):
                raise
            continue
        with torch.no_grad(), evaluating(model.trainable):
            result = case.numbers(model)
        # In norm: a token whose expert changes by rounding is off by more than rounding.
        gap = max(
            float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(result, expected, strict=True)
        )
        case.record(f"{key}={value}: relative gap in norm", gap, bound=bound)
