"""Settings of an engine that trade numbers for speed or memory."""

from __future__ import annotations

from unirl.conformance.claims import claim
from unirl.conformance.fixtures.engine import EngineCase
from unirl.conformance.verdicts import NotApplicable
from unirl.core.types.request import Request


@claim("engine", track="any")
def test_settings_that_round_rollouts_keep_their_bound(case: EngineCase) -> None:
    """With each setting that an engine in process declares as an acceleration, such as a cache of prompts, the samples
    of a request, and of the same request again, stay within the declared error; one that is declared to lose nothing
    gives the same bits. What external engines declare is measured in every run, as the log-prob mismatch.

    If it fails: look for a cache that finds values of another prompt, or values that were made in another batch; or
    declare the error that it has in `accelerations` of the config.
    """
    if case.spec.environment:
        raise NotApplicable(f"engine {case.spec.name!r} is external; runs measure its mismatch")
    model = case.fresh_model()
    request: Request = case.deterministic_request(model)
    for settings, bound in case.accelerations():
        ((key, value),) = settings.items()
        # A number or a flag is off at zero, also where it is on by default.
        off = {} if isinstance(value, str) else {key: type(value)()}
        with case.engine(model, **off) as engine:
            expected = case.sample(engine, request)
        with case.engine(model, **settings) as engine:
            gap = max(case.moved(case.sample(engine, request), expected) for _ in range(2))
        case.record(f"{key}={value}", gap, bound=bound)
