"""Templates and what is read out of answers."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from unirl.core.errors import RecipeError
from unirl.core.types.data import MediaRef
from unirl.rewards.vlm.answers import number_after, numbers_of_json
from unirl.rewards.vlm.config import (
    EditJudgeConfig,
    JudgeConfig,
    PairJudgeConfig,
    PairwiseConfig,
    UnifiedRewardConfig,
    WiseConfig,
)
from unirl.rewards.vlm.plugin import EDIT_REWARD
from unirl.rewards.vlm.template import load, path_of

RANGE = "[scores.score]\nrange = [1, 5]\n"


def written(folder: Path, content: str) -> str:
    file = folder / "mine.toml"
    file.write_text(content)
    return str(file)


def template(folder: Path, text: str, rest: str = RANGE, *, answer: str = "json", top: str = "") -> str:
    return written(folder, f'version = "1"\nanswer = "{answer}"\n{top}\ntext = """{text}"""\n{rest}')


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Final Score: 3.5", 3.5),
        ("The light is good.\n**Final Score:** **4**", 4.0),
        ("final score = 2.", 2.0),
        ("Final Score: [5]", 5.0),
        ("Final Score: 4/5", 4.0),
        ("Final Score: 4 out of 5", 4.0),
        ("A Final Score: 2 was my first idea. Final Score: 3", 3.0),
        ("Final Score: 4 - two objects are missing... and 3 are not", 4.0),
        ("Final Score: 4/10", None),
        ("Final Score: 3-4", None),
        ("Final Score: 3.5 - 4", None),
        ("Final Score: 3,5", None),
        ("Final Score: high", None),
        ("It is a nice picture, 4 of 5 stars.", None),
        ("", None),
    ],
)
def test_a_number_is_read_after_its_marker_and_nowhere_else(answer: str, expected: float | None) -> None:
    assert number_after(answer, "Final Score:", 5.0) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('{"score": 4}', [4.0]),
        ('```json\n{"score": 4.5, "reason": "a {brace}"}\n```', [4.5]),
        ('First {"score": 1}, on reflection {"score": 3}.', [3.0]),
        ('{"score": "4"}', [4.0]),
        ('A set {x} and {"score": 2}', [2.0]),
        ('{"score": true}', [None]),
        ('{"score": null}', [None]),
        ('{"score": [3]}', [None]),
        ('{"rating": 3}', [None]),
        ('{"score": 3', [None]),
        ("no JSON", [None]),
    ],
)
def test_the_last_json_object_with_the_key_counts(answer: str, expected: list[float | None]) -> None:
    assert numbers_of_json(answer, ["score"]) == expected


def test_a_json_object_must_have_all_keys() -> None:
    assert numbers_of_json('{"a": 1} {"a": 2, "b": 3} {"b": 4}', ["a", "b"]) == [2.0, 3.0]


def test_scores_outside_their_range_are_not_parsed(tmp_path: Path) -> None:
    rule = load(template(tmp_path, "{prompt}"), key="k")
    assert rule.parse('{"score": 1}') == (1.0,)
    for value in ("0", "6", "-3", "NaN", "Infinity", "1e9"):
        assert rule.parse(f'{{"score": {value}}}') is None


def test_what_a_reasoning_model_thinks_is_not_its_answer(tmp_path: Path) -> None:
    rule = load(template(tmp_path, "{prompt}"), key="k")
    assert rule.parse('<think>{"score": 1}? no.</think> {"score": 4}') == (4.0,)
    assert rule.parse('<think>{"score": 1}?</think> I cannot say.') is None


def test_placeholders_are_filled_once_so_braces_of_prompts_and_examples_stay(tmp_path: Path) -> None:
    text = 'Judge {prompt} with {metadata.hint}; reply {"score": 3}'
    rule = load(template(tmp_path, text), key="k")
    filled = rule.filled("a {table} {prompt} {metadata.hint} {{0}} \\1", {"hint": ["{prompt}", 1]})
    assert filled == ("Judge a {table} {prompt} {metadata.hint} {{0}} \\1 with ['{prompt}', 1]; reply {\"score\": 3}")
    assert rule.metadata_keys == ("hint",)


def test_several_scores_are_weighted_on_their_own_ranges(tmp_path: Path) -> None:
    scores = "[scores.a]\nrange = [0, 10]\nweight = 3\n[scores.b]\nrange = [1, 2]\nzero = 0\n"
    rule = load(template(tmp_path, "{prompt}", scores), key="k")
    # (3 * 5 / 10 + 1 * 1 / 2) / 4
    assert rule.value(rule.parse('{"a": 5, "b": 1}') or ()) == pytest.approx(0.5)
    assert rule.parse('{"a": 5}') is None


def test_a_pattern_reads_the_wording_of_a_published_model(tmp_path: Path) -> None:
    scores = "[scores.better]\nrange = [1, 2]\npattern = 'Image (\\d) is better'\n"
    rule = load(template(tmp_path, "{prompt}", scores, answer="marker"), key="k")
    assert rule.parse("Image 2 is better.") == (2.0,)
    assert rule.parse("Image 3 is better.") is None
    assert rule.parse("Both are fine.") is None


def test_wiscore_is_the_published_sum() -> None:
    rule = load("wise", key="k")
    raw = rule.parse('{"consistency": 2, "realism": 1, "aesthetic": 0}')
    assert raw == (2.0, 1.0, 0.0)
    assert rule.value(raw) == pytest.approx((0.7 * 2 + 0.2 * 1 + 0.1 * 0) / 2)


@pytest.mark.parametrize(("raw", "expected"), [("1", 0.2), ("3.5", 0.7), ("5", 1.0)])
def test_the_final_score_of_unified_reward_is_divided_by_five(raw: str, expected: float) -> None:
    rule = load("unified-reward", key="k")
    assert rule.value(rule.parse(f"Final Score: {raw}") or ()) == pytest.approx(expected)


def test_the_grades_of_an_edit_go_from_0_to_1() -> None:
    rule = load("edit-judge", key="k")
    assert rule.needs_source
    # The mean of (4 - 1) / 3 and (2 - 1) / 3.
    assert rule.value(rule.parse('{"following": 4, "quality": 2}') or ()) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "config",
    [JudgeConfig, UnifiedRewardConfig, PairwiseConfig, PairJudgeConfig, WiseConfig, EditJudgeConfig],
    ids=lambda c: c.reward,
)
def test_every_template_here_is_valid_and_its_file_is_part_of_the_run(config: type[JudgeConfig]) -> None:
    settings = config()
    assert list(settings.problems(None, None)) == []
    file = settings.read_files()[".template"]
    assert load(settings.template, key="k").digest == hashlib.sha256(file.read_bytes()).hexdigest()


def test_the_example_of_an_edit_has_its_source() -> None:
    (ref,) = EDIT_REWARD.examples[0].media
    assert isinstance(ref, MediaRef)
    assert Path(ref.uri).is_file()


def test_metadata_of_a_template_is_required_of_the_prompt_file(tmp_path: Path) -> None:
    settings = JudgeConfig(template=template(tmp_path, "{prompt} {metadata.style}"))
    assert settings.required_metadata() == ("style",)


@pytest.mark.parametrize(
    ("text", "rest", "top", "message"),
    [
        ("Judge it.", RANGE, "", "text: got a text without {prompt}"),
        ("{prompt}", RANGE, "ignores_prompt = true", "got {prompt} and ignores_prompt = true"),
        ("{prompt} {first}", RANGE, "", "got one of {first} and {second}, expected both or none"),
        ("{promt}", RANGE, "", r"got {promt}, expected {prompt} or {metadata.KEY}"),
        ("{prompt}", "[scores.score]\nweight = 1\n", "", "scores.score: range: missing"),
        ("{prompt}", "[scores.score]\nrange = [5, 1]\n", "", "range: got [5, 1], expected two numbers"),
        ("{prompt}", "[scores.score]\nrange = [1, nan]\n", "", "range: got [1, nan]"),
        ("{prompt}", "[scores.score]\nrange = [1, 5]\nzero = 2\n", "", "zero: got 2, expected a number of at most 1"),
        ("{prompt}", "[scores.score]\nrange = [1, 5]\nweight = 0\n", "", "weight: got 0"),
        ("{prompt}", "[scores.score]\nrange = [1, 5]\nmarker = 'x'\n", "", "marker: got one with answer"),
        ("{prompt}", "[scores.score]\nrange = [1, 5]\nmax = 5\n", "", "got the key 'max'"),
        ("{prompt}", "[scores]\n", "", "scores: got none"),
        ("{prompt}", "", "", "scores: got nothing"),
        ("{prompt}", RANGE, "needs_source = 'yes'", "needs_source: got 'yes', expected true or false"),
        ("{prompt}", RANGE, "prompt = 1", "got the key 'prompt'"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(
    tmp_path: Path, text: str, rest: str, top: str, message: str
) -> None:
    file = template(tmp_path, text, rest, top=top)
    with pytest.raises(RecipeError) as caught:
        load(file, key="reward.mine.template")
    assert str(caught.value).startswith("reward.mine.template: mine.toml: ")
    assert message in str(caught.value)
    (reason,) = JudgeConfig(template=file).problems(None, None)
    assert reason.key == ".template"


def test_missing_and_broken_template_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"k: there is no file .* or one of edit-judge, general, .*wise"):
        load("generall", key="k")
    with pytest.raises(RecipeError, match="cannot be read as TOML"):
        load(written(tmp_path, "version = "), key="k")
    with pytest.raises(RecipeError, match=r"version: got 2, expected a text"):
        load(written(tmp_path, "version = 2\nanswer = 'json'\ntext = '{prompt}'\n" + RANGE), key="k")
    with pytest.raises(RecipeError, match="pattern: got 2 groups, expected one"):
        scores = "[scores.a]\nrange = [1, 2]\npattern = '(a)(b)'\n"
        load(template(tmp_path, "{prompt}", scores, answer="marker"), key="k")


def test_a_judge_that_is_not_shown_the_prompt_says_so(tmp_path: Path) -> None:
    rule = load(template(tmp_path, "How sharp is it?", top="ignores_prompt = true"), key="k")
    assert rule.filled("a cat", {}) == "How sharp is it?"


def test_paths_are_files_and_other_names_are_templates_of_the_plugin(tmp_path: Path) -> None:
    assert path_of(str(tmp_path / "general.toml")) == tmp_path / "general.toml"
    assert path_of("general").is_file()


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"answer": "expected", "base_url": "http://localhost:1/v1"}, ".answer"),
        ({"base_url": "localhost:8000"}, ".base_url"),
        ({"cache": "answers.sqlite"}, ".cache"),
        ({"max_calls": 3}, ".max_calls"),
        ({"api_key_env": "KEY"}, ".api_key_env"),
        ({"extra_body": {"top_k": 1}}, ".extra_body"),
        ({"model": ""}, ".model"),
        ({"base_url": "http://localhost:1/v1", "cache": "/nowhere/at/all.sqlite"}, ".cache"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(settings: dict[str, object], key: str) -> None:
    assert [reason.key for reason in JudgeConfig(**settings).problems(None, None)] == [key]  # pyright: ignore[reportArgumentType]


def test_a_pairwise_template_has_one_score(tmp_path: Path) -> None:
    assert [reason.key for reason in PairwiseConfig(template="wise").problems(None, None)] == [".template"]


def test_completions_are_compared_by_a_template_that_shows_both_and_pictures_by_none() -> None:
    (reason,) = PairJudgeConfig(template="unified-reward-pairwise").problems(None, None)
    assert (reason.key, reason.text) == (
        ".template",
        "got a text without {first} and {second}, expected both of them.",
    )
    (reason,) = PairwiseConfig(template="pair-judge").problems(None, None)
    assert reason.text == "got a text with {first} and {second}, expected none of them."


def test_expected_scores_need_whole_numbers(tmp_path: Path) -> None:
    file = template(tmp_path, "{prompt}", "[scores.score]\nrange = [0, 0.5]\n")
    (reason,) = JudgeConfig(template=file, answer="expected").problems(None, None)
    assert reason.key == ".answer"


def test_the_template_that_the_docs_show_reads_its_own_answer(tmp_path: Path) -> None:
    page = Path(__file__).parents[4] / "docs" / "how-to" / "vlm-judges.md"
    file = tmp_path / "legible.toml"
    file.write_text(page.read_text().split("```toml\n")[1].split("```")[0])
    shown = load(str(file), key="k")
    assert shown.value(shown.parse("Legibility: 3") or ()) == 0.75
    assert shown.metadata_keys == ("text",)
