"""Every reply of an environment is checked, and none takes longer than its limit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from unirl.core.errors import RunFailed
from unirl.core.roles import EpisodeFailed, Observation
from unirl.core.specs.part_config import EnvironmentConfig
from unirl.core.specs.plan import Choice
from unirl.core.specs.spec import EnvironmentExample, EnvironmentSpec
from unirl.core.types.inputs import Inputs
from unirl.loop.checked_environment import CheckedEnvironment

SPEC = EnvironmentSpec(
    name="toy", summary="toy", build="toy:build", config="toy:Config", examples=(EnvironmentExample(answers=("a",)),)
)
INPUTS = Inputs.of_texts(["one", "two"])
LIMIT_S = 0.2


class Toy:
    """Replies what it is given."""

    def __init__(self, *, start: Any = None, reply: Callable[[Mapping[str, str]], Any] | None = None) -> None:
        self._start, self._reply = start, reply

    def reset(self, inputs: Inputs, metadata: Sequence[Mapping[str, Any]], *, seeds: Sequence[int]) -> Any:
        return [Observation()] * inputs.num_rows if self._start is None else self._start

    def step(self, answers: Mapping[str, str]) -> Any:
        return {name: Observation(text="go on") for name in answers} if self._reply is None else self._reply(answers)

    def close(self) -> None:
        pass


def checked(**replies: Any) -> CheckedEnvironment:
    config = EnvironmentConfig(timeout_s=LIMIT_S)
    choice = Choice(key="environment", spec=SPEC, config=config, dist="toy", version="1")
    return CheckedEnvironment(Toy(**replies), choice=choice)


def raising(_: Mapping[str, str]) -> Any:
    raise ValueError("no such tool")


def raising_for_one(_: Mapping[str, str]) -> Any:
    raise EpisodeFailed("two") from ValueError("no such tool")


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (raising, "step() raised ValueError: no such tool in turn 1, for sample 'one' or one of 1 others."),
        (raising_for_one, "step() raised ValueError: no such tool in turn 1, for sample 'two'."),
        (lambda _: None, "step() returned None in turn 1, expected a mapping with an observation for each of the 2"),
        (lambda _: {"one": Observation(done=True)}, "step() returned no observation for sample 'two' in turn 1"),
        (
            lambda a: {**dict.fromkeys(a, Observation(done=True)), "three": Observation()},
            "step() returned an observation for 'three' in turn 1",
        ),
        (lambda a: dict.fromkeys(a, "text"), "got a str for sample 'one' in turn 1, expected an Observation."),
        (lambda a: dict.fromkeys(a, Observation(text=1)), "got text 1 for sample 'one' in turn 1, expected a string."),  # type: ignore[arg-type]
        (
            lambda a: dict.fromkeys(a, Observation(text="x", reward=float("nan"))),
            "got reward nan for sample 'one' in turn 1, expected a finite number.",
        ),
        (
            lambda a: dict.fromkeys(a, Observation()),
            "got an empty observation for sample 'one' in turn 1, whose episode goes on; expected a text, or done=True",
        ),
    ],
)
def test_a_wrong_reply_names_the_environment_the_sample_and_the_turn(
    reply: Callable[[Mapping[str, str]], Any], expected: str
) -> None:
    environment = checked(reply=lambda answers: dict.fromkeys(answers, Observation(text="x")))
    environment.reset(INPUTS, [{}, {}], seeds=[0, 0])
    environment.step({"one": "", "two": ""})
    environment._environment = Toy(reply=reply)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(RunFailed) as caught:
        environment.step({"one": "", "two": ""})
    assert str(caught.value).startswith(f"environment: 'toy': {expected}")


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ([Observation()], "reset() returned 1 entries, expected a list of 2 observations"),
        ("ab", "reset() returned a str, expected a list of 2 observations"),
        ([Observation(), Observation(done=True)], "got done=True for sample 'two' at the start of its episodes"),
        ([Observation(reward=1.0), Observation()], "got reward 1 for sample 'one' at the start of its episodes"),
    ],
)
def test_a_wrong_start_says_what_was_expected(start: Any, expected: str) -> None:
    with pytest.raises(RunFailed) as caught:
        checked(start=start).reset(INPUTS, [{}, {}], seeds=[0, 0])
    assert str(caught.value).startswith(f"environment: 'toy': {expected}")


def test_a_hanging_step_ends_by_name_within_its_limit() -> None:
    """The step never returns by itself, so only the limit can end it."""
    ended = threading.Event()

    def hang(answers: Mapping[str, str]) -> Any:
        ended.wait()

    environment = checked(reply=hang)
    environment.reset(INPUTS, [{}, {}], seeds=[0, 0])
    try:
        with pytest.raises(RunFailed) as caught:
            environment.step({"two": ""})
    finally:
        ended.set()
    assert str(caught.value) == (
        "environment: 'toy': step() took longer than 0.2 s in turn 0, for sample 'two'. Mend it, or raise "
        "environment.timeout_s."
    )
