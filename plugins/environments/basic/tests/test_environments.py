"""What the environments say, by hand-made episodes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from unirl.core.errors import RecipeError
from unirl.core.roles import Environment, EpisodeFailed, Observation
from unirl.core.types.inputs import Inputs
from unirl.environments.basic import calculator, function, grid, gym
from unirl.environments.basic.arithmetic import CannotCompute, value_of
from unirl.environments.basic.config import CalculatorConfig, FunctionConfig, GridConfig, GymnasiumConfig


def started(environment: Environment, *, seed: int = 0, metadata: dict[str, Any] | None = None) -> Observation:
    inputs = dataclasses.replace(Inputs.of_texts(["prompt"]), ids=("sample",))
    return environment.reset(inputs, [metadata or {}], seeds=[seed])[0]


def told(environment: Environment, answer: str) -> Observation:
    return environment.step({"sample": answer})["sample"]


def failing(environment: Environment, answer: str) -> str:
    """The message of the error of the only episode."""
    with pytest.raises(EpisodeFailed) as caught:
        told(environment, answer)
    assert caught.value.sample == "sample"
    return str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("47*85", "3995"),
        (" 1,234 + 1 ", "1235"),
        ("(2+3)^2 - -1", "26"),
        ("1/3", "0.333333333333"),
        ("7 // 2 + 7 % 4", "6"),
        ("2**-2", "0.25"),
        ("0.1+0.2", "0.3"),
        ("2**200 % 1000", str(pow(2, 200, 1000))),
        ("1e3", "1000"),
    ],
)
def test_an_expression_has_its_value(expression: str, value: str) -> None:
    assert value_of(expression) == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("7/0", "division by zero"),
        ("9**9**9", "the number is too large"),
        ("9**9**9**9**9", "the number is too large"),
        ("1e400", "the number is too large"),
        ("(-8)**0.5", "not a real number"),
        ("__import__('os')", "not an arithmetic expression"),
        ("1,2", "not an arithmetic expression"),
        ("(" * 400, "not an arithmetic expression"),
        ("", "not an arithmetic expression"),
        ("1+" * 600 + "1", "the expression has 1201 characters, at most 1000 are allowed"),
    ],
)
def test_what_is_no_arithmetic_is_refused_with_a_reason(expression: str, why: str) -> None:
    with pytest.raises(CannotCompute, match=why):
        value_of(expression)


def test_the_calculator_answers_each_call_and_ends_without_one() -> None:
    environment = calculator.build(CalculatorConfig(call_reward=0.25, error_reward=-1.0))
    assert started(environment) == Observation()
    assert told(environment, "so <calc>2*3</calc>, and <calc>4-5</calc>") == Observation(text="6\n-1", reward=0.25)
    assert told(environment, "<calc>x</calc>") == Observation(text="error: not an arithmetic expression", reward=-1.0)
    # Where the closing marker is a stop string, answers come without it.
    assert told(environment, "so <calc>2*3").text == "6"
    assert told(environment, "It is 6.") == Observation(done=True)


def test_the_calculator_takes_calls_as_instruct_models_write_them() -> None:
    environment = calculator.build(CalculatorConfig(opens="<tool_call>", closes="</tool_call>"))
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*12"}}\n</tool_call>'
    assert told(environment, call).text == "144"
    assert told(environment, '<tool_call>{"name": 1}</tool_call>').text.startswith("error: expected")


def test_the_grid_is_walked_to_its_goal() -> None:
    """Along a way that is searched for on the board, for a hundred boards: each has one, and ends with reward 1."""
    for seed in range(100):
        environment = grid.build(GridConfig(size=4, holes=4, step_reward=-0.5))
        board = started(environment, seed=seed).text.split("\n")
        marks = {mark: [(r, c) for r in range(4) for c in range(4) if board[r][c] == mark] for mark in "@GO"}
        assert [len(marks[mark]) for mark in "@GO"] == [1, 1, 4]
        way = shortest(marks["@"][0], marks["G"][0], set(marks["O"]))
        observations = [told(environment, f"I go {move}.") for move in way]
        assert [one.reward for one in observations] == [-0.5] * (len(way) - 1) + [1.0]
        assert [one.done for one in observations] == [False] * (len(way) - 1) + [True]


def shortest(start: tuple[int, int], goal: tuple[int, int], holes: set[tuple[int, int]]) -> Sequence[str]:
    steps = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
    for length in itertools.count(1):
        for way in itertools.product(steps, repeat=length):
            at = start
            for number, move in enumerate(way):
                at = (at[0] + steps[move][0], at[1] + steps[move][1])
                if not (0 <= at[0] < 4 and 0 <= at[1] < 4) or at in holes or (at == goal and number + 1 < length):
                    break
            else:
                if at == goal:
                    return way
    raise AssertionError


def test_a_hole_and_giving_up_end_the_game() -> None:
    environment = grid.build(GridConfig(size=2, holes=1))
    ends = set()
    for seed in range(20):
        for move in ("left", "right", "up", "down"):
            started(environment, seed=seed)
            one = told(environment, move)
            ends.add((one.text.split("\n")[0] if one.done else "", one.reward, one.done))
    assert ends == {("", 0.0, False), ("You are there.", 1.0, True), ("You fell into a hole.", 0.0, True)}
    started(environment)
    assert told(environment, "What?").text.startswith("Say up, down, left, right or stop.\n")
    assert told(environment, "I stop.").done


def test_a_function_gets_the_arguments_that_it_names(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def reply(answer, turn, number):\n"
        "    if answer == 'bad': return [1]\n"
        "    if answer == 'end': return None\n"
        "    return (f'{answer} {turn} {number}', 0.5) if turn else 'first'\n"
    )
    environment = function.build(FunctionConfig(target=f"{file}:reply"))
    assert started(environment, metadata={"number": 7, "other": 1}) == Observation()
    assert told(environment, "a") == Observation(text="first")
    assert told(environment, "b") == Observation(text="b 1 7", reward=0.5)
    assert failing(environment, "bad").startswith("function 'reply' returned [1], expected a text")
    assert told(environment, "end") == Observation(done=True)
    started(environment)
    expected = "function 'reply' takes 'number', expected one of answer, prompt, seed, turn."
    assert failing(environment, "a") == expected
    with pytest.raises(RecipeError, match="has no function 'repli'; did you mean 'reply'"):
        function.build(FunctionConfig(target=f"{file}:repli"))


def test_an_error_names_the_sample(tmp_path: Path) -> None:
    file = tmp_path / "failing.py"
    file.write_text("def reply(answer):\n    return 1 // 0\n")
    environment = function.build(FunctionConfig(target=f"{file}:reply"))
    started(environment)
    assert failing(environment, "a") == "integer division or modulo by zero"


def test_without_gymnasium_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gymnasium", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        gym.build(GymnasiumConfig(id="Blackjack-v1"))
    expected = "The environment `gymnasium` needs one more package: pip install 'unirl-environment-basic[gymnasium]'"
    assert caught.value.__notes__ == [expected]


def test_an_environment_of_gymnasium_is_played_by_the_names_of_its_actions() -> None:
    """Against gymnasium itself, with the same seed."""
    gymnasium: Any = pytest.importorskip("gymnasium")
    config = GymnasiumConfig(id="Blackjack-v1", actions=["stick", "hit"])
    environment = gym.build(config)
    for seed in range(5):
        own = gymnasium.make("Blackjack-v1")
        first, _ = own.reset(seed=seed)
        assert started(environment, seed=seed).text == str(first)
        assert told(environment, "hm") == Observation(text="Say stick, hit.")
        observation, reward, ended, _, _ = own.step(0)
        assert told(environment, "no hit, I stick") == Observation(
            text=str(observation), reward=float(reward), done=ended
        )
    with pytest.raises(RecipeError, match=r"environment\.id: got 'Nothing-v0'"):
        gym.build(GymnasiumConfig(id="Nothing-v0"))
    with pytest.raises(RecipeError, match=r"environment\.actions: got 1 names, expected 2"):
        gym.build(GymnasiumConfig(id="Blackjack-v1", actions=["stick"]))
