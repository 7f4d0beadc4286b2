"""The contact sheet: the same held-out prompts and noise, before and after training, as one picture."""

from __future__ import annotations

import io
from bisect import bisect_right
from functools import cache
from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

from .compare import Pair, Pairs
from .media import open_picture
from .theme import LIGHT

__all__ = ["contact_sheet"]

TILE = 224
"""Edge of the box that an image is shown in, in pixels."""
GAP = 8
MARGIN = 40
BETWEEN = 32
CAPTION_LINES = 2
LINE = 24
HEAD = 104
COLUMNS = 4
MOST_INPUTS = 2
"""Images of a prompt that are shown."""
BETTER, WORSE = LIGHT.series[2], LIGHT.series[4]


def contact_sheet(pairs: Pairs, *, title: str) -> bytes:
    """A PNG of all pairs: prompt above, the images it refers to, before, after, rewards below."""
    num_inputs = min(MOST_INPUTS, max((len(pair.after.inputs) for pair in pairs.shown), default=0))
    columns = max(1, min(COLUMNS, len(pairs.shown)))
    rows = -(-len(pairs.shown) // columns)
    cell_width, cell_height = (2 + num_inputs) * (TILE + GAP) - GAP, CAPTION_LINES * LINE + 6 + TILE + LINE + 10
    width = 2 * MARGIN + columns * cell_width + (columns - 1) * BETWEEN
    height = HEAD + rows * (cell_height + BETWEEN) + MARGIN - BETWEEN
    sheet = Image.new("RGB", (max(width, 900), height), LIGHT.ground)
    draw = ImageDraw.Draw(sheet)
    after = f"step {pairs.after_step}" if pairs.after_step != pairs.before_step else "no later evaluation yet"
    draw.text(
        (MARGIN, 22),
        _cut(draw, " ".join(title.split()), _font(30, bold=True), width=sheet.width - 2 * MARGIN),
        LIGHT.ink,
        _font(30, bold=True),
    )
    of_prompt = "First: the images of the prompt. Then: " if num_inputs else "Left: "
    note = (
        f"Held-out prompts, same noise. {of_prompt}before (step {pairs.before_step}). Right: after ({after}). "
        f"{len(pairs.shown)} of {pairs.num_held_out} samples, in the order of the file."
    )
    draw.text((MARGIN, 62), note, LIGHT.faint, _font(19))
    for index, pair in enumerate(pairs.shown):
        left = MARGIN + (index % columns) * (cell_width + BETWEEN)
        top = HEAD + (index // columns) * (cell_height + BETWEEN)
        _draw_pair(sheet, draw, pair, left=left, top=top, width=cell_width, num_inputs=num_inputs)
    content = io.BytesIO()
    sheet.save(content, format="PNG")
    return content.getvalue()


def _draw_pair(
    sheet: Image.Image, draw: ImageDraw.ImageDraw, pair: Pair, *, left: int, top: int, width: int, num_inputs: int
) -> None:
    lines = _wrap(draw, pair.prompt, _font(18), width=width)
    # One line is directly above the images.
    for number, line in enumerate(lines, start=CAPTION_LINES - len(lines)):
        draw.text((left, top + number * LINE), line, LIGHT.ink, _font(18))
    top += CAPTION_LINES * LINE + 6
    before, after = pair.before.reward, pair.after.reward
    change = 0.0 if before is None or after is None else after - before
    colors = (LIGHT.faint, BETTER if change > 0 else WORSE if change < 0 else LIGHT.faint)
    for place, file in enumerate(pair.after.inputs[:num_inputs]):
        _paste(sheet, draw, file, x=left + place * (TILE + GAP), y=top)
    for side, (sample, color) in enumerate(zip((pair.before, pair.after), colors, strict=True)):
        x = left + (num_inputs + side) * (TILE + GAP)
        _paste(sheet, draw, sample.file, x=x, y=top)
        reward = "" if sample.reward is None else f"{('before', 'after')[side]}  {sample.reward:.2f}"
        draw.text((x, top + TILE + 6), reward, color, _font(18, bold=side == 1))


def _paste(sheet: Image.Image, draw: ImageDraw.ImageDraw, file: Path, *, x: int, y: int) -> None:
    """Into the middle of the box that begins at x, y."""
    image = _fitted(file)
    draw.rectangle((x - 1, y - 1, x + TILE, y + TILE), outline=LIGHT.grid, fill=LIGHT.grid)
    sheet.paste(image, (x + (TILE - image.width) // 2, y + (TILE - image.height) // 2))


def _fitted(file: Path) -> Image.Image:
    image = open_picture(file).convert("RGB")
    scale = TILE / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    # Small images keep their pixels: smoothing would show something that the model did not make.
    return image.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)


def _wrap(draw: ImageDraw.ImageDraw, text: str, font: ImageFont.FreeTypeFont, *, width: int) -> list[str]:
    """At most CAPTION_LINES lines of at most `width` pixels; what is too long ends in an ellipsis."""
    words, lines = text.split(), [""]
    for number, word in enumerate(words):
        longer = f"{lines[-1]} {word}".strip()
        if draw.textlength(longer, font) <= width or not lines[-1]:
            lines[-1] = longer
        elif len(lines) < CAPTION_LINES:
            lines.append(word)
        else:
            lines[-1] = " ".join([lines[-1], *words[number:]])
            break
    return [_cut(draw, line, font, width=width) for line in lines]


def _cut(draw: ImageDraw.ImageDraw, text: str, font: ImageFont.FreeTypeFont, *, width: int) -> str:
    if draw.textlength(text, font) <= width:
        return text
    # Bisected: prompts may have thousands of characters, and measuring one takes time in their number.
    too_long = bisect_right(range(len(text)), width, key=lambda end: draw.textlength(text[:end] + "…", font))
    return text[: max(0, too_long - 1)].rstrip() + "…"


@cache
def _font(size: int, *, bold: bool = False) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which matplotlib ships: no font of the machine is needed."""
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name, size)
