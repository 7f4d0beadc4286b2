"""Rule-based rewards."""

from __future__ import annotations

from pathlib import Path

from unirl.core.plugins.hookspec import hookimpl
from unirl.core.specs.capability import Cap
from unirl.core.specs.spec import RewardExample, RewardSpec
from unirl.core.types.data import MediaRef

__all__ = [
    "BRIGHTNESS",
    "DIVERSITY",
    "EDIT",
    "EXACT_MATCH",
    "FUNCTION",
    "JPEG_SIZE",
    "MOVING_SHAPES",
    "PIXEL_TARGET",
    "SHAPES",
    "SOFT_SHAPES",
    "unirl_rewards",
]

_PLAIN = {Cap.REWARD_SAMPLE}

SHAPES = RewardSpec(
    name="shapes",
    summary="Colour, shape and position of the single shape in a 64 px image, against the prompt's metadata",
    build="unirl.rewards.rules.shapes:build",
    config="unirl.rewards.rules.config:ShapesConfig",
    capabilities=_PLAIN,
    scale="share of right answers among colour, shape and place: 0, 1/3, 2/3 or 1",
    range=(0.0, 1.0),
    examples=(
        RewardExample(prompt="a red square on the left", metadata={"color": "red", "shape": "square", "place": "left"}),
        RewardExample(prompt="a blue ring at the top", metadata={"color": "blue", "shape": "ring", "place": "top"}),
    ),
    media="image",
    metadata=("color", "shape", "place"),
    metadata_kinds={"color": ("text",), "shape": ("text",), "place": ("text",)},
    parts=("color", "shape", "place", "perfect"),
)

SOFT_SHAPES = RewardSpec(
    name="soft-shapes",
    summary="Colour, shape and position of the single shape in a 64 px image by degree; differentiable",
    build="unirl.rewards.rules.soft_shapes:build",
    config="unirl.rewards.rules.config:SoftShapesConfig",
    capabilities=_PLAIN | {Cap.REWARD_DIFFERENTIABLE},
    scale="mean degree to which colour, shape and place are right, 0 to 1",
    range=(0.0, 1.0),
    examples=SHAPES.examples,
    media="image",
    metadata=SHAPES.metadata,
    metadata_kinds=SHAPES.metadata_kinds,
    parts=("color", "shape", "place"),
)

_SOURCE = MediaRef(modality="image", role="source", uri=str(Path(__file__).with_name("source.png")))
"""A red ring on the left."""

EDIT = RewardSpec(
    name="edit",
    summary="An edit of a 64 px image of a shape: the requested change, and everything else unchanged",
    build="unirl.rewards.rules.edit:build",
    config="unirl.rewards.rules.config:EditConfig",
    capabilities=_PLAIN,
    scale="asked (0 or 1) x share of what was to stay, 0 to 1",
    range=(0.0, 1.0),
    examples=tuple(
        RewardExample(
            prompt=prompt,
            metadata={"attribute": attribute, "value": value},
            media=(_SOURCE,),
            draw="unirl.rewards.rules.edits_world:draw_any",
        )
        for prompt, attribute, value in (
            ("make the ring green", "color", "green"),
            ("move the ring to the top", "place", "top"),
        )
    ),
    media="image",
    metadata=("attribute", "value"),
    metadata_kinds={"attribute": ("text",), "value": ("text",)},
    parts=("asked", "kept", "background", "perfect"),
)

MOVING_SHAPES = RewardSpec(
    name="moving-shapes",
    summary="Colour, shape and direction of the single shape that moves in a 32 px video",
    build="unirl.rewards.rules.moving_shapes:build",
    config="unirl.rewards.rules.config:MovingShapesConfig",
    capabilities=_PLAIN,
    scale="mean of three shares: frames of the right colour, frames of the right shape, steps in the right direction",
    range=(0.0, 1.0),
    examples=tuple(
        RewardExample(
            prompt=f"a {color} {shape} moves {motion}",
            metadata={"color": color, "shape": shape, "motion": motion},
            height=32,
            width=32,
            frames=9,
            draw="unirl.rewards.rules.clips_world:draw_frame",
        )
        for color, shape, motion in (("red", "square", "down"), ("blue", "ring", "up"))
    ),
    media="video",
    metadata=("color", "shape", "motion"),
    metadata_kinds={"color": ("text",), "shape": ("text",), "motion": ("text",)},
    parts=("color", "shape", "motion", "perfect"),
)

JPEG_SIZE = RewardSpec(
    name="jpeg-size",
    summary="Size of the image as a JPEG file: rewards detail or smoothness",
    build="unirl.rewards.rules.jpeg:build",
    config="unirl.rewards.rules.config:JpegSizeConfig",
    capabilities=_PLAIN,
    scale="kilobytes (1000 bytes) of the JPEG file, unbounded; their negative with prefer=small",
    media="image",
)

BRIGHTNESS = RewardSpec(
    name="brightness",
    summary="Mean luma of the image",
    build="unirl.rewards.rules.brightness:build",
    config="unirl.rewards.rules.config:BrightnessConfig",
    capabilities=_PLAIN,
    scale="mean Rec. 601 luma, 0 (black) to 1 (white)",
    range=(0.0, 1.0),
    media="image",
)

DIVERSITY = RewardSpec(
    name="diversity",
    summary="Distance to the other samples of the prompt, by pixels or words",
    build="unirl.rewards.rules.diversity:build",
    config="unirl.rewards.rules.config:DiversityConfig",
    capabilities={Cap.REWARD_GROUP},
    scale="mean distance, 0 (all alike, or a sample alone) to 1",
    range=(0.0, 1.0),
    media="any",
)

EXACT_MATCH = RewardSpec(
    name="exact-match",
    summary="Whether the completion equals the prompt's answer, after normalisation",
    build="unirl.rewards.rules.exact_match:build",
    config="unirl.rewards.rules.config:ExactMatchConfig",
    capabilities=_PLAIN,
    scale="1 if the text equals metadata `answer`, else 0",
    range=(0.0, 1.0),
    examples=(
        RewardExample(prompt="What is 6 x 7?", metadata={"answer": "42"}, text="42"),
        RewardExample(prompt="The capital of France?", metadata={"answer": "Paris"}, text=" paris\n"),
    ),
    media="text",
    metadata=("answer",),
    metadata_kinds={"answer": ("text",)},
)

PIXEL_TARGET = RewardSpec(
    name="pixel-target",
    summary="Closeness of the pixels to one colour or one image; differentiable",
    build="unirl.rewards.rules.pixel_target:build",
    config="unirl.rewards.rules.config:PixelTargetConfig",
    capabilities=_PLAIN | {Cap.REWARD_DIFFERENTIABLE},
    scale="negative mean squared distance to the target, -1 to 0",
    range=(-1.0, 0.0),
    media="image",
)

FUNCTION = RewardSpec(
    name="function",
    summary="Your own Python function, in a file or an installed module, with TRL's calling convention",
    build="unirl.rewards.rules.function:build",
    config="unirl.rewards.rules.config:FunctionConfig",
    # A function sees a whole batch; that it scores samples one by one is for its author to keep.
    capabilities=_PLAIN,
    trial={"target": "unirl.rewards.rules.function:mean_red"},
    scale="what the function returns, unbounded",
    media="any",
)


@hookimpl
def unirl_rewards() -> list[RewardSpec]:
    return [
        SHAPES,
        SOFT_SHAPES,
        EDIT,
        MOVING_SHAPES,
        JPEG_SIZE,
        BRIGHTNESS,
        DIVERSITY,
        EXACT_MATCH,
        PIXEL_TARGET,
        FUNCTION,
    ]
