"""Distribution matching on the image quickstart: what a plan is refused for."""

from __future__ import annotations

import pytest
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose

RECIPE = "quickstart-few-steps"


def reasons(recipe: str, *overrides: str) -> list[str]:
    catalog = Catalog.discover()
    return [str(reason) for reason in match(compose(recipe, overrides, catalog=catalog), catalog=catalog).reasons]


def test_the_student_takes_any_number_of_steps_and_is_evaluated_with_fewer() -> None:
    assert reasons(RECIPE) == []
    assert reasons(RECIPE, "sampling.num_inference_steps=1") == []
    assert reasons(RECIPE, "+eval.sampling.num_inference_steps=2") == []
    assert reasons(RECIPE, "sampling.kernel=cps", "sampling.eta=1.0", "sampling.sde.mode=all") == []


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (
            ("backend.fake_score.lr=null",),
            "backend.fake_score.lr",
            "got null, but algorithm 'dmd2' trains a fake score",
        ),
        (("backend.fake_score.lr=0",), "backend.fake_score.lr", "expected more than 0, or null"),
        (("backend.fake_score.steps_per_update=0",), "backend.fake_score.steps_per_update", "1 or more"),
        (("backend.critic.lr=1e-4",), "backend.critic.lr", "does not train a critic"),
        (("backend.reference_copy=false",), "backend.reference_copy", "needs a reference policy"),
        (("sampling.guidance_scale=4",), "sampling.guidance_scale", "without guidance"),
        (
            ("+eval.sampling.num_inference_steps=10",),
            "eval.sampling.num_inference_steps",
            "got 10, expected at most 4, the steps that the student learns",
        ),
        (("algorithm.point_range=[0.5,0.5]",), "algorithm.point_range", "expected two rising quantiles"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(overrides: tuple[str, ...], key: str, says: str) -> None:
    result = reasons(RECIPE, *overrides)
    assert len(result) == 1 and f"{key}:" in result[0] and says in result[0], result


def test_a_fake_score_that_nothing_trains_is_refused() -> None:
    (result,) = reasons("quickstart", "backend.fake_score.lr=1e-4")
    assert "backend.fake_score.lr: got 0.0001, but algorithm 'flow-grpo' does not train a fake score" in result
