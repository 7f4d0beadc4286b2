"""That the specs of a plugin say all that others read of them, and promise nothing that nobody can prove."""

from __future__ import annotations

import math
import re

from unirl.conformance.claims import claim, claim_kinds
from unirl.conformance.documented import undocumented_fields
from unirl.conformance.doubles.modules import find_module
from unirl.conformance.fixtures.plugin import PluginBench
from unirl.conformance.verdicts import NotApplicable
from unirl.core.names import did_you_mean
from unirl.core.plugins.loading import PART_NAME
from unirl.core.specs.spec import AlgorithmSpec, ModelSpec, RewardSpec, Spec

SUMMARY_LENGTH = 120
"""Characters of a summary: a line of a terminal and of the reference."""


@claim("plugin", tier="static")
def test_every_part_has_a_summary(bench: PluginBench) -> None:
    """Each part says in one line what it is; that line stands in `unirl plugins` and in the reference.

    If it fails: write `summary` of the spec as one sentence of at most 120 characters on one line.
    """
    wrong = [
        f"{spec.kind} {spec.name!r} has {spec.summary!r}"
        for spec in bench.specs
        if len(spec.summary.split()) < 3 or len(spec.summary) > SUMMARY_LENGTH or "\n" in spec.summary
    ]
    assert not wrong, f"a summary is one line of 3 words to {SUMMARY_LENGTH} characters: {'; '.join(wrong)}"


@claim("plugin", tier="static")
def test_names_are_lower_case_with_dashes(bench: PluginBench) -> None:
    """The plugin and its parts have names of one form, so that nobody has to guess how one is written in a recipe.

    If it fails: rename the entry point, or the part in its spec: `flow-grpo`, not `FlowGRPO` or `flow_grpo`.
    """
    names = [bench.loaded.name, *(spec.name for spec in bench.plugin.specs)]
    wrong = [name for name in names if not PART_NAME.fullmatch(name)]
    assert not wrong, f"{', '.join(map(repr, wrong))}: must be lower case letters and digits with dashes between them"


@claim("plugin", tier="static")
def test_a_model_brings_its_miniature_and_its_reference(bench: PluginBench) -> None:
    """Each model has a miniature to be tried on, names what it is verified against, and can run that.

    Without them, every other claim about the model, and about engines with it, is not run.

    If it fails: give the spec `tiny` (a `Miniature` that writes a checkpoint of random weights), `reference` (the name
    of the pipeline or class) and a function that runs it: `parity` for latents
    (`unirl.conformance.reference.RunReference`), `text_parity` for text (`RunTextReference`).
    """
    wrong: list[str] = []
    for spec in bench.specs_of(ModelSpec):
        stated = {"tiny": spec.tiny is not None, "reference": bool(spec.reference)}
        if "latent" in spec.tracks.values():
            stated["parity"] = bool(spec.parity)
        if "text" in spec.tracks.values():
            stated["text_parity"] = bool(spec.text_parity)
        missing = [name for name, there in stated.items() if not there]
        wrong += [f"{_called(spec)} has no {', '.join(missing)}"] if missing else []
    assert not wrong, "; ".join(wrong)


@claim("plugin", tier="static")
def test_an_algorithm_names_its_source(bench: PluginBench) -> None:
    """Each algorithm names the paper that its loss comes from, or says in a sentence why there is none.

    If it fails: set `paper` of the spec: `arXiv 2505.05470`, a DOI, a link, or a sentence.
    """
    wrong = [
        f"{_called(spec)} has {spec.paper!r}"
        for spec in bench.specs_of(AlgorithmSpec)
        if not re.search(r"arXiv:? ?\d{4}\.\d{4,5}|10\.\d{4,}/\S+|https?://\S+\.\S+", spec.paper)
        and not _is_sentence(spec.paper)
    ]
    assert not wrong, f"a paper is an arXiv number, a DOI, a link, or a sentence that says why not: {'; '.join(wrong)}"


