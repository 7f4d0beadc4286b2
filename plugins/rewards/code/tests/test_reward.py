"""The reward as a whole: what is code, which tests a prompt has, scores and parts, and what it refuses."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from unirl.core.errors import RecipeError, RewardFailed
from unirl.core.roles import ScoreInput, Scores
from unirl.core.types.inputs import Inputs
from unirl.core.types.media import Media
from unirl.rewards.code.config import UnitTestsConfig
from unirl.rewards.code.inside.compare import same_output, same_value
from unirl.rewards.code.layouts import read_tests
from unirl.rewards.code.plugin import UNIT_TESTS
from unirl.rewards.code.reward import build, code_of

CAN_UNSHARE = subprocess.run(["unshare", "-rnmp", "--fork", "true"], check=False, capture_output=True).returncode == 0
needs_namespaces = pytest.mark.skipif(not CAN_UNSHARE, reason="not run: this machine does not allow user namespaces")
ADD = "```python\ndef add(a, b):\n    return a + b\n```"


def score(texts: list[str], metadata: dict[str, Any] | list[dict[str, Any]], **settings: Any) -> Scores:
    rows = metadata if isinstance(metadata, list) else [metadata] * len(texts)
    names = tuple(f"s{row}" for row in range(len(texts)))
    reward = build(UnitTestsConfig(cpu_s=2, **settings), device="cpu")
    try:
        return reward.score(
            ScoreInput(
                sample_ids=names,
                group_ids=names,
                inputs=Inputs.of_texts(("Write it.",) * len(texts)),
                metadata=tuple(rows),
                media=Media(kind="text", values=tuple(texts)),
            )
        )
    finally:
        reward.close()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("A:\n```\nx = 1\n```\nB:\n```py\ny = 2\n```\nDone.", "y = 2\n"),
        ("~~~\nx = 1\n~~~", "x = 1\n"),
        ("````md\n```\nx\n```\n````", "```\nx\n```\n"),
        ("x = 1", None),
        ("```python\nx = 1", None),
        ("```python\nx = 1\n```\n```python\ny = ", "x = 1\n"),
        ("<think>```python\nx = 1\n```</think>Like that.", None),
        ("<think>No.</think>\n```python\ny = 2\n```", "y = 2\n"),
        ("", None),
    ],
)
def test_the_code_is_the_last_closed_block_of_the_answer(text: str, code: str | None) -> None:
    assert code_of(text) == code


PUBLISHED: dict[str, tuple[dict[str, Any], str]] = {
    "HumanEval": (
        {
            "tests": "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1.0, 2.0], 0.5) == False\n"
            "    assert candidate([1.0, 1.2], 0.5) == True\n",
            "entry_point": "close",
            "setup": "from typing import List\n",
        },
        "def close(numbers: List[float], threshold: float) -> bool:\n    return abs(numbers[0] - numbers[1]) < threshold",
    ),
    "MBPP": (
        {"tests": ["assert first((1, 2)) == 1", "assert first([3]) == 3"], "setup": "import math"},
        "def first(items):\n    return items[0]",
    ),
    "APPS, programs": (
        {"tests": json.dumps({"inputs": ["3\n1 2 3\n", ["1", "5"]], "outputs": ["6\n", ["5"]]})},
        "input()\nprint(sum(map(int, input().split())))",
    ),
    "TACO, calls": (
        {"tests": {"fn_name": "double", "inputs": [[2], [[1]]], "outputs": [4, [[1, 1]]]}},
        "def double(x):\n    return x * 2",
    ),
    "LiveCodeBench, programs": (
        {"tests": [{"input": "2\n", "output": "4", "testtype": "stdin"}]},
        "print(int(input()) * 2)",
    ),
    "LiveCodeBench, calls": (
        {
            "tests": json.dumps([{"input": '[1, 2]\n"x"', "output": '["x", 3]', "testtype": "functional"}]),
            "entry_point": "pair",
        },
        "class Solution:\n    def pair(self, items, name):\n        return (name, sum(items))",
    ),
    "plain asserts": ({"tests": "n = 2\nassert f(n) == 4\nassert f(3) == 9"}, "def f(n):\n    return n * n"),
}


@needs_namespaces
@pytest.mark.parametrize("layout", PUBLISHED)
def test_tests_in_the_layouts_of_published_sets_tell_right_from_wrong(layout: str) -> None:
    metadata, code = PUBLISHED[layout]
    name = code.split("def ")[-1].split("(")[0]
    texts = [f"```python\n{code}\n```", f"```python\ndef {name}(*args):\n    return None\nprint()\n```", code]
    scores = score(texts, metadata)
    assert scores.values.tolist() == [1, 0, 0]
    assert scores.parts["no-code"].tolist() == [0, 0, 1]


@needs_namespaces
def test_the_score_is_the_share_of_passed_tests_or_all() -> None:
    tests = {
        "tests": ["assert add(1, 2) == 3", "assert add(1, 2) == 4", "assert add(1) == 1", "while add(0, 1): add(1, 1)"]
    }
    # The last one never ends, and runs out of wall or of CPU time.
    scores = score([ADD, "no code"], tests, wall_s=3)
    assert scores.values.tolist() == [0.25, 0]
    assert {name: values.tolist() for name, values in scores.parts.items()} == {
        "passed": [0.25, 0],
        "timeouts": [0.25, 0],
        "errors": [0.25, 0],
        "no-code": [0, 1],
        "broken": [0, 0],
    }
    assert sorted(scores.parts) == sorted(UNIT_TESTS.parts)
    assert score([ADD], {"tests": tests["tests"][:2]}, score="all").values.tolist() == [0]
    assert score([ADD], {"tests": tests["tests"][:1]}, score="all").values.tolist() == [1]


@needs_namespaces
def test_samples_keep_their_order_whatever_they_take() -> None:
    texts = [f"```\nimport time\ntime.sleep({(5 - n) / 10})\ndef f():\n    return {n}\n```" for n in range(6)]
    rows = [{"tests": f"assert f() == {n}" if n % 2 else "assert f() == 7"} for n in range(6)]
    assert score(texts, rows, workers=3).values.tolist() == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"tests": []}, "is empty"),
        ({"tests": 3}, "is int, expected text"),
        ({"tests": "f() == 1"}, "has no assert"),
        ({"tests": "assert ("}, "not Python"),
        ({"tests": ["assert ("]}, "not Python"),
        ({"tests": "{"}, "is not JSON"),
        ({"tests": {"inputs": ["1"], "outputs": []}}, "two lists of one length"),
        ({"tests": {"inputs": [1], "outputs": ["1"]}}, "expected text"),
        ({"tests": [{"input": "1"}]}, "`input` and `output`"),
        ({"tests": [{"input": "1", "output": "1", "testtype": "functional"}]}, "entry_point"),
        ({"tests": [{"input": "x", "output": "1", "testtype": "functional"}], "entry_point": "f"}, "line by line"),
    ],
)
def test_tests_that_cannot_be_read_are_refused(metadata: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_tests(metadata)


@needs_namespaces
def test_a_sample_with_unreadable_tests_is_named() -> None:
    with pytest.raises(RewardFailed, match=r"metadata 'tests' of sample 's0'.*is missing"):
        score([ADD], {})
    with pytest.raises(RewardFailed, match=r"metadata 'tests' of sample 's0'.*is empty"):
        score([ADD], {"tests": []})


@pytest.mark.parametrize(
    ("result", "expected", "tolerance", "same"),
    [
        ("4\n", "4", 0, True),
        ("4 \n\n", "4", 0, True),
        ("1 2\n3", "1 2\n3\n", 0, True),
        ("1  2", "1 2", 0, True),
        (" 4", "4", 0, True),
        ("4.0", "4", 0, True),
        ("0.333", "0.3333", 0, False),
        ("0.333", "0.3333", 1e-3, True),
        ("100.1", "100", 1e-2, True),
        ("nan", "4", 0, False),
        ("inf", "1e5", 1e-2, False),
        ("4\n5", "4", 0, False),
        ("", "4", 0, False),
        ("Yes", "YES", 0, False),
    ],
)
def test_outputs_are_compared_by_lines_and_numbers(result: str, expected: str, tolerance: float, same: bool) -> None:
    assert same_output(result, expected, tolerance=tolerance) is same


@pytest.mark.parametrize(
    ("result", "expected", "same"),
    [
        ((1, [2]), [1, [2]], True),
        (1.0, 1, True),
        (True, 1, False),
        (float("nan"), 1, False),
        ("1", 1, False),
        ({1: 2}, {"1": 2}, True),
        ([1], [1, 2], False),
        (None, None, True),
    ],
)
def test_results_are_compared_as_json(result: Any, expected: Any, same: bool) -> None:
    assert same_value(result, expected, tolerance=0) is same


def test_settings_of_another_isolation_are_refused() -> None:
    for settings in ({"command": ["docker"]}, {"isolation": "command"}, {"isolation": "none"}):
        with pytest.raises(RecipeError, match=r"reward\.unit-tests\.(command|isolation)"):
            build(UnitTestsConfig(**settings), device="cpu")
