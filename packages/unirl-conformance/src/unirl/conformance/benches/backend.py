"""A backend over the kit's own denoiser: what claims about training need."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, cast

import torch
from unirl.core.capability import Cap, Support
from unirl.core.config import LatentSamplingConfig, SdeStepsConfig, TrainConfig
from unirl.core.errors import UniRLError
from unirl.core.roles import Backend, Policy
from unirl.core.spec import BackendSpec
from unirl.core.track import Track

from ..verdicts import NotApplicable
from ..workbench.model import WorkbenchModel
from ..workbench.requests import make_request
from ..workbench.rollouts import sample_track
from ..workbench.trainee import Trainee, Training
from .base import Bench

__all__ = ["GRADIENT", "BackendBench", "refuses"]

GRADIENT: Mapping[str, Any] = {"lr": 10.0, "betas": [0.0, 0.0], "eps": 1.0, "weight_decay": 0.0, "max_grad_norm": None}
"""Settings under which a step is w - 10 g / (|g| + 1): weights then show gradients, factors of them included, where
Adam would divide them away, and no rounding of a small gradient is blown up."""

CAPS: Mapping[Training, Cap] = {"full": Cap.TRAIN_FULL, "lora": Cap.TRAIN_LORA}
POLICIES: Mapping[Training, Mapping[Policy, Cap]] = {
    "full": {"reference": Cap.REFERENCE_COPY, "ema": Cap.EMA, "lagged": Cap.LAGGED_POLICY},
    "lora": {"reference": Cap.REFERENCE_ADAPTER_OFF, "ema": Cap.EMA, "lagged": Cap.LAGGED_POLICY},
}
"""What gives each policy under each way of training, as `unirl.core.match` has it."""


@dataclass(frozen=True, kw_only=True)
class BackendBench(Bench):
    @property
    def spec(self) -> BackendSpec:
        return cast(BackendSpec, self.subject.found("backend").spec)

    @property
    def trainings(self) -> tuple[Training, ...]:
        """The ways of training that the spec promises; claims that ask for no capability hold for each of them."""
        found: tuple[Training, ...] = tuple(training for training, cap in CAPS.items() if self.promises(cap))
        if not found:
            raise NotApplicable(f"backend {self.spec.name!r} states neither {Cap.TRAIN_FULL} nor {Cap.TRAIN_LORA}")
        return found

    @property
    def trainings_with_policies(self) -> tuple[Training, ...]:
        """Those under which the spec promises a policy besides the live one."""
        found: tuple[Training, ...] = tuple(training for training in self.trainings if self.extras(training))
        if not found:
            raise NotApplicable(f"backend {self.spec.name!r} promises no policy besides the live one")
        return found

    def promises(self, cap: Cap) -> bool:
        return self.spec.support(cap) is Support.NATIVE

    def config(self, training: Training, *caps: Cap, **settings: Any) -> Any:
        """A config that trains so and has these capabilities switched on."""
        laid: dict[str, Any] = {"trains": training}
        for cap in (CAPS[training], *caps):
            laid |= self.spec.enabled_by.get(cap, {})
        return self.workshop.config(self.subject.found("backend"), {**laid, **settings})

    def extras(self, training: Training) -> tuple[Cap, ...]:
        """Whatever gives a further policy under this way of training, as far as the spec promises it."""
        return tuple(cap for cap in POLICIES[training].values() if self.promises(cap))

    def policies(self, training: Training, config: Any) -> tuple[Policy, ...]:
        """The policies besides the live one that a config keeps: those whose `enabled_by` it has, or that need none."""

        def is_on(cap: Cap) -> bool:
            settings = self.spec.enabled_by.get(cap, {})
            return self.promises(cap) and all(attrgetter(key)(config) == value for key, value in settings.items())

        return tuple(policy for policy, cap in POLICIES[training].items() if is_on(cap))

    @contextmanager
    def backend(
        self,
        training: Training,
        *caps: Cap,
        model: WorkbenchModel | None = None,
        train: TrainConfig | None = None,
        seed: int = 3,
        **settings: Any,
    ) -> Iterator[Trainee]:
        """A backend over a model of its own, closed at the end. caps: to switch on; settings: of its config."""
        found = self.subject.found("backend")
        config = self.config(training, *caps, **settings)
        mine = model or self.model()
        plain = {name: param.detach().clone() for name, param in mine.net.named_parameters()}
        backend: Backend = self.workshop.build(
            found, config, model=mine, train=train or TrainConfig(), steps=100, seed=seed
        )
        try:
            yield Trainee(
                backend=backend,
                model=mine,
                training=training,
                policies=self.policies(training, config),
                plain=plain,
            )
        finally:
            backend.close()

    def model(self) -> WorkbenchModel:
        """The kit's denoiser, each time with the same weights."""
        return WorkbenchModel(device=self.device)

    def track(self, number: int = 0) -> Track:
        """Six rows in two groups, sampled with the initial weights, with advantages of all sizes; numbers differ."""
        return copy.deepcopy(_sampled(self.device, number))


@cache
def _sampled(device: str, number: int) -> Track:
    model = WorkbenchModel(device=device)
    sampling = LatentSamplingConfig(
        steps=4, height=24, width=16, decode=False, sde=SdeStepsConfig(mode="fixed", steps=[0, 2])
    )
    track = sample_track(model, make_request(model, {"image": sampling}, rollout=number), "image")
    advantages = torch.tensor([1.3, -0.4, 0.7, -1.9, 0.2, 1.1], device=model.device)
    return dataclasses.replace(track, advantages=advantages.roll(number))


@contextmanager
def refuses(kind: type[UniRLError], what: str) -> Iterator[None]:
    """Fails unless the block raises an error of this kind. what: what was asked, as the start of a sentence."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"{what} is not refused; a {kind.__name__} that says why is expected")
