"""Specs of a plugin: they keep what they say, document every setting and declare gaps that can be followed up."""

from __future__ import annotations

from functools import partial

from unirl.conformance.claims import claim, claim_kinds
from unirl.conformance.documented import undocumented_fields
from unirl.conformance.fixtures.plugin import PluginCase
from unirl.conformance.spec_check import check_spec
from unirl.conformance.verdicts import NotApplicable
from unirl.core.names import did_you_mean
from unirl.core.specs.spec import ModelSpec


@claim("plugin", tier="tiny")
def test_every_string_of_its_specs_resolves(case: PluginCase) -> None:
    """The names in its specs can be imported and refer to functions that accept the arguments of a run, or to configs
    with defaults; capabilities, requirements, ranges and keys agree with each other.

    If it fails: each sentence names the field of the spec and the problem. Signatures are in `unirl.core.roles`.
    """
    problems = [
        f"{spec.kind} {spec.name!r}: {problem}"
        for spec in case.specs
        for problem in check_spec(spec, partial(case.resolved, spec))
    ]
    assert not problems, " ".join(problems)


@claim("plugin", tier="static")
def test_every_setting_is_documented(case: PluginCase) -> None:
    """Every key that a recipe can set has a text after its field; `unirl compose` and the reference show it.

    If it fails: write a docstring below each field that the message names, with its unit and the meaning of 0, empty
    and None. An inherited field is documented where it is defined.
    """
    wrong = [
        f"{spec.kind} {spec.name!r}: {', '.join(missing)}"
        for spec in case.specs
        if (missing := list(undocumented_fields(case.resolved(spec, spec.config))))
    ]
    assert not wrong, f"settings without a text: {'; '.join(wrong)}"


@claim("plugin", tier="static")
def test_gaps_name_claims_and_give_reasons(case: PluginCase) -> None:
    """Each declared gap names a claim that exists, and gives the reason in a sentence or a link.

    A gap for a claim that does not exist hides nothing today and the wrong thing tomorrow.

    If it fails: correct the name (`unirl conformance --claims` lists them), and give a `link`, or a `reason` of a whole
    sentence. Remove a gap whose claim is gone.
    """
    gaps = [(f"{spec.kind} {spec.name!r}", gap) for spec in case.specs for gap in spec.gaps]
    if not gaps:
        raise NotApplicable(f"{case.plugin.label} declares no gap")
    known = case.factory.shared("names of claims", claim_kinds)
    wrong = [
        f"{part}: there is no claim {gap.claim!r}{did_you_mean(gap.claim, known)}"
        for part, gap in gaps
        if gap.claim not in known
    ]
    # Five words or more: "not yet" and "known issue" are not reasons. With a link one word will do.
    wrong += [
        f"{part}: the gap {gap.claim!r} has neither a link nor a sentence as reason: {gap.reason!r}"
        for part, gap in gaps
        if len(gap.reason.split()) < (1 if gap.link.startswith(("https://", "http://")) else 5)
    ]
    assert not wrong, "; ".join(wrong)


@claim("plugin", tier="static")
def test_a_model_brings_its_miniature_and_its_reference(case: PluginCase) -> None:
    """Each model has a miniature checkpoint to be tested on, names its reference implementation, and can run it.

    Without them, every other claim about the model, and about engines with it, is not run.

    If it fails: give the spec `tiny` (a `Miniature` that writes a checkpoint of random weights), `reference` (the name
    of the pipeline or class) and a function that runs it: `parity` for latents
    (`unirl.conformance.reference.RunReference`), `text_parity` for text (`RunTextReference`).
    """
    models = [spec for spec in case.specs if isinstance(spec, ModelSpec)]
    if not models:
        raise NotApplicable(f"{case.plugin.label} provides no model")
    wrong: list[str] = []
    for spec in models:
        kinds = spec.tracks.values()
        stated = {"tiny": spec.tiny is not None, "reference": bool(spec.reference)}
        stated |= {"parity": bool(spec.parity)} if "latent" in kinds else {}
        stated |= {"text_parity": bool(spec.text_parity)} if "text" in kinds else {}
        missing = [name for name, is_there in stated.items() if not is_there]
        wrong += [f"model {spec.name!r} has no {', '.join(missing)}"] if missing else []
    assert not wrong, "; ".join(wrong)
