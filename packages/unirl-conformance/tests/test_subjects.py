"""Subjects come from the catalog: every part, every combination, and of those the ones that are asked for."""

from __future__ import annotations

import dataclasses
import importlib
from types import SimpleNamespace
from typing import Any

import pytest
from unirl.conformance.claims import Claim, Tier
from unirl.conformance.environment import describe_environment
from unirl.conformance.pytest_plugin import absent_environment
from unirl.conformance.subjects import Selection, Subject, not_applicable, subjects
from unirl.core.errors import PluginBroken, PluginNotFound, PluginNotInstalled
from unirl.core.plugins.catalog import Catalog, Found
from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap, Needs
from unirl.core.specs.spec import AlgorithmSpec, BackendSpec, EngineSpec, ModelSpec, RewardSpec, Spec, TrackerSpec

WORDS = {"summary": "A part.", "build": "nowhere:build", "config": "nowhere:Config"}


def model(name: str, kind: str = "latent") -> ModelSpec:
    stage = Cap.LATENT_STAGE if kind == "latent" else Cap.TEXT_STAGE
    return ModelSpec(name=name, tracks={"t": kind}, trainable="net", capabilities={stage}, **WORDS)


def engine(name: str, *caps: Cap, **fields: Any) -> EngineSpec:
    return EngineSpec(name=name, capabilities=set(caps), **WORDS, **fields)


def backend(name: str, *caps: Cap) -> BackendSpec:
    return BackendSpec(name=name, capabilities={Cap.TRAIN_FULL, *caps}, **WORDS)


def plugin(**specs: Any) -> SimpleNamespace:
    return SimpleNamespace(**{f"unirl_{kind}": hookimpl(lambda own=own: own) for kind, own in specs.items()})


MODELS = [model("paint"), model("film"), model("talk", "text")]
ENGINES = [
    engine("near", Cap.LATENT_ROLLOUT, Cap.WEIGHTS_SHARED),
    engine("far", Cap.LATENT_ROLLOUT, Cap.TEXT_ROLLOUT, Cap.WEIGHTS_FULL),
]


@pytest.fixture
def catalog() -> Catalog:
    return Catalog.of(
        {
            "acme-models": plugin(models=MODELS),
            "acme-engines": plugin(engines=ENGINES),
            "acme-rest": plugin(
                algorithms=[AlgorithmSpec(name="free", needs=Needs(), **WORDS)],
                backends=[backend("plain")],
                rewards=[RewardSpec(name="tone", scale="0 to 1", media="image", **WORDS)],
                trackers=[TrackerSpec(name="notes", **WORDS)],
            ),
        }
    )


def ids(found: list[Subject], kind: str) -> list[str]:
    return [subject.id for subject in found if subject.kind == kind]


def test_every_part_and_every_combination_is_a_subject(catalog: Catalog) -> None:
    result = subjects(catalog)
    assert ids(result, "plugin") == ["acme-engines", "acme-models", "acme-rest"]
    assert ids(result, "model") == ["film", "paint", "talk"]
    assert ids(result, "engine") == ["far+film", "far+paint", "far+talk", "near+film", "near+paint", "near+talk"]
    assert len(ids(result, "cell")) == 3 * 2 * 1 * 1
    assert [ids(result, kind) for kind in ("algorithm", "backend", "reward", "tracker")] == [
        ["free"],
        ["plain"],
        ["tone"],
        ["notes"],
    ]
    assert len({(subject.kind, subject.id) for subject in result}) == len(result)


def test_parts_that_do_not_fit_are_there_with_the_reason(catalog: Catalog) -> None:
    refused = {subject.id: subject.refused for subject in subjects(catalog) if subject.refused}
    assert set(refused) == {"near+talk", "talk+near+free+plain"}
    assert refused["near+talk"] == (
        "engine: the text track of model 'talk' needs 'text-rollout'; engine 'near' does not provide it."
    )


