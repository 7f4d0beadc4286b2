"""Launchers with one fault each, next to the one that builds everything in this process."""

from __future__ import annotations

import atexit
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from unirl.algorithms.flow_grpo.plugin import unirl_algorithms
from unirl.backends.fsdp2.plugin import SPEC as FSDP2
from unirl.conformance.doubles import tiny_denoiser as latent_model
from unirl.core.errors import UniRLError
from unirl.core.plugins.catalog import Catalog
from unirl.core.specs.plan import Plan
from unirl.engines.trainside.plugin import SPEC as TRAINSIDE
from unirl.loop.local_launcher import LocalLauncher
from unirl.loop.parts import Parts
from unirl.loop.plugin import LOCAL

from conformance_mutants.changes import changed, returns, takes
from conformance_mutants.mutant import Mutant, builder, catalog_of, plugin, specs


class Starts(LocalLauncher):
    """Starts a separate process, which only `close` ends."""

    process: subprocess.Popen[bytes] | None = None

    def launch(self, plan: Plan, *, catalog: Catalog) -> Parts:
        # Not for ever: the tests have to end.
        self.process = subprocess.Popen(["sleep", "60"])
        return super().launch(plan, catalog=catalog)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


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


def other_seed(plan: Plan) -> Plan:
    return replace(plan, run=replace(plan.run, seed=plan.run.seed + 1))


def loading_nothing(parts: Parts) -> Parts:
    def load(_: Any, load: Any, folder: Path) -> None:
        assert folder.exists()

    changed(parts.only.backend, {"load": load})
    return parts


def wrapping_errors(parts: Parts) -> Parts:
    def score(_: Any, score: Any, samples: Any) -> Any:
        try:
            return score(samples)
        except UniRLError as error:
            raise RuntimeError("a worker failed") from error

    for reward in parts.rewards.values():
        changed(reward, {"score": score})
    return parts


def launcher(name: str, claim: str, breaks: str, *, build: str = LOCAL.build, **changes: Any) -> Mutant:
    return Mutant(name=name, claim=claim, breaks=breaks, spec=replace(LOCAL, build=build), changes=changes)


# fmt: off
MUTANTS = [
    launcher("draws-its-own-seed", "a-launched-run-gives-the-numbers-of-one-process",
             "builds the parts under another seed", launch=takes(other_seed)),
    launcher("loads-nothing", "checkpoints-move-between-launchers",
             "does not pass on that a checkpoint is to be loaded", launch=returns(loading_nothing)),
    launcher("wraps-errors", "errors-of-parts-keep-their-type-and-message",
             "raises an error of its own for those of parts", launch=returns(wrapping_errors)),
    launcher("forgets-what-failed", "a-launch-that-fails-leaves-nothing-behind",
             "leaves a process behind when a part cannot be built", build=f"{__name__}:Starts"),
    launcher("leaves-one-behind", "a-closed-launcher-leaves-nothing-behind",
             "forgets a process when it is closed", build=f"{__name__}:LeavesOneBehind"),
]
# fmt: on
build = builder(MUTANTS)


def catalog() -> Catalog:
    healthy = plugin(
        models=[latent_model.SPEC],
        engines=[TRAINSIDE],
        algorithms=list(unirl_algorithms()),
        backends=[FSDP2],
        launchers=[LOCAL],
    )
    return catalog_of(healthy, launchers=specs(MUTANTS, module=__name__))