@claim("plugin", tier="static")
def test_a_reward_states_its_scale_and_range(bench: PluginBench) -> None:
    """Each reward says what its number means, and its smallest and largest value: weights and thresholds rest on both.

    If it fails: set `scale` and `range` of the spec. Where a score has neither a lower nor an upper bound, the scale
    says so with the word "unbounded".
    """
    wrong: list[str] = []
    for spec in bench.specs_of(RewardSpec):
        low, high = spec.range
        if len(spec.scale.split()) < 3:
            wrong.append(f"{_called(spec)} has the scale {spec.scale!r}, which says nothing")
        if not low < high:
            wrong.append(f"{_called(spec)} has the empty range {spec.range}")
        if math.isinf(low) and math.isinf(high) and "unbounded" not in spec.scale:
            wrong.append(f"{_called(spec)} states no bound at all, and its scale does not call it unbounded")
    assert not wrong, "; ".join(wrong)


@claim("plugin", tier="static")
def test_every_string_names_a_module_that_exists(bench: PluginBench) -> None:
    """The modules that a spec names by string are installed; whoever chooses the part finds its implementation.

    Looked up without importing them. Whether each has the attribute is the claim `every-string-of-its-specs-resolves`.

    If it fails: a module was renamed or left out of the wheel; correct the string, or the packaging.
    """
    wrong = [
        f"{_called(spec)}: {field} names {target!r}, and there is no module {target.partition(':')[0]!r}"
        for spec in bench.specs
        for field, target in _targets(spec)
        if find_module(target.partition(":")[0]) is None
    ]
    assert not wrong, "; ".join(wrong)


@claim("plugin", tier="static")
def test_every_setting_is_documented(bench: PluginBench) -> None:
    """Every key that a recipe can set has a text after its field; `unirl compose` and the reference show it.

    If it fails: write a docstring below each field that the sentence names, with its unit and what 0, empty and None
    mean. A field that is inherited is documented where it is defined.
    """
    wrong = [
        f"{_called(spec)}: {', '.join(missing)}"
        for spec in bench.specs
        if (missing := list(undocumented_fields(bench.workshop.resolved(bench.found(spec), spec.config))))
    ]
    assert not wrong, f"settings without a text: {'; '.join(wrong)}"


@claim("plugin", tier="static")
def test_gaps_name_claims_and_give_reasons(bench: PluginBench) -> None:
    """Each declared gap names a claim that exists, and says in a sentence or a link why it is there.

    A gap for a claim that does not exist hides nothing today and the wrong thing tomorrow.

    If it fails: correct the name (`unirl conformance --claims` lists them), and give a `link`, or a `reason` of a whole
    sentence. Take a gap out whose claim is gone.
    """
    gaps = [(spec, gap) for spec in bench.specs for gap in spec.gaps]
    if not gaps:
        raise NotApplicable(f"{bench.plugin.label} declares no gap")
    known = bench.workshop.shared("names of claims", claim_kinds)
    wrong: list[str] = []
    for spec, gap in gaps:
        if gap.claim not in known:
            wrong.append(f"{_called(spec)}: there is no claim {gap.claim!r}{did_you_mean(gap.claim, known)}")
        if not gap.reason.strip():
            wrong.append(f"{_called(spec)}: the gap {gap.claim!r} has no reason")
        elif not gap.link.startswith(("https://", "http://")) and not _is_sentence(gap.reason):
            wrong.append(f"{_called(spec)}: the gap {gap.claim!r} has neither a link nor a sentence: {gap.reason!r}")
    assert not wrong, "; ".join(wrong)


def _called(spec: Spec) -> str:
    return f"{spec.kind} {spec.name!r}"


def _targets(spec: Spec) -> list[tuple[str, str]]:
    """The strings of a spec that name something to import, with their fields; empty ones left out."""
    result = [("build", spec.build), ("config", spec.config)]
    if isinstance(spec, ModelSpec):
        result += [
            ("parity", spec.parity),
            ("text_parity", spec.text_parity),
            ("tiny.write", spec.tiny.write if spec.tiny else ""),
            ("tiny.media", spec.tiny.media if spec.tiny else ""),
        ]
    if isinstance(spec, AlgorithmSpec):
        result.append(("reference", spec.reference))
    if isinstance(spec, RewardSpec):
        result.append(("tiny", spec.tiny))
        result += [(f"examples[{number}].draw", example.draw) for number, example in enumerate(spec.examples)]
    return [(field, target) for field, target in result if target]


def _is_sentence(text: str) -> bool:
    """Five words or more: "not yet" and "known issue" are none."""
    return len(text.split()) >= 5