def test_a_pair_is_tried_on_the_tracks_that_the_bridge_serves() -> None:
    """Whatever both parts could generate by themselves."""
    both = ModelSpec(
        name="both",
        tracks={"text": "text", "image": "latent"},
        trainable="net",
        capabilities={Cap.LATENT_STAGE, Cap.TEXT_STAGE},
        bridges={"apart": "toy:BRIDGE"},
        **WORDS,
    )
    apart = engine("apart", Cap.LATENT_ROLLOUT, Cap.TEXT_ROLLOUT, Cap.WEIGHTS_FULL, needs_bridge=True)
    writing = dataclasses.replace(both, name="writing", bridged_texts=frozenset({"apart"}))
    catalog = Catalog.of({"acme": plugin(models=[both, writing], engines=[apart])})
    result = {subject.id: subject for subject in subjects(catalog) if subject.kind == "engine"}
    assert [result[f"apart+{name}"].tracks for name in ("both", "writing")] == [("latent",), ("latent", "text")]
    text = Claim(name="writes", kind="engine", track="text")
    assert not_applicable(text, result["apart+both"]) == (
        "the claim is about text tracks; these parts together serve latent"
    )


def chosen(catalog: Catalog, **selection: object) -> set[str]:
    return {f"{s.kind}:{s.id}" for s in subjects(catalog, Selection(**selection))}  # type: ignore[arg-type]


def test_a_named_part_brings_its_combinations_and_its_plugin(catalog: Catalog) -> None:
    assert chosen(catalog, names={"engine": ("near",)}) == {
        "plugin:acme-engines",
        *(f"engine:near+{name}" for name in ("film", "paint")),
        *(f"cell:{name}+near+free+plain" for name in ("film", "paint")),
    }


def test_two_named_parts_meet_in_their_combination_and_stand_alone_elsewhere(catalog: Catalog) -> None:
    assert chosen(catalog, names={"model": ("paint",), "engine": ("near",)}) == {
        "plugin:acme-models",
        "plugin:acme-engines",
        "model:paint",
        "engine:near+paint",
        "cell:paint+near+free+plain",
    }


def test_a_dist_brings_everything_that_it_has_a_part_in(catalog: Catalog) -> None:
    result = chosen(catalog, plugins=("acme-rest",))
    assert {item for item in result if not item.startswith("cell:")} == {
        "plugin:acme-rest",
        "algorithm:free",
        "backend:plain",
        "reward:tone",
        "tracker:notes",
    }
    assert sum(item.startswith("cell:") for item in result) == 5, "parts that do not go together are left out"


def test_parts_that_do_not_go_together_are_there_when_all_are_named(catalog: Catalog) -> None:
    """Whoever asks for them is told why."""
    assert "engine:near+talk" in chosen(catalog, names={"model": ("talk",), "engine": ("near",)})
    everything: dict[str, tuple[str, ...]] = {
        "model": ("talk",),
        "engine": ("near",),
        "algorithm": ("free",),
        "backend": ("plain",),
    }
    assert "cell:talk+near+free+plain" in chosen(catalog, names=everything)


def test_below_tier_full_an_engine_that_has_to_be_started_is_tried_where_it_is_named() -> None:
    apart = engine("apart", Cap.LATENT_ROLLOUT, environment="acme:ENVIRONMENT")
    catalog = Catalog.of(
        {
            "acme-models": plugin(models=[model("paint")]),
            "acme-near": plugin(engines=[ENGINES[0]]),
            "acme-apart": plugin(engines=[apart]),
        }
    )

    def engines(tier: Tier, **selection: Any) -> list[str]:
        return ids(subjects(catalog, Selection(**selection), tier=tier), "engine")

    assert engines("tiny", plugins=("acme-models",)) == ["near+paint"]
    assert engines("tiny", names={"model": ("paint",)}) == ["near+paint"]
    assert engines("full", plugins=("acme-models",)) == [
        *("apart+paint", "apart+paint@cuda", "near+paint", "near+paint@cuda")
    ]
    assert engines("tiny", plugins=("acme-apart",)) == ["apart+paint"]
    assert engines("tiny", names={"engine": ("apart",)}) == ["apart+paint"]
    assert engines("tiny") == ["apart+paint", "near+paint"], "a run of everything leaves nothing out"


