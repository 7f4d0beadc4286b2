"""An engine that can sleep does while this process trains, and only then."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from loop_toy import ToyBackend, ToyEngine, parts, plan, run
from plans import changed
from unirl.core.match.asynchrony import asynchrony
from unirl.core.roles import WeightReceipt, WeightUpdate
from unirl.core.specs.capability import Cap
from unirl.core.specs.part_config import PartConfig
from unirl.core.specs.plan import Plan
from unirl.core.types.request import Request
from unirl.core.types.track import Track


class Sleeper(ToyEngine):
    """Notes what it is asked."""

    called: list[str]

    def generate(self, request: Request) -> Track:
        self.called.append("generate")
        return super().generate(request)

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        self.called.append("load_weights")
        return super().load_weights(update)

    def sleep(self) -> None:
        self.called.append("sleep")

    def wake(self) -> None:
        self.called.append("wake")


@dataclasses.dataclass
class Switched(PartConfig):
    sleep_mode: bool = False


def sleeping_plan(*, switched: bool, **run: Any) -> Plan:
    """Of an engine whose sleep is switched on by a setting."""
    result = plan(run={"max_steps": 2, **run})
    spec = dataclasses.replace(
        result.only.engine.spec,
        capabilities={Cap.WEIGHTS_FULL, Cap.SLEEP},
        enabled_by={Cap.SLEEP: {"sleep_mode": True}},
    )
    engine: Any = dataclasses.replace(result.only.engine, spec=spec, config=Switched(sleep_mode=switched))
    return changed(result, engine=engine)


@pytest.mark.parametrize("switched", [True, False])
def test_it_sleeps_while_the_process_trains(switched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called = list[str]()
    engine = Sleeper()
    engine.called = called
    backend = ToyBackend(during=lambda _: called.append("train"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("empty_cache"))
    own = dataclasses.replace(parts(engine=engine, backend=backend), device_name="a GPU")
    run(own, sleeping_plan(switched=switched))
    # Memory that training has freed goes back to the device before the engine takes it.
    step = ["load_weights", "generate", "sleep", "train", "empty_cache", "wake"]
    awake = [call for call in step if call in ("load_weights", "generate", "train")]
    assert called == 2 * (step if switched else awake)


def test_it_cannot_sleep_while_it_generates_ahead() -> None:
    reasons = {
        switched: [reason.text for reason in asynchrony(sleeping_plan(switched=switched, max_staleness=1))]
        for switched in (False, True)
    }
    # The toy algorithm takes no older samples either.
    added = set(reasons[True]) - set(reasons[False])
    assert len(added) == 1
    assert "engine 'own' sleeps meanwhile (engine.sleep_mode=true)" in added.pop()
