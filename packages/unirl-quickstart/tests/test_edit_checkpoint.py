"""The shipped editing model: an ordinary FLUX.2 [klein], sources that fit their instructions, half good, and it looks."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from unirl.core.match.match import match
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.types.data import MediaRef
from unirl.core.types.event import Event
from unirl.core.types.inputs import Inputs
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.loop.run import train
from unirl.models.flux2_klein.config import Flux2KleinConfig
from unirl.models.flux2_klein.model import build
from unirl.quickstart import edit_checkpoint_path, edit_prompts_path, prompts_path
from unirl.rewards.rules.edits_world import ALL_EDITS, Edit
from unirl.rewards.rules.shapes_reading import read_shapes
from unirl.rewards.rules.shapes_world import ALL_SCENES, COLORS, PLACES, SHAPES, Scene

RunScript = Callable[..., dict[str, bytes]]
Case = tuple[Edit, Tensor]
SPLITS: tuple[Literal["train", "heldout"], ...] = ("train", "heldout")
PARTS = ("asked", "kept", "background", "perfect", "reward")


@pytest.fixture(scope="module")
def script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("make_edit_checkpoint")


@pytest.fixture(scope="module")
def pipeline():  # importing its type costs seconds where no test needs it
    from diffusers import Flux2KleinPipeline

    result = Flux2KleinPipeline.from_pretrained(edit_checkpoint_path(), local_files_only=True)
    result.set_progress_bar_config(disable=True)
    return result


def rows(split: Literal["train", "heldout"]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in edit_prompts_path(split).read_text().splitlines()]


def image_file(row: dict[str, Any]) -> Path:
    (media,) = row["media"]
    assert (media["modality"], media["role"]) == ("image", "source")
    return edit_prompts_path("train").parent / media["uri"]


def levels(file: Path) -> Tensor:
    return torch.from_numpy(np.asarray(Image.open(file)).copy()).permute(2, 0, 1)


def scene_of(row: dict[str, Any]) -> Scene:
    color, shape, place = row["prompt_id"].split("-")[:3]
    return Scene(color=color, shape=shape, place=place)


def cases(split: Literal["train", "heldout"]) -> list[Case]:
    return [(Edit(source=scene_of(row), **row["metadata"]), levels(image_file(row))) for row in rows(split)]


def test_it_is_an_ordinary_flux2_klein_of_at_most_two_and_a_half_megabytes(
    check_ordinary: Callable[[Any, Path], None],
) -> None:
    from diffusers import Flux2KleinPipeline

    check_ordinary(Flux2KleinPipeline, edit_checkpoint_path())


def test_every_prompt_asks_for_a_change_of_what_its_source_shows() -> None:
    for split, count, images in zip(SPLITS, (288, 144), (96, 48), strict=True):
        each, edits = rows(split), [edit for edit, _ in cases(split)]
        assert len({row["prompt_id"] for row in each}) == len(each) == count
        assert len({image_file(row) for row in each}) == images
        assert set(edits) <= set(ALL_EDITS) and len(set(edits)) == count
        assert [row["prompt"] for row in each] == [edit.instruction for edit in edits]
        assert set(Counter(edit.attribute for edit in edits).values()) == {count // 3}
        seen = read_shapes(torch.stack([image for _, image in cases(split)]) / 255)
        assert [list(COLORS)[index] for index in seen.color] == [edit.source.color for edit in edits]
        assert [SHAPES[index] for index in seen.shape] == [edit.source.shape for edit in edits]
        assert [list(PLACES)[index] for index in seen.place] == [edit.source.place for edit in edits]


def test_held_out_scenes_are_the_painters_and_occur_in_training_neither_before_nor_after_an_edit() -> None:
    painted = [json.loads(line)["metadata"] for line in prompts_path("heldout").read_text().splitlines()]
    held_out = {Scene(**facts) for facts in painted}
    assert {edit.source for edit, _ in cases("heldout")} == held_out
    in_training = {scene for edit, _ in cases("train") for scene in (edit.source, edit.target)}
    assert in_training == set(ALL_SCENES) - held_out


def test_the_plugin_sees_the_instruction_and_the_source_as_in_pre_training(pipeline, script: ModuleType) -> None:
    model = build(Flux2KleinConfig(path=str(edit_checkpoint_path())), device="cpu")
    sampling = LatentSamplingConfig(num_inference_steps=10, height=64, width=64, max_sequence_length=8)
    # Sigmas of an unshifted schedule: 1, 0.9, ... in fp32.
    torch.testing.assert_close(model.schedule(sampling), torch.linspace(1, 0, 11), rtol=0, atol=6e-8)
    some = rows("heldout")[:6]
    texts = tuple(row["prompt"] for row in some)
    media = tuple((MediaRef(modality="image", role="source", uri=str(image_file(row))),) for row in some)
    conditions = model.encode(Inputs(ids=texts, prompts=texts, texts=texts, media=media), sampling=sampling)
    embeds = script.embed(pipeline, texts)
    assert torch.equal(conditions["prompt_embeds"], torch.stack([embeds[text] for text in texts]))
    source = script.encode_images(pipeline.vae, torch.stack([levels(image_file(row)) for row in some]) / 255)
    x, sigma = torch.randn(source.shape, generator=torch.Generator().manual_seed(0)), torch.full((len(some),), 0.7)
    with torch.no_grad():
        result = model.velocity(x, sigma, conditions)
        embedded = torch.stack([embeds[text] for text in texts])
        expected = script.velocity(pipeline.transformer, x, sigma, embeds=embedded, source=source)
    # The same arithmetic, but sources are encoded one by one: fp32 rounding through two small networks.
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-4)


def test_instructions_are_whole_words_that_fit_into_eight_tokens(pipeline) -> None:
    for edit in ALL_EDITS:
        tokens = pipeline.tokenizer(edit.instruction).input_ids
        assert len(tokens) == len(edit.instruction.split()) <= 6
    assert pipeline.tokenizer.decode(pipeline.tokenizer("ü, 你好").input_ids) == "ü, 你好"


def test_diffusers_own_pipeline_call_edits_with_it(pipeline) -> None:
    row = rows("heldout")[0]
    image = pipeline(
        image=Image.open(image_file(row)),
        prompt=row["prompt"],
        height=64,
        width=64,
        num_inference_steps=10,
        guidance_scale=1.0,
        max_sequence_length=8,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).images
    assert image.shape == (1, 3, 64, 64)
    # Something lit on black: a shape covers 4 to 17 percent of the canvas.
    assert 0.02 < (image.amax(dim=1) > 0.5).float().mean().item() < 0.25


def _card() -> dict[str, dict[str, float]]:
    card = (edit_checkpoint_path() / "README.md").read_text()
    pattern = r"^\| (heldout|train) \|" + r" ([\d.]+) \|" * len(PARTS) + "$"
    return {
        split: dict(zip(PARTS, map(float, shares), strict=True))
        for split, *shares in re.findall(pattern, card, re.MULTILINE)
    }


@pytest.mark.slow
def test_it_is_as_good_as_its_card_says(pipeline, script: ModuleType) -> None:
    stated = _card()
    seed = int(re.search(r"noise seed (\d+)", (edit_checkpoint_path() / "README.md").read_text())[1])  # type: ignore[index]
    result = script.measure(pipeline, cases("heldout"), seed=seed, rounds=4)
    # Samples near a threshold fall either way on another machine: of 576 about 17 may turn.
    assert result == pytest.approx(stated["heldout"], abs=0.03)
    # Room to learn, and something to learn from.
    for split in SPLITS:
        assert 0.3 < stated[split]["perfect"] < 0.6


@pytest.mark.slow
def test_with_the_sources_of_other_prompts_it_is_no_better_than_a_guess(pipeline, script: ModuleType) -> None:
    """Only the source shows what is to be kept. Of the four held-out scenes of a shape no two share a colour or a
    place, and the one that has the asked value already is not asked about. A model that knows all that, but not the
    source, guesses the place of a recoloured shape and the colour of a moved one with probability 1/3, and both of a
    turned one with 1/4. Once in 48 times a permutation of the prompts gives back an image that is its own.
    """
    own, rounds = cases("heldout"), 4
    order = torch.randperm(len(own), generator=torch.Generator().manual_seed(0)).tolist()
    swapped = [(edit, own[other][1]) for (edit, _), other in zip(own, order, strict=True)]
    shares: list[float] = []
    for seen in (own, swapped):
        images = script.edit_images(pipeline, [*seen] * rounds, seed=5)
        shares.append(script.score(images, own * rounds)["perfect"])
    guess = 1 / 48 + 47 / 48 * (1 / 3 + 1 / 4 + 1 / 3) / 3
    # Three standard errors of a share of 576 images.
    slack = 3 * (guess * (1 - guess) / (len(own) * rounds)) ** 0.5
    assert shares[0] > guess + slack, shares
    assert shares[1] < guess + slack, shares


def test_edits_are_a_function_of_the_seed(pipeline, script: ModuleType) -> None:
    some = cases("heldout")[:4]
    first, again, other = (script.edit_images(pipeline, some, seed=seed) for seed in (3, 3, 4))
    assert first.equal(again)
    assert not first.equal(other)


def test_images_before_and_after_an_edit_differ_in_what_was_asked_alone(script: ModuleType) -> None:
    """Pre-training pairs images of one number: same size, and same distances from the middle of their place."""
    images = script.draw_all(count=3, generator=torch.Generator().manual_seed(0))
    number_of = {scene: number for number, scene in enumerate(ALL_SCENES)}
    for edit in ALL_EDITS:
        before, after = (images[number_of[scene]] for scene in (edit.source, edit.target))
        lit = [(each.amax(dim=1) > 0.5).sum(dim=(1, 2)) for each in (before, after)]
        if edit.attribute == "color":
            # Every colour has a channel at 1, so the brightest channel is the same.
            assert torch.equal(before.amax(dim=1), after.amax(dim=1))
        elif edit.attribute == "place":
            # Pixels at a soft edge fall to either side: a perimeter has up to about 100 pixels, and few lie at a half.
            assert (lit[0] - lit[1]).abs().max() <= 12
        else:
            assert torch.equal(before.sum(dim=(2, 3)) > 0, after.sum(dim=(2, 3)) > 0)


@pytest.mark.slow
def test_the_script_writes_the_same_bytes_twice(tmp_path: Path, run_script: RunScript) -> None:
    settings = ["--steps=2", "--images-per-scene=2", "--batch=8", "--rounds=1"]
    written = [run_script("make_edit_checkpoint", tmp_path / name, *settings) for name in ("first", "second")]
    assert written[0] == written[1]
    line = re.search(r"make_edit_checkpoint\.py (.*)$", written[0]["checkpoint/README.md"].decode(), re.MULTILINE)
    assert line is not None and sorted(line[1].split()) == sorted(settings)
    for split in SPLITS:
        assert written[0][f"prompts/{split}.jsonl"] == edit_prompts_path(split).read_bytes()
        for row in rows(split):
            # Where a CPU fuses a product and a sum, a pixel of an edge may round to the next level.
            again = levels(tmp_path / "first/prompts" / row["media"][0]["uri"]).int()
            assert (again - levels(image_file(row)).int()).abs().max() <= 1


def test_prompts_without_a_source_or_its_metadata_are_refused(tmp_path: Path) -> None:
    catalog = Catalog.discover()

    def run(row: dict[str, Any]) -> None:
        (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
        words = [
            f"data.train={tmp_path / 'prompts.jsonl'}",
            "data.eval=''",
            "data.prompts_per_step=1",
            "~tracker.report",
        ]
        plan = compose("quickstart-edit", [*words, f"run.dir={tmp_path / 'run'}"], catalog=catalog)
        assert match(plan, catalog=catalog).accepted
        train(plan, catalog=catalog, overrides=words)

    good = rows("train")[0]
    good["media"][0]["uri"] = str(image_file(good))
    with pytest.raises(Exception, match=r"prompts\.jsonl.*'value'"):
        run({**good, "metadata": {"attribute": "color"}})
    with pytest.raises(Exception, match=r"got media of role 'condition', expected source"):
        run({**good, "media": [{**good["media"][0], "role": "condition"}]})
    with pytest.raises(Exception, match=r"reward\.edit: .*got 0 source images, expected one"):
        run({key: value for key, value in good.items() if key != "media"})


def test_the_example_of_its_tutorial_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs/tutorials/quickstart-edit.md").read_text(encoding="utf-8")
    (look,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(look, names := dict[str, Any]())
    assert capsys.readouterr().out.endswith("(64, 64)\n")
    seen = read_shapes(torch.from_numpy(np.asarray(names["edited"]).copy()).permute(2, 0, 1)[None] / 255)
    assert (list(COLORS)[seen.color], list(PLACES)[seen.place]) == ("blue", "left")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_it_learns_to_edit_held_out_images(tmp_path: Path) -> None:
    catalog = Catalog.discover()
    words = [f"run.dir={tmp_path}", "run.max_steps=20", "eval.every=20", "run.save_every=0", "~tracker.report"]
    result: list[float] = []

    def note(event: Event) -> None:
        if event.kind == "evaluated":
            result.append(event.data["metrics"]["reward/edit"])

    train(compose("quickstart-edit", words, catalog=catalog), catalog=catalog, overrides=words, listeners=[note])
    before, after = result
    # Each is the mean of 576 rewards of standard deviation 0.45 at most near these means: three standard errors of the
    # difference. Three seeds gained 0.13 to 0.17.
    assert before < 0.7 and after - before > 3 * 0.45 * (2 / 576) ** 0.5, result