def test_below_tier_full_an_engine_meets_each_model_and_each_kind_of_algorithm() -> None:
    def algorithm(name: str, **needs: Any) -> AlgorithmSpec:
        return AlgorithmSpec(name=name, needs=Needs(track="latent", **needs), **WORDS)

    apart = engine("apart", Cap.LATENT_ROLLOUT, Cap.WEIGHTS_FULL, environment="acme:ENVIRONMENT")
    # One and two differ in what they do with samples, three in what samples they need.
    algorithms = [algorithm("one"), algorithm("two", reference="policy"), algorithm("three", sampler="lagged")]
    plain = backend("plain", Cap.REFERENCE_COPY, Cap.LAGGED_POLICY)

    def cells(
        engine: str, tier: Tier = "tiny", *, models: tuple[str, ...] = ("film", "paint"), **selection: Any
    ) -> list[str]:
        catalog = Catalog.of(
            {
                "acme-models": plugin(models=[model(name) for name in models]),
                "acme-engines": plugin(engines=[ENGINES[0], apart]),
                "acme-rest": plugin(algorithms=algorithms, backends=[plain]),
            }
        )
        found = [one for one in subjects(catalog, Selection(**selection), tier=tier) if one.device == "cpu"]
        assert not [one.refused for one in found if one.refused]
        return ["+".join(one.id.split("+")[::2]) for one in found if one.kind == "cell" and f"+{engine}+" in one.id]

    every = [f"{name}+{other}" for name in ("film", "paint") for other in ("one", "three", "two")]
    assert cells("near", tier="full") == cells("apart", tier="full") == every
    for name in ("near", "apart"):
        tried = cells(name)
        assert {one.split("+")[0] for one in tried} == {"film", "paint"} and len(tried) <= 4, "2 models, 2 kinds"
        assert {one.endswith("+three") for one in tried} == {True, False}, "one or two, and three"
        assert cells(name, names={"engine": (name,)}) == every, "who names it gets all"
        left_out = cells(name, without=tuple(f"cell:{f'+{name}+'.join(one.split('+'))}+plain" for one in tried))
        assert left_out == [], "no other algorithm takes the place of what is left out"
        assert cells(name, without=(f"cell:film+{name}+*",)) == [one for one in tried if one.startswith("paint")]
        with_another = cells(name, models=("cloth", "film", "paint"))
        others = {one for one in with_another if not one.startswith("cloth")}
        assert others <= set(tried), "a further model brings no other algorithm to the others"


def test_a_further_backend_meets_each_model_engine_and_algorithm_once() -> None:
    algorithms = [AlgorithmSpec(name=name, needs=Needs(track="latent"), **WORDS) for name in ("one", "two")]
    models, engines = [model("film"), model("paint")], [ENGINES[0], dataclasses.replace(ENGINES[0], name="other")]
    catalog = Catalog.of(
        {
            "unirl-rest": plugin(models=models, engines=engines, algorithms=algorithms, backends=[backend("shards")]),
            # UniRL's own comes first, whatever its name.
            "acme-backends": plugin(backends=[backend("axis")]),
        }
    )

    def cells(name: str, **selection: Any) -> list[str]:
        found = ids(subjects(catalog, Selection(**selection), tier="full"), "cell")
        return [one.removesuffix(f"+{name}") for one in found if one.endswith(f"+{name}")]

    assert len(cells("shards")) == 2 * 2 * 2
    assert cells("axis") == ["film+near+one", "film+near+two", "film+other+one", "paint+near+one"]
    assert len(cells("axis", names={"backend": ("axis",)})) == len(cells("axis", plugins=("acme-backends",))) == 8


def test_on_a_gpu_every_subject_but_plugins_is_there_once_more(catalog: Catalog) -> None:
    result = subjects(catalog, tier="gpu")
    assert ids(result, "model") == ["film", "film@cuda", "paint", "paint@cuda", "talk", "talk@cuda"]
    assert len(ids(result, "plugin")) == 3


