"""GenEval's rules on hand-made detections."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unirl.rewards.detect.geneval_metadata import COLORS, RELATIONS, read_scene
from unirl.rewards.detect.geneval_rules import Box, Detection, Judgement, judge, relations, without_overlaps


def at(x: float, y: float, *, size: float = 10, score: float = 0.9, color: str | None = None) -> Detection:
    """A square around (x, y)."""
    half = size / 2
    return Detection(box=(x - half, y - half, x + half, y + half), score=score, color=color)


def many(count: int, **fields: Any) -> list[Detection]:
    return [at(20.0 * index, 0, **fields) for index in range(count)]


def judged(tag: str, include: list[dict[str, Any]], found: dict[str, list[Detection]], **metadata: Any) -> Judgement:
    return judge(read_scene({"tag": tag, "include": include, **metadata}), found)


CAT, DOG = {"class": "cat", "count": 1}, {"class": "dog", "count": 1}
FOUR = {"tag": "counting", "include": [{"class": "cat", "count": 4}], "exclude": [{"class": "cat", "count": 5}]}


def test_a_single_object_is_enough_and_more_are_not_wrong() -> None:
    assert judged("single_object", [CAT], {"cat": many(1)}).strict == 1
    assert judged("single_object", [CAT], {"cat": many(3)}) == Judgement(strict=1, soft=1, count=1, color=1, position=1)
    assert judged("single_object", [CAT], {"dog": many(1)}) == Judgement(strict=0, soft=0, count=0, color=1, position=1)


def test_of_two_objects_one_is_half() -> None:
    assert judged("two_object", [CAT, DOG], {"cat": many(1), "dog": many(1)}).soft == 1
    half = judged("two_object", [CAT, DOG], {"dog": many(1)})
    assert (half.strict, half.soft, half.count) == (0, 0.5, 0.5)


# max(0, 1 - |4 - found| / 4), by hand.
@pytest.mark.parametrize(
    ("found", "soft"), [(0, 0), (1, 0.25), (3, 0.75), (4, 1), (5, 0.75), (7, 0.25), (8, 0), (40, 0)]
)
def test_a_count_is_exact_and_never_negative(found: int, soft: float) -> None:
    result = judge(read_scene(FOUR), {"cat": many(found)})
    assert (result.strict, result.soft, result.count) == (float(found == 4), soft, soft)


def test_more_objects_than_the_exclusion_allows_are_wrong_also_for_a_class_of_its_own() -> None:
    exclude = [{"class": "dog", "count": 2}]
    for found, soft in ((0, 1.0), (1, 1.0), (2, 0.75), (3, 0.5), (9, 0.5)):
        result = judged("single_object", [CAT], {"cat": many(1), "dog": many(found)}, exclude=exclude)
        # The mean of the cat's 1 and of 1 - (found - 1) / 2, at least 0.
        assert (result.soft, result.strict) == (soft, float(found < 2))


def test_colors_are_judged_on_the_objects_with_the_highest_scores() -> None:
    two_red = [{"class": "cup", "count": 2, "color": "red"}]
    red, blue = at(0, 0, score=0.9, color="red"), at(30, 0, score=0.8, color="blue")
    weak = at(60, 0, score=0.4, color="red")
    result = judged("colors", two_red, {"cup": [weak, blue, red]})
    assert (result.strict, result.count, result.color, result.soft) == (0, 1, 0.5, 0.75)
    assert judged("colors", two_red, {"cup": [weak, red]}).strict == 1


def test_an_object_that_is_missing_has_no_color() -> None:
    result = judged("colors", [{"class": "cup", "count": 2, "color": "red"}], {"cup": [at(0, 0, color="red")]})
    assert (result.strict, result.count, result.color) == (0, 0.5, 0.5)


def test_attributes_belong_to_their_objects() -> None:
    include = [{**CAT, "color": "red"}, {**DOG, "color": "blue"}]
    right = judged("color_attr", include, {"cat": many(1, color="red"), "dog": many(1, color="blue")})
    swapped = judged("color_attr", include, {"cat": many(1, color="blue"), "dog": many(1, color="red")})
    assert (right.strict, right.soft) == (1, 1)
    assert (swapped.strict, swapped.count, swapped.color, swapped.soft) == (0, 1, 0, 0.5)


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (50, 0, {"right of"}),
        (-50, 0, {"left of"}),
        (0, 50, {"below"}),
        (0, -50, {"above"}),
        # At 45 degrees each rest is (50 - 2) / (50 sqrt 2) = 0.68 of the distance.
        (50, 50, {"right of", "below"}),
        # 48 / 55.9 = 0.86 to the right, 23 / 55.9 = 0.41 below, which is not more than half.
        (50, 25, {"right of"}),
        # Within the tolerance of a tenth of 10 + 10 pixels.
        (2, 0, set()),
        (0, 0, set()),
        # 2 of the 4 pixels remain: exactly half of the distance, which is not more.
        (4, 0, set()),
        (4.1, 0, {"right of"}),
    ],
)
def test_a_relation_needs_more_than_half_of_the_distance(x: float, y: float, expected: set[str]) -> None:
    assert relations(at(x, y).box, at(0, 0).box) == expected


def test_large_objects_must_be_further_apart() -> None:
    # A tenth of 100 + 100 pixels is 20, and 19 is less; small objects at the same distance are apart.
    assert relations(at(19, 0, size=100).box, at(0, 0, size=100).box) == frozenset()
    assert relations(at(19, 0).box, at(0, 0).box) == {"right of"}


def test_a_position_is_judged_against_the_target() -> None:
    include = [CAT, {**DOG, "position": ["left of", 0]}]
    left = judged("position", include, {"cat": [at(50, 0)], "dog": [at(0, 0)]})
    right = judged("position", include, {"cat": [at(0, 0)], "dog": [at(50, 0)]})
    alone = judged("position", include, {"dog": [at(0, 0)]})
    assert (left.strict, left.soft) == (1, 1)
    assert (right.strict, right.count, right.position) == (0, 1, 0)
    assert right.soft == pytest.approx(2 / 3)  # two counts of three requirements
    assert (alone.strict, alone.count, alone.position) == (0, 0.5, 0)


def test_a_position_holds_for_every_pair() -> None:
    include = [CAT, {"class": "dog", "count": 2, "position": ["above", 0]}]
    result = judged("position", include, {"cat": [at(0, 0)], "dog": [at(0, -50), at(0, 50)]})
    assert (result.strict, result.position) == (0, 0.5)


def test_of_overlapping_boxes_the_best_stays() -> None:
    best, same, apart = at(0, 0, score=0.9), at(1, 0, score=0.5), at(30, 0, score=0.7)
    # 9 x 10 pixels are shared, of 200 - 90: an intersection over union of 0.82.
    assert without_overlaps([same, apart, best], most=0.8) == [best, apart]
    assert without_overlaps([same, apart, best], most=0.82) == [best, apart, same]
    assert without_overlaps([same, apart, best], most=1) == [best, apart, same]
    assert without_overlaps([at(0, 0, size=0), at(0, 0, size=0)], most=0.5) == [at(0, 0, size=0)] * 2


BOXES = st.tuples(*[st.integers(0, 64)] * 4).map(
    lambda edges: (min(edges[0], edges[2]), min(edges[1], edges[3]), max(edges[0], edges[2]), max(edges[1], edges[3]))
)
DETECTIONS = st.builds(Detection, box=BOXES, score=st.floats(0, 1), color=st.sampled_from(COLORS[:2]))
NAMED = st.fixed_dictionaries({"cat": st.lists(DETECTIONS, max_size=6), "dog": st.lists(DETECTIONS, max_size=3)})


@given(NAMED, st.integers(1, 3), st.sampled_from(RELATIONS), st.booleans())
def test_soft_is_one_exactly_where_strict_is(found: Any, count: int, relation: str, is_exact: bool) -> None:
    dogs = {**DOG, "color": COLORS[0], "position": [relation, 0]}
    exclude = [{"class": "cat", "count": count + 1}] if is_exact else []
    result = judged("position", [{"class": "cat", "count": count}, dogs], found, exclude=exclude)
    values = (result.strict, result.soft, result.count, result.color, result.position)
    assert all(0 <= value <= 1 for value in values)
    assert (result.strict == 1) == (result.soft == 1) == (min(result.count, result.color, result.position) == 1)


@given(BOXES, BOXES)
def test_a_relation_turns_around_with_its_objects(box: Box, other: Box) -> None:
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    assert {opposite[name] for name in relations(box, other)} == relations(other, box)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tag": "shapes"}, "tag: got 'shapes', expected one of single_object"),
        ({"tag": "colours"}, "did you mean 'colors'"),
        ({"include": "cat"}, "include: got 'cat', expected a list"),
        ({"include": []}, "include: got an empty list"),
        ({"include": ["cat"]}, r"include\[0\]: got 'cat', expected an object"),
        ({"include": [{"class": "cat"}]}, r"include\[0\]: `count` is missing"),
        ({"include": [{**CAT, "colour": "red"}]}, r"include\[0\]: got the unknown key 'colour'.*'color'"),
        ({"include": [{**CAT, "color": "mauve"}]}, r"include\[0\].color: got 'mauve', expected one of red"),
        ({"include": [{"class": "cat", "count": 0}]}, r"include\[0\].count: got 0"),
        ({"include": [{"class": "cat", "count": True}]}, r"include\[0\].count: got True"),
        ({"include": [{"class": " ", "count": 1}]}, r"include\[0\].class: got ' '"),
        ({"include": [CAT, CAT]}, r"include\[1\].class: 'cat' occurs twice"),
        ({"include": [CAT, {**DOG, "position": ["near", 0]}]}, r"include\[1\].position: got 'near', expected one of"),
        ({"include": [{**CAT, "position": ["above", 0]}]}, r"include\[0\].position: got entry 0 as the target"),
        ({"include": [CAT, {**DOG, "position": ["above", -1]}]}, "got entry -1 as the target"),
        ({"include": [CAT, {**DOG, "position": "above"}]}, "expected a relation and an index"),
        ({"exclude": [{"class": "cat", "count": 1}]}, r"include\[0\].count: got 1 of 'cat', but `exclude` rejects 1"),
        ({"exclude": [{**DOG, "color": "red"}]}, r"exclude\[0\]: got the unknown key 'color'"),
    ],
)
def test_metadata_that_cannot_be_judged_are_refused_with_their_path(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_scene({"tag": "single_object", "include": [CAT], **change})


@pytest.mark.parametrize("key", ["tag", "include"])
def test_a_missing_key_is_named(key: str) -> None:
    metadata = {"tag": "single_object", "include": [CAT]}
    del metadata[key]
    with pytest.raises(ValueError, match=f"^{key}: missing"):
        read_scene(metadata)


def test_rows_as_genevals_generator_writes_them_are_read() -> None:
    """Tuples come from Python, lists from JSON; the prompt beside them is not read."""
    include = [CAT, {**DOG, "position": ("left of", 0)}]
    scene = read_scene({"tag": "position", "include": include, "prompt": "a photo of a dog left of a cat"})
    assert scene.include[1].position == ("left of", 0) and scene.names == ("cat", "dog")
