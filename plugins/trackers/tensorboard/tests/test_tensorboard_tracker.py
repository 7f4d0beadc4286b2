"""The TensorBoard tracker, read back with TensorBoard's own reader."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from unirl.conformance.doubles.samples import make_samples
from unirl.core.errors import RecipeError
from unirl.core.observe.events import EventStream
from unirl.core.roles import RunInfo
from unirl.core.types.media import Media
from unirl.trackers.tensorboard import plugin
from unirl.trackers.tensorboard.config import TensorboardConfig
from unirl.trackers.tensorboard.tracker import TensorboardTracker, build, image_grid

CONFIG = {"run": {"max_steps": 3}, "algorithm": {"use": "flow-grpo"}}


def run_info(folder: Path, resumed_at: int | None = None) -> RunInfo:
    return RunInfo(name="r", folder=folder, plan_hash="0123456789abcdef", config=CONFIG, resumed_at=resumed_at)


def started(
    folder: Path, resumed_at: int | None = None, *, max_images: int = 16, flush_s: int = 10
) -> TensorboardTracker:
    tracker = build(TensorboardConfig(max_images=max_images, flush_s=flush_s))
    tracker.start(run_info(folder, resumed_at))
    return tracker


def read_back(folder: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    result.Reload()
    return result


def test_the_spec_names_a_build_and_a_config_that_exist():
    (spec,) = plugin.unirl_trackers()
    assert spec.build == f"{build.__module__}:{build.__qualname__}"
    assert spec.config == f"{TensorboardConfig.__module__}:{TensorboardConfig.__qualname__}"


def test_scalars_come_back_under_their_keys_and_steps(tmp_path: Path):
    tracker = started(tmp_path)
    for step in (1, 2, 3):
        tracker.log({"reward_mean": step / 4, "reward/shapes/colour": 1.0}, step=step)
    tracker.finish("done")
    result = read_back(tmp_path)
    assert [(e.step, e.value) for e in result.Scalars("reward_mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert [e.value for e in result.Scalars("reward/shapes/colour")] == [1.0, 1.0, 1.0]


def test_a_resumed_run_continues_the_axis_of_the_first_and_hides_what_was_lost(tmp_path: Path):
    first = started(tmp_path)
    for step in (1, 2, 3, 4):
        first.log({"loss": float(step)}, step=step)
    first.finish("stopped")
    second = started(tmp_path, resumed_at=2)
    for step in (3, 4, 5):
        second.log({"loss": float(10 * step)}, step=step)
    second.finish("done")
    points = [(e.step, e.value) for e in read_back(tmp_path).Scalars("loss")]
    assert points == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0), (5, 50.0)]


def test_images_become_one_grid_with_their_captions_in_order(tmp_path: Path):
    tracker = started(tmp_path)
    images = torch.stack([torch.full((3, 8, 8), level) for level in (0.0, 0.2, 0.4, 0.6, 1.0)])
    prompts, rewards = [f"prompt {i}" for i in range(5)], [i / 10 for i in range(5)]
    tracker.samples("eval", make_samples(Media(kind="image", values=images), prompts, rewards), step=7, lineage={})
    tracker.finish("done")
    result = read_back(tmp_path)
    (image,) = result.Images("eval")
    assert image.step == 7
    picture = Image.open(io.BytesIO(image.encoded_image_string)).convert("RGB")
    # Five images: three columns, two rows of 8 pixels, with gaps of 2.
    assert picture.size == (3 * 10 + 2, 2 * 10 + 2)
    centres = [(6, 6), (16, 6), (26, 6), (6, 16), (16, 16)]
    assert [picture.getpixel(at) for at in centres] == [(round(255 * v),) * 3 for v in (0.0, 0.2, 0.4, 0.6, 1.0)]
    assert picture.getpixel((26, 16)) == (128, 128, 128)
    (text,) = result.Tensors("eval/text_summary")
    assert text.tensor_proto.string_val[0].decode().splitlines()[3] == "4. prompt 3 | reward 0.30"


def test_a_grid_shows_at_most_max_images(tmp_path: Path):
    tracker = started(tmp_path, max_images=4)
    nine = make_samples(Media(kind="image", values=torch.rand(9, 3, 4, 4)), ["p"] * 9)
    tracker.samples("train", nine, step=1, lineage={})
    tracker.finish("done")
    (image,) = read_back(tmp_path).Images("train")
    assert (image.width, image.height) == (14, 14)


def test_a_grid_of_one_image_is_that_image_with_a_border():
    grid = image_grid(torch.ones(1, 3, 2, 5), gap=1)
    assert grid.shape == (3, 4, 7)
    assert bool((grid[:, 1:3, 1:6] == 255).all())


def test_recipe_findings_and_status_are_readable_as_text(tmp_path: Path):
    tracker = started(tmp_path)
    events = EventStream()
    events.listen(tracker.event)
    events.emit("finding", step=2, text="grad norm is small")
    tracker.finish("failed")
    result = read_back(tmp_path)
    assert "flow-grpo" in result.Tensors("run/text_summary")[0].tensor_proto.string_val[0].decode()
    finding = result.Tensors("findings/text_summary")[0]
    assert (finding.step, finding.tensor_proto.string_val[0]) == (2, b"grad norm is small")
    assert result.Tensors("status/text_summary")[0].tensor_proto.string_val[0] == b"failed"


def test_what_was_logged_before_an_evaluation_survives_a_crash_after_it(tmp_path: Path):
    tracker = started(tmp_path, flush_s=3600)
    tracker.log({"loss": 1.0}, step=1)
    events = EventStream()
    events.listen(tracker.event)
    events.emit("evaluated", step=1, metrics={})
    assert [e.step for e in read_back(tmp_path).Scalars("loss")] == [1]
    tracker.finish("done")


def test_texts_come_back_letter_by_letter_with_prompt_reward_and_truncation(tmp_path: Path):
    tracker = build(TensorboardConfig(max_texts=2))
    tracker.start(run_info(tmp_path))
    texts = ("# no heading\n\n* 2 + 2\r= 4\r\n\tend", "", "left out")
    prompts = ["What is 2 + 2?\n<b>Think</b>", "Add.", "x"]
    track = make_samples(Media(kind="text", values=texts), prompts, [1.0, -0.25, 0.0], truncated=[0])
    tracker.samples("eval", track, step=7, lineage={})
    tracker.finish("done")
    (text,) = read_back(tmp_path).Tensors("eval/texts/text_summary")
    assert text.step == 7
    # In Markdown, four spaces before a line show it as it is.
    expected = (
        "**1. reward 1.00 truncated**\n\n    What is 2 + 2?\n    <b>Think</b>\n\ntext:\n\n"
        "    # no heading\n    \n    * 2 + 2\n    = 4\n    \tend\n\n"
        "**2. reward -0.25**\n\n    Add.\n\ntext:\n\n*nothing*"
    )
    assert text.tensor_proto.string_val[0].decode() == expected


def test_videos_become_strips_of_evenly_spread_frames(tmp_path: Path):
    tracker = started(tmp_path)
    # Eleven frames of rising brightness; strips show frames 0, 2, 4, 6, 8 and 10.
    long = torch.linspace(0, 1, 11).view(11, 1, 1, 1).expand(11, 3, 4, 4)
    videos = make_samples(Media(kind="video", values=(long, long[:2]), rate=8.0), ["long", "short"])
    tracker.samples("eval", videos, step=1, lineage={})
    tracker.finish("done")
    (image,) = read_back(tmp_path).Images("eval")
    picture = Image.open(io.BytesIO(image.encoded_image_string)).convert("RGB")
    # Two cells of 6 frames of 4 pixels, with gaps of 2; the short one fills the first 8 pixels of its cell.
    assert picture.size == (2 * 26 + 2, 8)
    levels = [round(255 * level) for level in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)]
    assert [picture.getpixel((4 + 4 * at, 4))[0] for at in range(6)] == levels
    assert [picture.getpixel((30 + 4 * at, 4))[0] for at in range(3)] == [0, round(25.5), 128]


def test_videos_are_an_animated_grid_as_well_where_short_ones_wait_at_their_last_frame(tmp_path: Path):
    tracker = started(tmp_path)
    # Levels that GIF's 256 greys hold exactly.
    long = torch.tensor([0, 51, 102, 255]).view(4, 1, 1, 1).expand(4, 3, 4, 4) / 255
    videos = make_samples(Media(kind="video", values=(long, long[:2]), rate=5.0), ["long", "short"])
    tracker.samples("eval", videos, step=3, lineage={})
    tracker.finish("done")
    (image,) = read_back(tmp_path).Images("eval/animation")
    assert (image.step, image.width, image.height) == (3, 2 * 6 + 2, 6 + 2)
    with Image.open(io.BytesIO(image.encoded_image_string)) as animation:
        assert (animation.format, animation.n_frames, animation.info["duration"]) == ("GIF", 4, 200)
        for frame, levels in enumerate([(0, 0), (51, 51), (102, 51), (255, 51)]):
            animation.seek(frame)
            picture = animation.convert("RGB")
            assert [picture.getpixel((x, 4))[0] for x in (4, 10)] == list(levels)


def test_a_child_is_shown_with_its_prompt_and_parents_under_the_tag_of_its_image(tmp_path: Path):
    tracker = started(tmp_path)
    rewrites = make_samples(Media(kind="text", values=("a *red* ring", "a disk")), ["ring", "disk"], name="rewrite")
    images = Media(kind="image", values=torch.rand(4, 3, 4, 4))
    track = make_samples(images, ["ring"] * 2 + ["disk"] * 2, [0.0, 0.25, 0.5, 1.0], name="image", parent=rewrites)
    assert rewrites.media is not None
    tracker.samples("train/image", track, step=2, lineage={"rewrite": rewrites.media.select([0, 0, 1, 1])})
    tracker.finish("done")
    result = read_back(tmp_path)
    assert [image.step for image in result.Images("train/image")] == [2]
    (text,) = result.Tensors("train/image/text_summary")
    first, second, third, fourth = re.split(r"\n\n(?=\*\*\d)", text.tensor_proto.string_val[0].decode())
    assert first == "**1. reward 0.00**\n\n    ring\n\nrewrite:\n\n    a *red* ring"
    assert second == "**2. reward 0.25**\n\n    ring\n\nrewrite:\n\n    a *red* ring"
    assert third.endswith("rewrite:\n\n    a disk") and fourth.startswith("**4. reward 1.00**\n\n    disk")


def test_an_image_made_from_an_image_stands_at_its_right(tmp_path: Path):
    tracker = started(tmp_path)
    # Of another size: what is missing of the smaller one is white.
    parents = Media(kind="image", values=torch.full((2, 3, 2, 4), 0.2))
    videos = Media(kind="video", values=torch.full((2, 1, 3, 4, 4), 0.6), rate=5.0)
    track = make_samples(videos, ["a", "b"], name="video")
    tracker.samples("eval/video", track, step=0, lineage={"image": parents})
    tracker.finish("done")
    (image,) = read_back(tmp_path).Images("eval/video")
    picture = Image.open(io.BytesIO(image.encoded_image_string)).convert("RGB")
    # Two cells of 4 + 4 pixels, with gaps of 2.
    assert picture.size == (2 * 10 + 2, 4 + 4)
    levels = [picture.getpixel(at)[0] for at in ((3, 2), (3, 5), (7, 2), (7, 5), (13, 2), (17, 5))]
    assert levels == [51, 255, 153, 153, 51, 153]


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("max_images", TensorboardConfig(max_images=0)),
        ("max_texts", TensorboardConfig(max_texts=0)),
        ("flush_s", TensorboardConfig(flush_s=0)),
    ],
)
def test_counts_below_one_are_refused_with_their_key(key: str, config: TensorboardConfig):
    with pytest.raises(RecipeError, match=f"tracker.tensorboard.{key}: got 0, expected 1 or more"):
        build(config)
