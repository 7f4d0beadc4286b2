"""Environments with one fault each, next to one that asks for a number until it is told it, and the installed ones."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from unirl.core.plugins.catalog import Catalog
from unirl.core.roles import Observation
from unirl.core.specs.spec import EnvironmentExample, EnvironmentSpec
from unirl.core.types.inputs import Inputs
from unirl.environments.basic.plugin import unirl_environments

from conformance_mutants.changes import first, returns
from conformance_mutants.mutant import Mutant, builder, catalog_of, plugin, specs

SEED, ANSWERED = "a-seed-decides-an-episode", "every-answer-gets-an-observation"
APART, CLOSED = "episodes-that-are-over-are-left-alone", "closing-an-environment-leaves-nothing"
SPEC = EnvironmentSpec(
    name="stop",
    summary="Says random numbers until it is told to stop",
    build=f"{__name__}:build_healthy",
    config="unirl.core.specs.part_config:EnvironmentConfig",
    examples=(EnvironmentExample(prompt="Numbers, please.", answers=("more", "more", "stop")),),
)


class Numbers:
    """Says a number of each episode's own generator after each answer but the last."""

    def __init__(self) -> None:
        self.draws: dict[str, random.Random] = {}
        self.threads: list[threading.Thread] = []

    def reset(
        self, inputs: Inputs, metadata: Sequence[Mapping[str, Any]], *, seeds: Sequence[int]
    ) -> Sequence[Observation]:
        self.draws = {name: random.Random(seed) for name, seed in zip(inputs.ids, seeds, strict=True)}
        return [self.said(name) for name in inputs.ids]

    def step(self, answers: Mapping[str, str]) -> Mapping[str, Observation]:
        return {name: self.said(name, done=answer == "stop") for name, answer in answers.items()}

    def said(self, name: str, *, done: bool = False) -> Observation:
        return Observation(text=str(self.draws[name].random()), reward=float(done), done=done)

    def close(self) -> None:
        self.draws.clear()


def build_healthy(config: Any) -> Numbers:
    return Numbers()


def broken(name: str, claim: str, breaks: str, changes: Any, *, also: tuple[str, ...] = ()) -> Mutant:
    return Mutant(name=name, claim=claim, breaks=breaks, changes=changes, also=also, spec=SPEC)


def in_pairs(environment: Numbers, step: Any, answers: Mapping[str, str]) -> Mapping[str, Observation]:
    """Waits for the answers of all episodes."""
    return step({name: answers[name] for name in environment.draws})


COUNTER = itertools.count()


def counting(reply: Mapping[str, Observation]) -> Mapping[str, Observation]:
    return {name: replace(one, text=f"{one.text} ({next(COUNTER)})") for name, one in reply.items()}


def starts_thread(environment: Numbers, *_: Any, **__: Any) -> None:
    thread = threading.Thread(target=threading.Event().wait, name="left", daemon=True)
    thread.start()


def silent(reply: Mapping[str, Observation]) -> Mapping[str, Observation]:
    return {name: replace(one, text="" if not one.done else one.text) for name, one in reply.items()}


# fmt: off
MUTANTS = [
    broken("counts", SEED, "counts its observations over all episodes", {"step": returns(counting)}, also=(APART,)),
    broken("never-ends", ANSWERED, "ends no episode",
           {"step": returns(lambda reply: {name: replace(one, done=False) for name, one in reply.items()})}),
    broken("waits-for-all", APART, "waits for the answers of all episodes", {"step": in_pairs}),
    broken("leaves-thread", CLOSED, "leaves a thread behind", {"reset": first(starts_thread)}),
]
# fmt: on
build = builder(MUTANTS)


def catalog() -> Catalog:
    installed = plugin(environments=[SPEC, *unirl_environments()])
    return catalog_of(installed, environments=specs(MUTANTS, module=__name__))
