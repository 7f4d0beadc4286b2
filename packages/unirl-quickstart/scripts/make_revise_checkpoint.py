"""Makes the checkpoint of `quickstart-revise`: the unified quickstarts' BAGEL, pre-trained further on revisions.

    python packages/unirl-quickstart/scripts/make_revise_checkpoint.py

The shipped BAGEL draws a caption, but its critiques do not depend on the drawing, and it redraws too many of the
drawings that are called right. Here it learns to say what a drawing shows and whether that is right ("red disk left,
wrong shape"), to keep the drawing behind "right", whatever it shows, and to draw again behind anything else: behind
rendered drafts first, then behind its own as well, whose shapes are less clear. Some of its verdicts are careless. So
the verdict decides whether drawing again pays, which is left to learn from the images.
The VAE's decoder learns first to keep what it decodes: half of the rings lost their hole in it.
Seeded throughout; the same machine and library versions give the same bytes. About six minutes on one core.
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import diffusers
import torch
import torch.nn.functional as F
import transformers
from checkpoint_files import arguments_given, size_kb
from make_unified_checkpoint import (
    PATCH,
    WRITTEN,
    Author,
    Drawing,
    Drawings,
    Example,
    critique_of,
    draw_all,
    drawn,
    inputs_of,
    kept,
    measure,
    notes_of,
    pretrain,
    turns_of,
    write_vae,
    write_weights,
    written,
)
from make_writer_checkpoint import Clumsy, draw_splits
from torch import Tensor
from training import minimize
from unirl.core.types.array import Ragged
from unirl.core.types.inputs import Turn
from unirl.model_host.unified.sequence import Block
from unirl.models.bagel.config import BagelConfig
from unirl.models.bagel.images import NAMES, Images
from unirl.models.bagel.model import BagelModel, build
from unirl.models.bagel.vae import unpack
from unirl.numerics.tokens.batches import pad_batch
from unirl.quickstart import unified_checkpoint_path
from unirl.rewards.rules.shapes_reading import NOTHING, read_shapes
from unirl.rewards.rules.shapes_world import ALL_SCENES, COLORS, PLACES, SHAPES, Scene, render

PACKAGE = Path(__file__).resolve().parents[1] / "src/unirl/quickstart/revise"
REDRAW = "wrong shape"
"""The verdict that a careless critic has for half of the drawings; the shape is what drawings most often get wrong."""


# ------------------------------------------------------------------------------------------------ decoder


def train_decoder(model: BagelModel, images: Tensor, *, args: argparse.Namespace) -> None:
    """Trains the VAE's decoder alone on images [N, 3, 64, 64] in [0, 1], so that a drawing which is decoded and encoded
    again and again remains what it is: half of the rings lose their hole in the decoder of the start.

    The latents are those of the images, and those of their first decoding.
    """
    generator, vae = torch.Generator().manual_seed(args.seed), model.encoder.images.vae
    with torch.no_grad():
        first = torch.cat([model.latents_of(part) for part in images.split(64)])
        second = torch.cat([model.latents_of(model.decode(part)) for part in first.split(64)])
    latents, target = torch.cat([first, second]), 2 * torch.cat([images, images]) - 1

    def loss_of(step: int) -> Tensor:
        rows = torch.randint(len(latents), (16,), generator=generator)
        clean, expected = latents[rows], target[rows]
        noise = torch.rand(len(clean), 1, 1, 1, generator=generator) * torch.randn(clean.shape, generator=generator)
        packed = (clean + args.decoder_noise * noise) / vae.config.scaling_factor + vae.config.shift_factor
        error = vae.decode(unpack(packed, patch=PATCH)).sample - expected
        # Holes and corners are black, and weigh as much as the shape that they are of.
        is_near = F.max_pool2d(expected.amax(dim=1, keepdim=True), 15, stride=1, padding=7) > 0
        return ((1 + 4 * is_near) * (error.abs() + 0.5 * error**2)).mean()

    vae.decoder.requires_grad_(True)
    minimize(
        vae.decoder.parameters(),
        loss_of,
        name="decoder",
        steps=args.decoder_steps,
        learning_rate=args.decoder_rate,
        weight_decay=0.0,
        print_every=50,
    )
    vae.decoder.requires_grad_(False)


# ------------------------------------------------------------------------------------------------- corpus


def judged(scene: Scene, shown: Scene, *, verdict: str | None = None) -> str:
    """What a drawing of `scene` shows, and the verdict; None is the honest one."""
    return f"{notes_of(shown)}, {verdict or critique_of(scene, shown)}"


@dataclass(frozen=True)
class Draft:
    """A drawing behind the caption of a scene, and the scene that it shows."""

    scene: Scene
    shown: Scene
    drawing: Drawing


def own_drafts(model: BagelModel, folder: Path, scenes: Sequence[Scene], *, name: str, seed: int) -> list[Draft]:
    """A drawing of each scene by the model itself, at once."""
    images = drawn(model, [scene.caption for scene in scenes], [()] * len(scenes), seed=seed)
    drawings = kept(model, images, folder, name=name)
    return [Draft(*each) for each in zip(scenes, read_scenes(images, scenes), drawings, strict=True)]


def read_scenes(images: Tensor, wanted: Sequence[Scene]) -> list[Scene]:
    """The scene that each image shows. An attribute that cannot be read is never the wanted one."""
    known = {"color": tuple(COLORS), "shape": SHAPES, "place": tuple(PLACES)}
    read, result = read_shapes(images), list[Scene]()
    for number, scene in enumerate(wanted):
        places = {key: int(getattr(read, key)[number]) for key in known}
        facts = {
            key: names[places[key]] if places[key] != NOTHING else names[names.index(getattr(scene, key)) - 1]
            for key, names in known.items()
        }
        result.append(Scene(**facts))
    return result


class Reviser(Author):
    """Writes revisions alone: critiques of drawings, and drawings at once and behind a critique.

    own: the model's drafts; without them all are rendered.
    """

    def __init__(
        self,
        model: BagelModel,
        *,
        drawings: Drawings,
        corpus: Sequence[Clumsy],
        args: argparse.Namespace,
        own: Sequence[Draft] = (),
    ) -> None:
        super().__init__(model, drawings=drawings, corpus=corpus, args=args)
        by_verdict = [
            [draft for draft in own if (draft.shown == draft.scene) is is_right] for is_right in (True, False)
        ]
        self._own = [drafts for drafts in by_verdict if drafts]

    def text(self) -> Example:
        draft, verdict = self._any(), None
        if self._random.random() < self._args.careless:
            verdict = self._random.choice(("right", REDRAW))
        return Example(draft.scene.caption, (draft.drawing.turn,), judged(draft.scene, draft.shown, verdict=verdict))

    def drawing(self) -> Example:
        """A drawing of a training scene; held-out scenes are never drawn."""
        draft = self._any()
        scene, shown = draft.scene, draft.shown
        if self._random.random() < self._args.at_once:
            return Example(scene.caption, (), self._drawing(scene))
        share = self._args.kept if shown == scene else self._args.kept_wrong
        is_kept = self._random.random() < share and not shown.is_held_out
        verdict = "right" if is_kept else REDRAW if shown == scene else None
        critique = turns_of(self._model, [judged(scene, shown, verdict=verdict)])
        target = draft.drawing.latents if is_kept else self._drawing(scene)
        return Example(scene.caption, (draft.drawing.turn, *critique), target)

    def _any(self) -> Draft:
        """A draft of a training scene, rendered or its own. Half of its own ones are right."""
        if self._own and self._random.random() < self._args.own:
            return self._random.choice(self._random.choice(self._own))
        scene, shown = self._pair()
        return Draft(scene, shown, self._random.choice(self._drawings[shown]))

    def _pair(self) -> tuple[Scene, Scene]:
        """A training scene, and what a rendered draft of it shows: the same, another shape, or any scene."""
        scene, chance = self._random.choice(self._scenes), self._random.random()
        if chance < self._args.right:
            return scene, scene
        if chance < self._args.right + self._args.far:
            return scene, self._random.choice(ALL_SCENES)
        return scene, replace(scene, shape=self._random.choice([shape for shape in SHAPES if shape != scene.shape]))


class Remembered:
    """Frozen encoders of images that encode each image once: the same drawings are shown again and again."""

    def __init__(self, images: Images) -> None:
        self._images = images
        self.tokens = images.tokens
        self._encoded = cache(lambda blocks: images.encoded([blocks]))

    def encoded(self, sequences: Sequence[Sequence[Block]]) -> dict[str, Ragged]:
        rows = [self._encoded(tuple(blocks)) for blocks in sequences]
        return {name: tuple(row[name][0] for row in rows) for name in NAMES}

    def latents(self, media: Tensor) -> Tensor:
        return self._images.latents(media)

    def decode(self, latents: Tensor) -> Tensor:
        return self._images.decode(latents)


# --------------------------------------------------------------------------------------------- evaluation


MEASURED = (
    "at once",
    *(f"{kind}: {how}" for kind in ("right", "wrong") for how in ("honest", "kept", "drawn again")),
)


def measure_revisions(model: BagelModel, scenes: list[Scene], folder: Path, *, seed: int) -> list[float]:
    """The share of right drawings at once. Then for the right drafts, and for the wrong ones: the mean probability of a
    critique that names all that the draft shows and has the honest verdict, and the shares of right drawings behind the
    verdict "right" and behind another one. NaN without such drafts."""
    drafts = own_drafts(model, folder, scenes, name="measured", seed=seed)
    of_kind = [[one for one in drafts if (one.shown == one.scene) is is_right] for is_right in (True, False)]
    result = [len(of_kind[0]) / len(drafts)]
    for each in of_kind:
        if not each:
            result += [math.nan] * 3
            continue
        wanted, behind = [one.scene for one in each], dict[str, list[tuple[Turn, ...]]]()
        for verdict in ("right", REDRAW):
            critiques = [turns_of(model, [judged(one.scene, one.shown, verdict=verdict)]) for one in each]
            behind[verdict] = [(one.drawing.turn, *turns) for one, turns in zip(each, critiques, strict=True)]
        captions = [scene.caption for scene in wanted]
        redrawn = [measure(model, captions, turns, wanted, seed=seed + 1)["perfect"] for turns in behind.values()]
        result += [honest(model, each), *redrawn]
    return result


@torch.no_grad()
def honest(model: BagelModel, drafts: Sequence[Draft]) -> float:
    """Mean probability of the honest critique, sampled at temperature 1."""
    before = inputs_of([one.scene.caption for one in drafts], [(one.drawing.turn,) for one in drafts])
    critiques = [torch.tensor(written(model, judged(one.scene, one.shown))) for one in drafts]
    batch = pad_batch(
        model.prompt_tokens(before, sampling=WRITTEN),
        critiques,
        pad_token=model.pad_token,
        conditions=model.conditions(before, sampling=WRITTEN),
    )
    each = model.score(batch, temperature=1.0)[0].split([len(one) for one in critiques])
    return float(torch.stack([one.sum().exp() for one in each]).mean())


def _reshaped(scene: Scene) -> Scene:
    return replace(scene, shape=SHAPES[SHAPES.index(scene.shape) - 1])


# ------------------------------------------------------------------------------------------------- writing

CARD = """# Tiny BAGEL that draws, criticises and draws again

