"""Factors of the learning rate by patterns on names."""

import pytest
from unirl.core.errors import RecipeError
from unirl.core.specs.lr_scales import lr_scales_of

NAMES = ("text.0.weight", "text.0.bias", "image.0.weight", "image.10.weight")


def test_the_first_pattern_found_in_a_name_decides_and_other_parameters_have_1():
    scales = lr_scales_of({"^text.*bias": 3.0, r"\.0\.": 0.1}, NAMES, module="Net")
    assert scales == {"text.0.weight": 0.1, "text.0.bias": 3.0, "image.0.weight": 0.1, "image.10.weight": 1.0}
    assert lr_scales_of({}, NAMES, module="Net") == dict.fromkeys(NAMES, 1.0)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ({"txt": 0.1}, r"lr_scales.txt: got a pattern that matches no trainable parameter of Net, .* such as 'text.0"),
        ({"^0": 0.1}, r"lr_scales.\^0: got a pattern that matches no trainable parameter of Net"),
        (
            {"text": 0.1, "bias": 0.0},
            "lr_scales.bias: got a pattern that matches 1 trainable parameters of Net, such as 'text.0.bias', but "
            "earlier patterns match all of them",
        ),
        ({"text": 0.0, "image": 0.0}, "lr_scales.image: got 0, which freezes the last of the 4 trainable parameters"),
        ({"": 0.0}, "lr_scales.: got 0, which freezes the last of the 4 trainable parameters of Net"),
    ],
)
def test_patterns_that_decide_nothing_or_freeze_everything_are_refused(patterns, expected):
    with pytest.raises(RecipeError, match=f"^backend.{expected}"):
        lr_scales_of(patterns, NAMES, module="Net")
