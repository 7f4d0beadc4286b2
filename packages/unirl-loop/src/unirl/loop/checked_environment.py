"""An environment whose every reply is checked, and whose calls end within their time limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

from unirl.core.errors import RunFailed, UniRLError
from unirl.core.roles import Environment, EpisodeFailed, Observation

from .time_limit import TimeLimitReached, within

if TYPE_CHECKING:
    from unirl.core.specs.part_config import EnvironmentConfig
    from unirl.core.specs.plan import Choice
    from unirl.core.specs.spec import EnvironmentSpec
    from unirl.core.types.inputs import Inputs

__all__ = ["CheckedEnvironment"]


class CheckedEnvironment:
    """Implements `unirl.core.roles.Environment` over one. Every failure is a RunFailed that names the environment, the
    turn and the sample: it raises, takes longer than `timeout_s`, leaves out an episode, or says nothing."""

    def __init__(self, environment: Environment, *, choice: Choice[EnvironmentSpec, EnvironmentConfig]) -> None:
        self.config = choice.config
        self._environment, self._key = environment, choice.key
        self._name = f"{choice.key}: {choice.name!r}"
        self._turn = 0

    def reset(
        self, inputs: Inputs, metadata: Sequence[Mapping[str, Any]], *, seeds: Sequence[int]
    ) -> Sequence[Observation]:
        self._turn = 0
        when, ids = "at the start of its episodes", inputs.ids
        reply = self._call(
            "reset", lambda: self._environment.reset(inputs, metadata, seeds=seeds), when=when, samples=ids
        )
        if not isinstance(reply, list | tuple) or len(cast("Sequence[object]", reply)) != len(ids):
            got = f"{len(cast('Sequence[object]', reply))} entries" if isinstance(reply, list | tuple) else _kind(reply)
            raise self._failed(f"reset() returned {got}, expected a list of {len(ids)} observations, one an episode.")
        observations = [
            self._observation(one, sample, when)
            for sample, one in zip(ids, cast("Sequence[object]", reply), strict=True)
        ]
        for sample, one in zip(ids, observations, strict=True):
            if one.done or one.reward:
                got = "done=True" if one.done else f"reward {one.reward:g}"
                raise self._failed(f"got {got} for sample {sample!r} {when}, expected neither before an answer.")
        return observations

    def step(self, answers: Mapping[str, str]) -> Mapping[str, Observation]:
        when = f"in turn {self._turn}"
        self._turn += 1
        reply = self._call("step", lambda: self._environment.step(answers), when=when, samples=[*answers])
        expected = f"expected a mapping with an observation for each of the {len(answers)} samples that answered."
        if not isinstance(reply, Mapping):
            raise self._failed(f"step() returned {_kind(reply)} {when}, {expected}")
        given = cast("Mapping[str, object]", reply)
        if lacking := [sample for sample in answers if sample not in given]:
            raise self._failed(f"step() returned no observation for sample {lacking[0]!r} {when}, {expected}")
        if further := [sample for sample in given if sample not in answers]:
            raise self._failed(f"step() returned an observation for {further[0]!r} {when}, {expected}")
        result = {sample: self._observation(given[sample], sample, when) for sample in answers}
        for sample, one in result.items():
            if not one.text and not one.done:
                raise self._failed(
                    f"got an empty observation for sample {sample!r} {when}, whose episode goes on; expected a text, "
                    "or done=True to end it."
                )
        return result

    def close(self) -> None:
        self._call("close", self._environment.close, when="at the end of the run", samples=())

    def _observation(self, one: object, sample: str, when: str) -> Observation:
        if not isinstance(one, Observation):
            raise self._failed(f"got {_kind(one)} for sample {sample!r} {when}, expected an Observation.")
        if not isinstance(cast("object", one.text), str):
            raise self._failed(f"got text {one.text!r} for sample {sample!r} {when}, expected a string.")
        if not isfinite(one.reward):
            raise self._failed(f"got reward {one.reward} for sample {sample!r} {when}, expected a finite number.")
        return one

    def _call(self, method: str, call: Callable[[], object], *, when: str, samples: Sequence[str]) -> object:
        others = f" or one of {len(samples) - 1} others" if len(samples) > 1 else ""
        whom = f", for sample {samples[0]!r}{others}" if samples else ""
        try:
            return within(self.config.timeout_s, call)
        except TimeLimitReached:
            raise self._failed(
                f"{method}() took longer than {self.config.timeout_s:g} s {when}{whom}. Mend it, or raise "
                f"{self._key}.timeout_s."
            ) from None
        except UniRLError:
            raise
        except EpisodeFailed as error:
            cause = error.__cause__ or error
            text = f"{method}() raised {type(cause).__name__}: {cause} {when}, for sample {error.sample!r}."
            raise self._failed(text) from cause
        except (Exception, SystemExit) as error:
            raise self._failed(f"{method}() raised {type(error).__name__}: {error} {when}{whom}.") from error

    def _failed(self, text: str) -> RunFailed:
        return RunFailed(f"{self._name}: {text}")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