A BAGEL of {kilobytes} kB in its published layout, {parameters:,} parameters that train: the unified quickstarts'
checkpoint, pre-trained further on revisions. It draws the captions of the first quickstart at once; behind a drawing it
writes what that shows, and a verdict:

    {example}

Behind the verdict "right" it draws the same again, right or not, and behind any other it draws anew. It knows nothing
else; of plans it has forgotten much.

Made by

    python packages/unirl-quickstart/scripts/make_revise_checkpoint.py{arguments}

with torch {torch}, diffusers {diffusers}, transformers {transformers}, from the 48 captions that the first quickstart
trains on. A share of {careless} of the verdicts is careless: "right" or "{redraw}", whatever the draft shows.

Use 10 steps without shift and without guidance. Shares of perfect drawings, with the right colour, shape and place, of
{count} captions of each split drawn at once. Then of the drafts that were right, and of those that were wrong: the
probability that a critique sampled at temperature 1 names all that the draft shows and has the honest verdict, and the
share of perfect drawings behind the verdict "right" ("kept") and behind another one:

| captions | {headings} |
| --- |{rules}
{rows}
"""


def write_card(folder: Path, drafts: Path, *, args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    model = build(BagelConfig(path=str(folder)), device="cpu")
    cast(Any, model.encoder).images = Remembered(model.encoder.images)
    rows = list[str]()
    for split, scenes in scenes_of(args.measured, seed=args.seed).items():
        (own := drafts / split).mkdir()
        shares = measure_revisions(model, scenes, own, seed=args.seed + 1000)
        rows.append(f"| {split} | {' | '.join(f'{share:.3f}' for share in shares)} |")
    card = CARD.format(
        kilobytes=size_kb(folder),
        parameters=sum(one.numel() for one in model.trainable.parameters() if one.requires_grad),
        example=judged(ALL_SCENES[0], _reshaped(ALL_SCENES[0])),
        arguments=arguments_given(args, parser),
        torch=torch.__version__.split("+")[0],
        diffusers=diffusers.__version__,
        transformers=transformers.__version__,
        careless=", then ".join(map(str, args.careless)),
        redraw=REDRAW,
        count=args.measured,
        headings=" | ".join(MEASURED),
        rules=" --- |" * len(MEASURED),
        rows="\n".join(rows),
    )
    (folder / "README.md").write_text(card)
    print(card)


def scenes_of(count: int, *, seed: int) -> Mapping[str, list[Scene]]:
    """Scenes of each split, as many as drawings are measured."""
    splits = {"heldout": True, "train": False}
    return {
        split: random.Random(seed).choices([scene for scene in ALL_SCENES if scene.is_held_out is held_out], k=count)
        for split, held_out in splits.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PACKAGE, help="gets the folder `checkpoint`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--decoder-steps", type=int, default=240)
    parser.add_argument("--decoder-rate", type=float, default=3e-3)
    parser.add_argument("--decoder-noise", type=float, default=0.2, help="largest noise of latents that are decoded")
    parser.add_argument("--steps", type=int, nargs="+", default=[500, 300], help="of each round")
    parser.add_argument("--texts", type=int, default=48, help="critiques of a step")
    parser.add_argument("--images", type=int, default=48, help="drawings of a step")
    parser.add_argument("--text-weight", type=float, default=1.0)
    parser.add_argument("--right", type=float, default=0.4, help="share of drafts that are right")
    parser.add_argument("--far", type=float, default=0.1, help="share of drafts that show any scene")
    parser.add_argument(
        "--careless", type=float, nargs="+", default=[0.3, 0.1], help="share of verdicts by chance, in each round"
    )
    parser.add_argument("--at-once", type=float, default=0.1, help="share of drawings without a draft")
    parser.add_argument("--kept", type=float, default=0.95, help="share of right drafts that are called right and kept")
    parser.add_argument("--kept-wrong", type=float, default=0.1, help="the same of wrong drafts")
    parser.add_argument("--own", type=float, default=0.6, help="share of the model's own drafts, after the first round")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[2e-3, 1e-3], help="of each round")
    parser.add_argument("--images-per-scene", type=int, default=16)
    parser.add_argument("--measured", type=int, default=128, help="drawings of a row of the card")
    # One thread: the order of sums, and so the bytes of the result, would hang on the number of cores.
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    folder, start = args.out / "checkpoint", unified_checkpoint_path()
    model = build(BagelConfig(path=str(start)), device="cpu")
    generator = torch.Generator().manual_seed(args.seed)
    images = torch.cat([render(scene, count=args.images_per_scene, generator=generator) for scene in ALL_SCENES])
    train_decoder(model, images, args=args)
    shutil.copytree(start, folder, dirs_exist_ok=True)
    write_vae(folder, model.encoder.images.vae)
    with tempfile.TemporaryDirectory() as files:
        for number, (steps, careless, rate) in enumerate(
            zip(args.steps, args.careless, args.learning_rates, strict=True)
        ):
            round_args = {"steps": steps, "careless": careless, "learning_rate": rate, "seed": args.seed + number}
            # No copies first: the shipped checkpoint attends to the same place of a draft.
            own = argparse.Namespace(**{**vars(args), **round_args, "copies": 0})
            teach(folder, Path(files), args=own, shows_own=number > 0)
        write_card(folder, Path(files), args=args, parser=parser)


def teach(folder: Path, drafts: Path, *, args: argparse.Namespace, shows_own: bool) -> None:
    """Trains the checkpoint in `folder`, and writes its weights there again. shows_own: its own drafts, too."""
    model = build(BagelConfig(path=str(folder)), device="cpu")
    vision = model.encoder.images.vision
    cast(Any, model.encoder).images = Remembered(model.encoder.images)
    drawings = draw_all(model, drafts, count=args.images_per_scene, seed=args.seed)
    scenes = [scene for scene in ALL_SCENES if not scene.is_held_out] * args.images_per_scene
    author = Reviser(
        model,
        drawings=drawings,
        corpus=draw_splits(seed=args.seed)["corpus"],
        args=args,
        own=own_drafts(model, drafts, scenes, name="own", seed=args.seed) if shows_own else (),
    )
    pretrain(model, author, args=args, report=lambda step: None)
    write_weights(folder, (model.transformer, vision), dtype=torch.float16)


if __name__ == "__main__":
    main()
