"""Settings of a backend that trade numbers for speed or memory."""

from __future__ import annotations

from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.doubles.trainer import Training, largest_gap
from unirl.conformance.fixtures.backend import GRADIENT, BackendCase
from unirl.core.errors import RecipeError


@claim("backend")
def test_settings_that_round_an_update_keep_their_bound(case: BackendCase) -> None:
    """With each setting that the backend declares as an acceleration, such as mixed precision, an update stays within
    the declared error, and one declared to lose nothing, such as checkpointing of activations, gives the same bits.

    If it fails: look for blocks that are recomputed with other inputs or random draws, gradients that are summed in a
    narrow dtype, and a loss scale that is left in them; or declare the error that it has in `accelerations`.
    """

    def update(training: Training, **settings: object) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        with case.backend(training, **{**GRADIENT, **settings}) as trainer:
            before = trainer.trained()
            trainer.train(case.track(0))
            return before, trainer.trained()

    for training in case.trainings:
        before, expected = update(training)
        moved = largest_gap(before, expected)
        assert moved > 0, "the loss has no gradient; this is a defect of the kit"
        for settings, bound in case.accelerations():
            ((key, value),) = settings.items()
            try:
                _, result = update(training, **settings)
            except RecipeError as error:
                # Some are refused where they are built, such as a precision on one rank that is not wrapped.
                if not str(error).startswith(f"backend.{key}: got"):
                    raise
                continue
            case.record(f"{training}, {key}={value}", largest_gap(result, expected) / moved, bound=bound)
