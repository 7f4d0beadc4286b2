"""The policy that samples: the one that the algorithm names, on this engine."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from unirl.conformance.claims import claim
from unirl.conformance.doubles.rollouts import make_rollout
from unirl.conformance.fixtures.cell import CellCase
from unirl.conformance.verdicts import NotApplicable
from unirl.core.roles import DiffusionModel, Engine, Policy, WeightReceipt, WeightUpdate, diffusion_model
from unirl.core.types.request import Request
from unirl.core.types.track import Track
from unirl.loop.parts import sync_weights
from unirl.loop.requests import step_requests

SHARE = 0.01
"""How far samples may be from those of the right policy, as a share of the distance to those of the live one. Rounding
leaves 1e-4 of it and less."""


@claim("cell")
def test_rollouts_come_from_the_policy_whose_samples_are_trained_on(case: CellCase) -> None:
    """An algorithm that trains on samples of a lagged policy gets just those: after an update the latents are those of
    the lagged policy, not of the live one, and an engine with separate weights holds the lagged ones by checksum.

    If it fails: an engine that shares the module samples inside `Backend.policy(...)`, others are sent
    `export_weights(policy=...)`; see `unirl.loop.parts.sync_weights`.
    """
    sampler: Policy = case.algorithm.needs.sampler
    if sampler == "live":
        raise NotApplicable(f"algorithm {case.algorithm.name!r} trains on samples of the live policy")
    with case.cell(lr=1e-2) as cell:
        engine = _Noting(cell.engine)
        cell = dataclasses.replace(cell, parts=dataclasses.replace(cell.parts, engines={cell.track: engine}))
        backend, model = cell.backend, diffusion_model(cell.parts.only.model)
        cell.train(cell.with_advantages(cell.rollout(0)))
        backend.end_rollout()
        sync_weights(cell.parts, cell.plan)
        (request,) = step_requests(cell.parts, cell.plan, cell.prompts, step=1).values()
        result = cell.rollout(1)
        lagged, live = (_sampled(backend.policy(policy), model, request) for policy in (sampler, "live"))
        if not case.shares_weights:
            assert engine.receipt is not None and engine.update is not None, "the engine was sent no weights"
            expected = backend.export_weights(policy=sampler, kind=engine.update.kind).checksum
            assert engine.receipt.checksum == expected, (
                f"the engine holds weights with checksum {engine.receipt.checksum}; those of the {sampler} policy have "
                f"{expected}"
            )
    distance = float((live - lagged).abs().max())
    assert distance > 0, f"one update left the live policy and the {sampler} one alike, so nothing can be told"
    gap = float((result.latent.final.cpu() - lagged).abs().max())
    case.record(
        f"distance to samples of the {sampler} policy, as a share of that to the live one", gap / distance, bound=SHARE
    )


def _sampled(inside: object, model: DiffusionModel, request: Request) -> Tensor:
    with inside, torch.no_grad():  # type: ignore[attr-defined]  # a context manager
        return make_rollout(model, request).latent.final.cpu()


class _Noting:
    """An engine, and the last weights that it was sent."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.update: WeightUpdate | None = None
        self.receipt: WeightReceipt | None = None

    @property
    def version(self) -> int:
        return self._engine.version

    @version.setter
    def version(self, value: int) -> None:
        self._engine.version = value

    def generate(self, request: Request) -> Track:
        return self._engine.generate(request)

    def load_weights(self, update: WeightUpdate) -> WeightReceipt:
        self.update, self.receipt = update, self._engine.load_weights(update)
        return self.receipt

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()

    def close(self) -> None:
        self._engine.close()
