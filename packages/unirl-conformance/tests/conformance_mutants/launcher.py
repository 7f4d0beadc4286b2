"""Launchers that are broken in one way each, next to the one that builds everything in this process."""

from __future__ import annotations

import atexit
import dataclasses
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from unirl.algorithms.flow_grpo.plugin import unirl_algorithms
from unirl.backends.fsdp2.plugin import SPEC as FSDP2
from unirl.conformance.doubles import model as latent_model
from unirl.core.errors import UniRLError
from unirl.core.plugins.catalog import Catalog
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.plan import Plan
from unirl.engines.trainside.plugin import SPEC as TRAINSIDE
from unirl.launchers.ray.config import LocalConfig
from unirl.loop.local_launcher import LocalLauncher
from unirl.loop.parts import Parts
from unirl.runtime.plugin import LOCAL

from conformance_mutants.mutant import mutant, mutants_in


@mutant(claim="a-launched-run-gives-the-numbers-of-one-process", breaks="builds the parts under another seed")
class DrawsItsOwnSeed(LocalLauncher):
    def launch(self, plan: Plan, *, catalog: Catalog) -> Parts:
        return super().launch(
            dataclasses.replace(plan, run=dataclasses.replace(plan.run, seed=plan.run.seed + 1)), catalog=catalog
        )


@mutant(claim="checkpoints-move-between-launchers", breaks="does not pass on that a checkpoint is to be loaded")
class LoadsNothing(LocalLauncher):
    def launch(self, plan: Plan, *, catalog: Catalog) -> Parts:
        parts = super().launch(plan, catalog=catalog)

        def load(folder: Path) -> None:
            assert folder.exists()

        parts.only.backend.load = load  # type: ignore[method-assign]
        return parts


@mutant(claim="errors-of-parts-keep-their-type-and-message", breaks="raises an error of its own for those of parts")
class WrapsErrors(LocalLauncher):
    def launch(self, plan: Plan, *, catalog: Catalog) -> Parts:
        parts = super().launch(plan, catalog=catalog)
        for reward in parts.rewards.values():
            reward.score = _wrapped(reward.score)  # type: ignore[method-assign]
        return parts


def _wrapped(score: Any) -> Any:
    def call(samples: Any) -> Any:
        try:
            return score(samples)
        except UniRLError as error:
            raise RuntimeError("a worker failed") from error

    return call


class Starts(LocalLauncher):
    """With a process of its own, which closing ends."""

    def __init__(self, config: LocalConfig) -> None:
        super().__init__(config)
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self, plan: Plan, *, catalog: Catalog) -> Parts:
        # Not for ever: the tests have to end.
        self.process = subprocess.Popen(["sleep", "60"])
        return super().launch(plan, catalog=catalog)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@mutant(claim="a-launch-that-fails-leaves-nothing-behind", breaks="leaves a process behind when a part cannot be built")
class ForgetsWhatFailed(Starts):
    """Ends its process in `close` alone."""


@mutant(claim="a-closed-launcher-leaves-nothing-behind", breaks="forgets a process when it is closed")
class LeavesOneBehind(Starts):
    def launch(self, plan: Plan, *, catalog: Catalog) -> Parts:
        try:
            return super().launch(plan, catalog=catalog)
        except BaseException:
            super().close()
            raise

    def close(self) -> None:
        if self.process is not None:
            # The handle stays alive, or its end would warn in the middle of another claim.
            atexit.register(self.process.kill)
            self.process = None


BROKEN = mutants_in(__name__)
MUTANTS = list(BROKEN.values())


def build(config: LocalConfig) -> LocalLauncher:
    """The launcher that the config's `use` names."""
    return next(kind for kind, mutant in BROKEN.items() if mutant.name == config.use)(config)


def catalog() -> Catalog:
    specs = [dataclasses.replace(LOCAL, name=mutant.name, build=f"{__name__}:build") for mutant in MUTANTS]
    return Catalog.of(
        {
            "unirl-well": SimpleNamespace(
                unirl_models=hookimpl(lambda: [latent_model.SPEC]),
                unirl_engines=hookimpl(lambda: [TRAINSIDE]),
                unirl_algorithms=hookimpl(unirl_algorithms),
                unirl_backends=hookimpl(lambda: [FSDP2]),
                unirl_launchers=hookimpl(lambda: [LOCAL]),
            ),
            "unirl-mutants": SimpleNamespace(unirl_launchers=hookimpl(lambda: specs)),
        }
    )
