"""What a stage is made from: the prompt with its media, and the turns, texts or images of the stages above it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import loop_toy
import pytest
import torch
from unirl.core.data.run_data import read_data
from unirl.core.errors import BatchError, DataError, RunFailed
from unirl.core.match.lineage import lineage
from unirl.core.specs.capability import Cap
from unirl.core.specs.config import StageConfig
from unirl.core.specs.plan import Learner, Plan
from unirl.core.specs.spec import ModelSpec
from unirl.core.types.batch import same
from unirl.core.types.data import MediaRef, Prompt
from unirl.core.types.inputs import Inputs, Turn
from unirl.core.types.media import Media
from unirl.core.types.request import Request
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.core.types.serial import from_bytes, to_bytes
from unirl.core.types.track import Status, TextSegment, Track
from unirl.loop.credit import credited
from unirl.loop.generation import generate_stages
from unirl.loop.lineage import Lineage, fallbacks
from unirl.loop.requests import build_request
from unirl.loop.unfinished import check_finished

SOURCE = MediaRef(modality="image", role="source", uri="/cat.png")
NOTE = MediaRef(modality="image", role="condition", uri="/note.png")
UNIFIED = ModelSpec(
    name="unified",
    tracks={"text": "text", "image": "latent"},
    inputs={"image": {"source": "takes"}, "text": {"condition": "takes"}},
    continues=frozenset({"text", "image"}),
    trainable="net",
    capabilities={Cap.LATENT_STAGE, Cap.TEXT_STAGE},
    **loop_toy.PARTS,
)
PAINTER = dataclasses.replace(UNIFIED, name="painter", continues=frozenset())


def plan_of(model: ModelSpec, stages: dict[str, tuple[str, dict[str, Any]]], *, others: Sequence[str] = ()) -> Plan:
    """stages: name -> track, settings.  others: stages of another model of the same spec."""
    base = loop_toy.plan()
    stage = base.only
    engine = dataclasses.replace(
        stage.engine,
        spec=dataclasses.replace(
            stage.engine.spec,
            capabilities={Cap.TURNS, Cap.MEDIA_REFS, Cap.TEXT_ROLLOUT, Cap.LATENT_ROLLOUT, Cap.WEIGHTS_FULL},
        ),
    )
    choice = dataclasses.replace(stage.model, spec=model)
    made = []
    for name, (track, settings) in stages.items():
        text = model.tracks[track] == "text"
        made.append(
            dataclasses.replace(
                stage,
                name=name,
                track=track,
                learner=Learner(name="other" if name in others else "", model=choice, backend=stage.backend),
                engine=engine,
                sampling=TextSamplingConfig() if text else LatentSamplingConfig(num_inference_steps=1),
                samples=1,
                settings=StageConfig(track=track, **settings),
                rewards=(),
            )
        )
    return dataclasses.replace(base, stages=tuple(made))


THINKS = {
    "think": ("text", {}),
    "recaption": ("text", {"parent": "think"}),
    "image": ("image", {"parent": "recaption"}),
}
REVISES = {
    "draft": ("image", {}),
    "critique": ("text", {"parent": "draft", "instruction": "Criticise {prompt}."}),
    "image": ("image", {"parent": "critique"}),
}


def root(plan: Plan, *, media: tuple[MediaRef, ...] = ()) -> dict[str, Request]:
    """The request of the first stage: two samples of one prompt, and one of another."""
    prompts = [Prompt(prompt_id=name, text=f"draw {name}", metadata={}, media=media) for name in ("a", "b")]

    class Tokenizes:
        spec = plan.stages[0].model.spec
        stop_tokens = (9,)

        def prompt_tokens(self, inputs: Inputs, *, sampling: TextSamplingConfig) -> list[torch.Tensor]:
            self.given = inputs
            return [torch.tensor([1, 2])] * len(inputs)

        def schedule(self, sampling: LatentSamplingConfig) -> torch.Tensor:
            return torch.tensor([1.0, 0.0])

        def latent_shape(self, sampling: LatentSamplingConfig) -> tuple[int, ...]:
            return (1,)

    model: Any = Tokenizes()
    request = build_request(
        prompts,
        track=plan.stages[0].name,
        sampling=plan.stages[0].sampling,
        samples_per_prompt=2,
        model=model,
        takes=plan.stages[0].takes,
        trajectory="none",
        seed=0,
        rollout=0,
        policy_version=0,
    ).select([0, 1, 3])
    if plan.stages[0].kind == "text":
        assert all(ref.role == "condition" for row in model.given.media for ref in row)
    return {plan.stages[0].name: request}


def made(
    plan: Plan, name: str, inputs: Inputs, ids: Sequence[str], groups: Sequence[str], values: Sequence[Any]
) -> Track:
    """The track of a stage. values: tokens of each text, or the brightness of each image."""
    common: dict[str, Any] = {
        "name": name,
        "sample_ids": tuple(ids),
        "group_ids": tuple(groups),
        "parent_ids": inputs.ids,
        "inputs": inputs,
        "metadata": ({},) * len(ids),
        "sample_weights": torch.ones(len(ids)),
        "status": (Status.COMPLETED,) * len(ids),
        "policy_version": (0,) * len(ids),
    }
    if plan.stage(name).kind == "latent":
        pixels = torch.stack([torch.full((3, 4, 4), float(value)) for value in values])
        return Track(**common, media=Media(kind="image", values=pixels))
    segment = TextSegment(
        prompt_tokens=tuple(torch.tensor([1, 2]) for _ in ids),
        tokens=tuple(torch.tensor(row) for row in values),
        log_probs=tuple(torch.zeros(len(row)) for row in values),
        temperature=1.0,
    )
    texts = tuple("".join(chr(96 + token) for token in row[:-1]) for row in values)
    return Track(**common, segment=segment, media=Media(kind="text", values=texts))


def below(plan: Plan, tmp_path: Path, first: Sequence[Any], second: Sequence[Any], *, media: Any = ()) -> Inputs:
    """The inputs of the last of three stages, of which the second has a sample less than the first, in another order."""
    requests = root(plan, media=media)
    top, middle, bottom = plan.stages
    line = Lineage(plan, requests, folder=lambda: tmp_path)
    request = requests[top.name]
    line.add(
        top.name,
        made(plan, top.name, request.inputs.with_roles(top.takes), request.sample_ids, request.group_ids, first),
    )
    inputs = line.inputs(middle).select([2, 0])
    ids = [f"{name}/{middle.name}-0" for name in inputs.ids]
    line.add(middle.name, made(plan, middle.name, inputs, ids, inputs.ids, second))
    assert line.prompt_ids(middle.name) == ("r0/b", "r0/a")
    return line.inputs(bottom)


def test_a_stage_goes_on_from_every_stage_above_it_with_the_tokens_as_they_were_sampled(tmp_path: Path) -> None:
    result = below(plan_of(UNIFIED, THINKS), tmp_path, [[3, 9], [4, 9], [5, 5, 9]], [[6, 9], [7, 8, 9]])
    assert result.texts == result.prompts == ("draw b", "draw a")
    assert result.turns == (
        (Turn(stage="think", text="ee", tokens=(5, 5, 9)), Turn(stage="recaption", text="f", tokens=(6, 9))),
        (Turn(stage="think", text="c", tokens=(3, 9)), Turn(stage="recaption", text="gh", tokens=(7, 8, 9))),
    )
    assert result.ids == ("r0/b/1/recaption-0", "r0/a/0/recaption-0")


def test_tokens_of_another_model_are_left_out(tmp_path: Path) -> None:
    plan = plan_of(UNIFIED, THINKS, others=["think"])
    result = below(plan, tmp_path, [[3, 9], [4, 9], [5, 9]], [[6, 9], [7, 9]])
    assert result.turns is not None
    assert result.turns[1] == (Turn(stage="think", text="c"), Turn(stage="recaption", text="g", tokens=(7, 9)))


def test_a_track_that_does_not_continue_gets_the_text_of_its_parent_and_the_media_that_it_takes(tmp_path: Path) -> None:
    result = below(plan_of(PAINTER, THINKS), tmp_path, [[3, 9], [4, 9], [5, 9]], [[6, 9], [7, 9]], media=(NOTE, SOURCE))
    assert result.texts == ("f", "g") and result.turns is None
    # The condition is for texts.
    assert result.media == ((SOURCE,), (SOURCE,))


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([6, 3, 7, 9], "g"),
        # The last marker counts.
        ([3, 6, 3, 7, 7, 9], "gg"),
        # Without one, and with nothing behind it, the prompt.
        ([7, 9], "draw b"),
        ([6, 3, 9], "draw b"),
    ],
)
def test_a_marker_says_where_the_input_begins(tmp_path: Path, tokens: list[int], text: str) -> None:
    plan = plan_of(PAINTER, {**THINKS, "image": ("image", {"parent": "recaption", "marker": "c"})})
    result = below(plan, tmp_path, [[3, 9], [4, 9], [5, 9]], [tokens, [3, 7, 9]])
    assert result.texts == (text, "g") and result.prompts == ("draw b", "draw a")
    inputs = root(plan)["think"].inputs.select([0, 1])
    track = made(plan, "recaption", inputs, ["x", "y"], ["x", "y"], [tokens, [3, 7, 9]])
    assert fallbacks({"recaption": track}, plan) == {"image/fallbacks": 0.5 if text == "draw b" else 0.0}


def test_an_image_above_is_a_turn_and_an_instruction_the_last_one(tmp_path: Path) -> None:
    plan = plan_of(UNIFIED, REVISES)
    requests = root(plan, media=(NOTE, SOURCE))
    line = Lineage(plan, requests, folder=lambda: tmp_path)
    given = requests["draft"].inputs
    draft = made(
        plan, "draft", given.with_roles({"source"}), requests["draft"].sample_ids, ("a", "a", "b"), [0, 0.2, 1]
    )
    line.add("draft", draft)
    result = line.inputs(plan.stage("critique"))
    assert result.turns is not None
    image, words = result.turns[2]
    assert words == Turn(stage="critique", text="Criticise draw b.")
    assert [(ref.role, ref.modality) for ref in image.media] == [("source", "image")] and image.text == ""
    assert Path(image.media[0].uri).is_file() and result.turns[0][0] != result.turns[2][0]
    # The prompt's media come beside the turns, those of the track's roles.
    assert result.media == ((NOTE,),) * 3 and result.texts == result.prompts


@pytest.mark.parametrize(
    ("use", "shows", "given"),
    [
        ("takes", [], ("/cat.png",)),
        ("takes", ["draft"], ("/cat.png", "draft")),
        ("needs one", ["draft"], ("draft",)),
        ("needs one", [], ("/cat.png",)),
    ],
)
def test_a_stage_may_be_shown_images_above_its_parent(use: Any, shows: list[str], given: Any, tmp_path: Path) -> None:
    model = dataclasses.replace(PAINTER, inputs={"image": {"source": use}, "text": {"condition": "takes"}})
    stages = {**REVISES, "image": ("image", {"parent": "critique", "shows": shows})}
    result = below(plan_of(model, stages), tmp_path, [0, 0.2, 1], [[6, 9], [7, 9]], media=(SOURCE,))
    names = [tuple("draft" if str(tmp_path) in ref.uri else ref.uri for ref in row) for row in result.media]
    assert names == [given] * 2
    assert {ref.role for row in result.media for ref in row} == {"source"}


def test_rows_of_one_id_have_the_same_turns() -> None:
    turn = (Turn(stage="think", tokens=(1, 2)),)
    given = {"ids": ("a", "a"), "prompts": ("p", "p"), "texts": ("p", "p"), "media": ((), ())}
    assert Inputs(**given, turns=(turn, turn)).negative("").turns is None
    with pytest.raises(BatchError, match=r"Inputs\.ids: rows 0 and 1 are both 'a' and go on from different turns"):
        Inputs(**given, turns=(turn, (Turn(stage="think", tokens=(1, 3)),)))


def test_turns_cross_the_wire() -> None:
    turn = Turn(stage="think", text="ab", tokens=(1, 2, 9), media=(SOURCE,))
    inputs = Inputs(ids=("a", "b"), prompts=("p", "q"), texts=("p", "q"), media=((), ()), turns=((turn,), ()))
    assert same(from_bytes(to_bytes(inputs), Inputs), inputs)


def reasons(plan: Plan) -> list[str]:
    return [str(reason) for reason in lineage(plan) if reason.key.startswith(("stages.", "engine"))]


def test_chains_that_cannot_read_what_was_written_are_refused() -> None:
    assert reasons(plan_of(UNIFIED, THINKS)) == []
    assert reasons(plan_of(UNIFIED, REVISES)) == []
    # A painter below one text of the same model reads that text, as it always did.
    assert reasons(plan_of(PAINTER, {"text": ("text", {}), "image": ("image", {"parent": "text"})})) == []
    (text, image) = reasons(plan_of(PAINTER, THINKS))
    assert text.startswith(
        "stages.recaption.parent: got 'think': track 'text' of model 'painter' cannot continue from what the model wrote "
        "in stage 'think'; it would read the text of its parent alone."
    )
    assert image.startswith("stages.image.parent: got 'recaption': track 'image' of model 'painter' cannot continue")
    blind = plan_of(UNIFIED, THINKS)
    spec = dataclasses.replace(blind.stages[0].engine.spec, capabilities={Cap.MEDIA_REFS})
    engine = dataclasses.replace(blind.stages[0].engine, spec=spec)
    changed = dataclasses.replace(
        blind, stages=tuple(dataclasses.replace(stage, engine=engine) for stage in blind.stages)
    )
    assert reasons(changed)[0] == (
        "engine: stages.recaption, which continues from others, needs 'turns'; engine 'own' does not provide it."
    )


def test_a_text_below_an_image_is_refused_on_an_engine_that_is_given_no_media() -> None:
    model = dataclasses.replace(UNIFIED, text_alone={"own": "it has no eyes"})
    assert reasons(plan_of(model, THINKS)) == []
    assert reasons(plan_of(model, REVISES))[0] == (
        "engine: got 'own' below stage 'draft', which generates images; it is given none of model 'unified': it has no "
        "eyes. Use trainside."
    )


@pytest.mark.parametrize(
    ("model", "stages", "says"),
    [
        (
            UNIFIED,
            {"image": ("image", {"parent": "critique", "shows": ["draft"]})},
            "continues from all stages above it",
        ),
        (
            PAINTER,
            {"image": ("image", {"parent": "critique", "shows": ["critique"]})},
            "'critique' cannot be shown. Expected image stages above its parent: draft.",
        ),
        (
            dataclasses.replace(PAINTER, inputs={"text": {"condition": "takes"}}),
            {"image": ("image", {"parent": "critique", "shows": ["draft"]})},
            "model 'painter' takes no images in one role. Leave it out.",
        ),
        (
            PAINTER,
            {"critique": ("text", {"shows": ["draft"]})},
            "'draft' cannot be shown. Expected none: no stage above makes images.",
        ),
    ],
)
def test_images_that_cannot_be_shown_are_refused(model: ModelSpec, stages: Any, says: str) -> None:
    (reason,) = [one for one in reasons(plan_of(model, {**REVISES, **stages})) if ".shows" in one]
    assert reason.endswith(says) or says in reason


def test_media_of_a_prompt_may_be_for_any_stage(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    file = tmp_path / "edits.jsonl"
    row = '{"prompt": "red", "media": [{"modality": "image", "role": "ROLE", "uri": "a.png"}]}\n'

    def read(role: str, stages: Any = THINKS, model: ModelSpec = UNIFIED) -> None:
        file.write_text(row.replace("ROLE", role) * 4)
        plan = plan_of(model, stages)
        read_data(dataclasses.replace(plan, data=dataclasses.replace(plan.data, train=str(file))))

    read("source")
    read("condition")
    with pytest.raises(DataError, match=r"edits\.jsonl:1: got media of role 'target', expected condition or source"):
        read("target")
    # One that a stage needs is given by the image above it, or has to be there.
    needs = dataclasses.replace(PAINTER, inputs={"image": {"source": "needs one"}, "text": {"condition": "takes"}})
    read("source", {"draft": ("image", {}), "image": ("image", {"parent": "draft"})}, needs)
    with pytest.raises(DataError, match=r":1: got no media of role 'source', of which model 'unified' needs one"):
        read(
            "condition",
            {"text": ("text", {}), "image": ("image", {"parent": "text"})},
            dataclasses.replace(needs, name="unified"),
        )


class Describes:
    """An engine of both stages: texts of given tokens, and images."""

    def __init__(self, plan: Plan, texts: Sequence[Sequence[int]], cut: Sequence[int]) -> None:
        self.plan, self.texts, self.cut = plan, texts, cut

    def generate(self, request: Request) -> Track:
        stage = self.plan.stage(request.track)
        values: Any = self.texts if stage.kind == "text" else [0.5] * request.num_rows
        track = made(self.plan, stage.name, request.inputs, request.sample_ids, request.group_ids, values)
        status = [Status.TRUNCATED if row in self.cut else Status.COMPLETED for row in range(track.num_rows)]
        return dataclasses.replace(track, status=tuple(status)) if stage.kind == "text" else track


def drawn(monkeypatch: Any, *, texts: Sequence[Sequence[int]], cut: Sequence[int], **settings: Any) -> dict[str, Track]:
    """The tracks of a text with two images of each, three of two prompts; credit included, an image scores its row."""
    plan = plan_of(
        PAINTER, {"text": ("text", {}), "image": ("image", {"parent": "text", "credit": "mean", **settings})}
    )
    plan = plan.with_stages(lambda stage: dataclasses.replace(stage, samples=2) if stage.parent else stage)
    engine = Describes(plan, texts, cut)
    monkeypatch.setattr("unirl.loop.generation.generate", lambda engine, request, parent: engine.generate(request))
    parts: Any = SimpleNamespace(
        models={
            "": SimpleNamespace(
                **{name: getattr(loop_toy.ToyModel(), name) for name in ("schedule", "latent_shape")}, spec=PAINTER
            )
        },
        engines={"text": engine, "image": engine},
    )
    monkeypatch.setattr("unirl.loop.generation.sampled_policy", lambda *_: nullcontext())
    tracks = generate_stages(
        parts, plan, root(plan), versions={"text": 0, "image": 0}, during=lambda stage: nullcontext()
    )
    check_finished(tracks, plan)
    image = tracks["image"]
    tracks["image"] = dataclasses.replace(image, rewards=torch.arange(image.num_rows, dtype=torch.float32))
    return credited(tracks, plan.stages)


FULL, EMPTY = [3, 9], [9]


def test_unfinished_texts_get_samples_unless_they_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    tracks = drawn(monkeypatch, texts=[FULL, EMPTY, FULL], cut=[2])
    assert tracks["image"].parent_ids == ("r0/a/0",) * 2 + ("r0/a/1",) * 2 + ("r0/b/1",) * 2
    tracks = drawn(monkeypatch, texts=[FULL, EMPTY, FULL], cut=[2], unfinished="leave-out")
    assert tracks["image"].parent_ids == ("r0/a/0",) * 2
    rewards = tracks["text"].rewards
    # Rewards 0 and 1 of the images of the first; the others have none.
    assert rewards is not None and rewards[0] == 0.5 and rewards[1:].isnan().all()
    assert tracks["text"].sample_weights.tolist() == [1, 0, 0]
    tracks = drawn(monkeypatch, texts=[FULL, EMPTY, FULL], cut=[2], unfinished="leave-out", unfinished_credit=-1.0)
    rewards = tracks["text"].rewards
    assert rewards is not None and rewards.tolist() == [0.5, -1, -1]
    assert tracks["text"].sample_weights.tolist() == [1, 1, 1]


def test_a_stage_without_anything_to_go_on_from_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    says = r"stages\.image\.unfinished: 3 of 3 texts of stage 'text' are unfinished \(1 truncated, 2 aborted or empty\)"
    for policy in ("leave-out", "fail"):
        with pytest.raises(RunFailed, match=says + r"\. Raise sampling\.text\.max_new_tokens"):
            drawn(monkeypatch, texts=[EMPTY, EMPTY, FULL], cut=[2], unfinished=policy)


def test_settings_of_unfinished_texts_are_refused_where_they_do_nothing() -> None:
    def refusal(**settings: Any) -> str:
        stages = {"text": ("text", {}), "image": ("image", {"parent": "text", **settings})}
        (reason,) = [one for one in reasons(plan_of(PAINTER, stages)) if "unfinished" in one]
        return reason

    assert refusal(unfinished_credit=-1.0) == (
        "stages.image.unfinished_credit: got -1.0, which is the credit of texts that are left out. Set "
        "stages.image.unfinished=leave-out and stages.image.credit=mean, or null."
    )
    image = {"draft": ("image", {}), "image": ("image", {"parent": "draft", "unfinished": "fail"})}
    (reason,) = [one for one in reasons(plan_of(PAINTER, image)) if "unfinished" in one]
    assert reason == "stages.image.unfinished: got 'fail', but stage 'draft' makes no texts. Use continue."
