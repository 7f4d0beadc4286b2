"""Reports made by hand, with every state in them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

from unirl.conformance.claims import Claim, SubjectKind, Tier
from unirl.conformance.environment import Environment
from unirl.conformance.results import Outcome, PartInfo, Report, SubjectInfo, Untried
from unirl.conformance.verdicts import Number, State
from unirl.core.specs.capability import Cap

HOSTILE = "<script>alert('x')</script> & | `a|b` *star*\nsecond line"
TRACEBACK = """\
case = EngineCase(subject=<subject sglang+sd3>)

    def test_steps_are_stochastic_where_asked(case):
>       assert ok, "the request says steps [0, 2]"
E       AssertionError: the request says steps [0, 2], the engine was stochastic at [0, 1, 2, 3]

suite/test_engine_rollout.py:40: AssertionError"""


def claim_info(name: str, kind: SubjectKind, *, proves: Sequence[str] = (), tier: Tier = "tiny") -> Claim:
    return Claim(
        name=name,
        kind=kind,
        proves=tuple(map(Cap, proves)),
        tier=tier,
        meaning=f"What {name} gives to a user, in a sentence or two that say why it is worth a claim.",
        if_it_fails="look for a scheduler in the engine that recomputes `sigmas`, such as a shift of its own.",
    )


def subject_info(kind: SubjectKind, device: str = "cpu", dist: str = "", **parts: str) -> SubjectInfo:
    """dist: of a plugin."""
    named = {"plugin": dist} if kind == "plugin" else parts
    return SubjectInfo(
        kind=kind,
        device=device,
        parts=tuple(
            PartInfo(
                kind=part,  # pyright: ignore[reportArgumentType]
                name=name,
                dist=dist or f"unirl-{'algo' if part == 'algorithm' else part}-{name}",
                tracks=("latent",) if part in ("model", "algorithm") else (),
            )
            for part, name in named.items()
        ),
    )


def outcome(claim: str, subject: SubjectInfo, state: State = "pass", reason: str = "", **others: Any) -> Outcome:
    reason = reason or ("" if state == "pass" else f"the reason of {state}")
    return Outcome(claim=claim, subject=subject.id, kind=subject.kind, state=state, reason=reason, **others)


def report_of(
    claims: Sequence[Claim], subjects: Sequence[SubjectInfo], outcomes: Sequence[Outcome], **changes: Any
) -> Report:
    """As a run makes it: outcomes that are n/a are counted, and subjects without another outcome are left out."""
    order = [claim.name for claim in claims]
    devices = {(subject.kind, subject.id): subject.device for subject in subjects}
    untried = [
        Untried(state="n/a", kind=one.kind, device=devices[one.kind, one.subject], num_claims=1, reason=one.reason)
        for one in outcomes
        if one.state == "n/a"
    ]
    outcomes = [one for one in outcomes if one.state != "n/a"]
    tried = {(one.kind, one.subject) for one in outcomes}
    fields: dict[str, Any] = {
        "created": "2026-02-03T04:05:06+00:00",
        "tier": "tiny",
        "selection": (),
        "environment": Environment(
            python="3.11.9",
            platform="Linux-6.1-x86_64",
            num_cpus=2,
            devices=(),
            packages={"torch": "2.13.0", "diffusers": "0.42.1"},
            engines={"apart": "torch 2.11.0, apart 1.5"},
        ),
        "dists": {dist: "0.1.0" for subject in subjects for dist in subject.dists},
        "seconds": 83.4,
        "claims": tuple(claims),
        "subjects": tuple(one for one in subjects if (one.kind, one.id) in tried),
        "outcomes": tuple(sorted(outcomes, key=lambda o: (order.index(o.claim), o.subject))),
        "untried": tuple(untried),
    }
    return Report(**{**fields, **changes})


def small_report(*states: State, **changes: Any) -> Report:
    """One claim of one model for each state given."""
    subject = subject_info("model", model="sd3")
    claims = [claim_info(f"claim-{place}", "model") for place, _ in enumerate(states)]
    return report_of(
        claims,
        [subject],
        [outcome(claim.name, subject, state) for claim, state in zip(claims, states, strict=True)],
        **changes,
    )


MODELS = ("bagel", "qwen-image", "sd3", "wan21")
ENGINES = ("sglang", "trainside", "vllm-omni")
ALGORITHMS = ("diffusion-nft", "drpo", "flow-dppo", "flow-grpo", "refl")
BACKENDS = ("fsdp2", "veomni")


def rich_report() -> Report:
    """Every state, numbers, links, hostile text, a matrix of 120 cells, and no GPU."""
    claims = [
        claim_info("velocity-has-a-gradient", "model", proves=["latent-stage"]),
        claim_info("lora-matches-the-stated-layers", "model", proves=["lora"]),
        claim_info("sigmas-are-used-bit-for-bit", "engine", proves=["sigmas"]),
        claim_info("steps-are-stochastic-where-asked", "engine", proves=["sde-steps", "step-noise"]),
        claim_info("closes-twice", "engine"),
        claim_info("loss-is-that-of-numpy", "algorithm"),
        claim_info("scores-stay-in-range", "reward"),
        claim_info("survives-a-full-disk", "tracker", tier="full"),
        claim_info("first-update-has-ratio-1", "cell", proves=["log-probs-gaussian"]),
        claim_info("weights-reach-the-engine", "cell", proves=["weights-full"]),
        claim_info("imports-nothing-heavy", "plugin", tier="static"),
    ]
    dists = ["unirl-model-sd3", "unirl-engine-sglang", "unirl-tracker-wandb"]
    plugins = [subject_info("plugin", dist=dist) for dist in dists]
    models = [subject_info("model", model=name) for name in MODELS]
    engines = [subject_info("engine", engine=e, model=m) for e, m in itertools.product(ENGINES, MODELS)]
    algorithms = [subject_info("algorithm", algorithm=name) for name in ALGORITHMS]
    rewards = [subject_info("reward", reward="shapes"), subject_info("reward", reward="ünïcödé-☃")]
    trackers = [subject_info("tracker", tracker="wandb")]
    cells = [
        subject_info("cell", model=m, engine=e, algorithm=a, backend=b)
        for m, e, a, b in itertools.product(MODELS, ENGINES, ALGORITHMS, BACKENDS)
    ]
    backends = [subject_info("backend", backend=name) for name in BACKENDS]
    outcomes: list[Outcome] = []
    for one in models:
        outcomes.append(outcome("velocity-has-a-gradient", one, numbers=(Number(name="gradient norm", value=12.5),)))
        state: State = "gap" if one.id == "bagel" else "pass"
        link = "https://example.org/issues/7?a=1&b=2" if state == "gap" else ""
        outcomes.append(outcome("lora-matches-the-stated-layers", one, state, link=link))
    for one in engines:
        outcomes += _engine_outcomes(one)
    for place, one in enumerate(algorithms):
        error = Number(name="largest error against NumPy", value=place * 3.1e-8, bound=1e-6)
        outcomes.append(outcome("loss-is-that-of-numpy", one, numbers=(error,)))
    for one in rewards:
        outcomes.append(outcome("scores-stay-in-range", one))
    outcomes.append(outcome("survives-a-full-disk", trackers[0], "not run", "no file system of its own is here"))
    for place, one in enumerate(cells):
        outcomes += _cell_outcomes(place, one)
    outcomes += [outcome("imports-nothing-heavy", one) for one in plugins]
    subjects = [*models, *engines, *algorithms, *backends, *rewards, *trackers, *cells, *plugins]
    report = report_of(claims, subjects, outcomes)
    no_gpu = Untried(state="not run", kind="engine", device="cuda", num_claims=3, reason="no CUDA device is here")
    return dataclasses.replace(report, untried=(*report.untried, no_gpu))


def _engine_outcomes(one: SubjectInfo) -> list[Outcome]:
    names = ("sigmas-are-used-bit-for-bit", "steps-are-stochastic-where-asked", "closes-twice")
    if one.names["engine"] == "vllm-omni":
        absent = "engine 'vllm-omni' needs the Python package 'vllm', which is not installed here"
        return [outcome(name, one, "not run", absent) for name in names]
    if one.id == "sglang+sd3":
        reason = "the request says steps [0, 2], the engine was stochastic at [0, 1, 2, 3]"
        gap = Number(name="largest difference", value=0.31, bound=1e-6)
        return [
            outcome(names[0], one, numbers=(Number(name="difference", value=0.0, bound=0.0),)),
            outcome(names[1], one, "fail", reason, numbers=(gap,), detail=TRACEBACK),
            outcome(names[2], one, "fail", HOSTILE, numbers=(Number(name="nan", value=math.nan, bound=1.0),)),
        ]
    unstated = "the claim is about 'sde-steps'; engine 'trainside' does not provide it"
    return [
        outcome(names[0], one),
        outcome(names[1], one, "n/a", unstated) if one.id == "trainside+wan21" else outcome(names[1], one),
        outcome(names[2], one),
    ]


def _cell_outcomes(place: int, one: SubjectInfo) -> list[Outcome]:
    ratio, weights = "first-update-has-ratio-1", "weights-reach-the-engine"
    if one.names["engine"] == "vllm-omni":
        absent = "engine 'vllm-omni' needs the Python package 'vllm', which is not installed here"
        return [outcome(name, one, "not run", absent) for name in (ratio, weights)]
    if one.names["algorithm"] == "refl" or one.names["model"] == "bagel":
        refused = f"algorithm: algorithm 'refl' needs 'through-sampler'; backend {one.names['backend']!r} does not provide it."
        return [outcome(name, one, "n/a", refused) for name in (ratio, weights)]
    gap = Number(name="log-prob gap", value=(place % 7) * 1.3e-8, bound=5e-5)
    if one.id == "sd3+sglang+flow-grpo+fsdp2":
        gap = Number(name="log-prob gap", value=0.0123, bound=5e-5)
        return [outcome(ratio, one, "fail", "the gap is too large", numbers=(gap,)), outcome(weights, one)]
    if one.id == "wan21+sglang+drpo+veomni":
        return [outcome(ratio, one, numbers=(gap,)), outcome(weights, one, "gap", "tracked upstream", link="")]
    return [outcome(ratio, one, numbers=(gap,)), outcome(weights, one)]