def test_a_disabled_plugin_is_no_subject_and_a_broken_one_is() -> None:
    class Broken:
        @hookimpl
        def unirl_models(self) -> list[Spec]:
            raise RuntimeError("no")

    result = subjects(Catalog.of({"acme-broken": Broken()}))
    assert [(subject.kind, subject.id) for subject in result] == [("plugin", "acme-broken")]


@pytest.mark.parametrize(
    ("selection", "error", "says"),
    [
        (Selection(names={"engine": ("nearr",)}), PluginNotFound, "'nearr' is unknown.*did you mean 'near'"),
        (Selection(names={"engine": ("trainside",)}), PluginNotInstalled, "pip install unirl-engine-trainside"),
        (Selection(plugins=("acme-engine",)), PluginNotFound, "did you mean 'acme-engines'"),
        (Selection(plugins=("unirl-model-sd3",)), PluginNotInstalled, "pip install unirl-model-sd3"),
    ],
)
def test_a_name_that_cannot_be_tried_is_refused(
    catalog: Catalog, selection: Selection, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says) as caught:
        selection.check(catalog)
    assert type(caught.value) is error


def test_an_engine_that_is_a_program_of_its_own_runs_when_its_environment_is_there() -> None:
    class Environment:
        def __init__(self, *there: str) -> None:
            self.there = there

        def is_present(self, accel: str) -> bool:
            return accel in self.there

        def command(self, accel: str) -> str:
            return f"unirl engine-env apart --accel {accel}"

    spec = engine("apart", environment="acme:ENVIRONMENT")
    subject = Subject(kind="engine", parts=(Found(spec=spec, dist="acme", version="1"),))
    known: Any = SimpleNamespace(resolve=lambda name: {"acme:ENVIRONMENT": Environment("cpu")}[name])
    assert absent_environment(subject, catalog=known) == ""
    absent: Any = SimpleNamespace(resolve=lambda name: Environment())
    assert "`unirl engine-env apart --accel cpu`" in absent_environment(subject, catalog=absent)
    near = Subject(kind="engine", parts=(Found(spec=ENGINES[0], dist="acme", version="1"),))
    assert absent_environment(near, catalog=absent) == ""


def test_a_report_says_what_engines_run_with_where_they_are_there() -> None:
    # Nothing is looked at before.
    importlib.import_module("torch")

    class Environment:
        def is_present(self, accel: str) -> bool:
            return accel == "cuda"

        def packages(self, accel: str) -> dict[str, str]:
            return {"torch": "2.13.0", "sglang": "0.5.23", "idna": "3.1"}

    def resolve(name: str) -> Environment:
        if name == "acme:ENVIRONMENT":
            return Environment()
        raise PluginBroken("acme: there is no such module")

    catalog: Any = SimpleNamespace(resolve=resolve)
    apart, broken = (
        engine(name, environment=f"acme:{of}") for name, of in (("apart", "ENVIRONMENT"), ("broken", "NONE"))
    )
    assert describe_environment(catalog, [ENGINES[0], apart, broken]).engines == {
        "apart@cuda": "sglang 0.5.23, torch 2.13.0",
        "broken": "cannot be looked at: acme: there is no such module",
    }


def test_a_model_of_both_kinds_is_tried_on_those_that_an_engine_generates() -> None:
    """Where it has a bridge to it: claims about the other kind do not apply."""
    both = {Cap.LATENT_STAGE, Cap.TEXT_STAGE}
    spec = ModelSpec(
        name="both", tracks={"t": "text", "i": "latent"}, trainable="net", capabilities=both, **WORDS,
        bridges={"near": "nowhere:BRIDGE"},
    )  # fmt: skip
    catalog = Catalog.of({"acme": plugin(models=[spec], engines=ENGINES)})
    pairs = {one.id: one for one in subjects(catalog) if one.kind == "engine"}
    assert not any(one.refused for one in pairs.values())
    assert {name: one.tracks for name, one in pairs.items()} == {
        "near+both": ("latent",),
        "far+both": ("latent", "text"),
    }
