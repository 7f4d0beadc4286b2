"""Engines that reach into a model through a bridge run the models that bring one, and no others."""

from __future__ import annotations

import dataclasses

import pytest
from unirl.core.errors import PluginBroken
from unirl.core.match.parts import match_pair, match_parts, served_kinds
from unirl.core.plugins.bridges import bridge_name, import_bridge, lacks_bridge
from unirl.core.specs.capability import Cap, Needs
from unirl.core.specs.spec import AlgorithmSpec, EngineSpec, ModelSpec

PARTS = {"summary": "toy", "build": "toy:build", "config": "toy:Config"}
MODEL = ModelSpec(
    name="toy",
    tracks={"image": "latent"},
    trainable="net",
    capabilities={Cap.LATENT_STAGE},
    **PARTS,
)
ENGINE = EngineSpec(name="far", needs_bridge=True, capabilities={Cap.LATENT_ROLLOUT}, kernels=("euler",), **PARTS)
BRIDGED = dataclasses.replace(MODEL, bridges={"far": "toy.bridges.far:BRIDGE"})


def test_a_model_without_a_bridge_is_refused_in_a_sentence_that_names_those_with_one() -> None:
    assert match_pair(model=BRIDGED, engine=ENGINE).accepted
    assert match_pair(model=MODEL, engine=dataclasses.replace(ENGINE, needs_bridge=False)).accepted
    (reason,) = match_pair(model=MODEL, engine=ENGINE).reasons
    assert str(reason) == (
        "engine: engine 'far' needs a bridge to the model, and model 'toy' has none for it. Choose another model or "
        "another engine."
    )
    assert "of those installed, a, b do." in lacks_bridge(MODEL, ENGINE, bridged=["a", "b"])
    assert "of those installed, a does." in lacks_bridge(MODEL, ENGINE, bridged=["a"])


def test_a_bridge_is_imported_by_its_name_or_its_plugin_is_named() -> None:
    assert bridge_name(BRIDGED, ENGINE) == "toy.bridges.far:BRIDGE"
    with pytest.raises(PluginBroken, match=r"model 'toy' names 'toy\.bridges\.far:BRIDGE' as its bridge to 'far': No"):
        import_bridge(BRIDGED, ENGINE)
    real = dataclasses.replace(MODEL, bridges={"far": "unirl.core.names:did_you_mean"})
    assert import_bridge(real, ENGINE)("a", []) == ""


def test_where_the_tracks_do_not_fit_a_bridge_would_not_help_and_is_not_asked_for() -> None:
    text = dataclasses.replace(MODEL, tracks={"text": "text"}, capabilities={Cap.TEXT_STAGE})
    (reason,) = match_pair(model=text, engine=ENGINE).reasons
    assert "text-rollout" in reason.text


def test_a_bridge_may_serve_the_tracks_of_one_kind() -> None:
    """An algorithm on the others is refused, and so is the pair without a bridge."""
    both = {Cap.LATENT_STAGE, Cap.TEXT_STAGE}
    unified = dataclasses.replace(BRIDGED, tracks={"text": "text", "image": "latent"}, capabilities=both)
    assert match_pair(model=unified, engine=ENGINE).accepted
    assert not match_pair(model=dataclasses.replace(unified, bridges={}), engine=ENGINE).accepted
    for track in ("latent", "text"):
        algorithm = AlgorithmSpec(name="learns", needs=Needs(track=track), **PARTS)
        reasons = match_parts(model=unified, engine=ENGINE, algorithm=algorithm).reasons
        assert any("text-rollout" in reason.text for reason in reasons) is (track == "text")


def test_texts_need_a_bridge_that_serves_them() -> None:
    """Of an engine that generates both kinds: the bridge of a model may have images alone."""
    both = {Cap.LATENT_STAGE, Cap.TEXT_STAGE}
    unified = dataclasses.replace(BRIDGED, tracks={"text": "text", "image": "latent"}, capabilities=both)
    able = dataclasses.replace(ENGINE, capabilities={Cap.LATENT_ROLLOUT, Cap.TEXT_ROLLOUT})
    writing = dataclasses.replace(unified, bridged_texts=frozenset({"far"}))
    assert served_kinds(unified, able) == {"latent"} and served_kinds(writing, able) == {"latent", "text"}
    assert match_pair(model=unified, engine=able).accepted and match_pair(model=writing, engine=able).accepted
    for model, track, accepted in ((unified, "latent", True), (unified, "text", False), (writing, "text", True)):
        algorithm = AlgorithmSpec(name="learns", needs=Needs(track=track), **PARTS)
        reasons = match_parts(model=model, engine=able, algorithm=algorithm).reasons
        refused = [reason.text for reason in reasons if reason.key == "engine" and "bridge" in reason.text]
        assert (
            not refused
            if accepted
            else refused
            == [
                "the bridge of model 'toy' to engine 'far' serves its latent tracks, not its text tracks. Choose another "
                "engine for them, such as trainside."
            ]
        )
    text = dataclasses.replace(MODEL, tracks={"text": "text"}, capabilities={Cap.TEXT_STAGE})
    (reason,) = match_pair(model=text, engine=able).reasons
    assert "needs a bridge to the model, and model 'toy' has none" in reason.text
