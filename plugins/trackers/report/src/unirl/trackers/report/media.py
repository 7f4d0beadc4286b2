"""Samples of a run: images, videos and completions as files under `<run folder>/media`, with an index."""

from __future__ import annotations

import hashlib
import re
import stat
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from PIL import Image
from unirl.core.disk import is_inside
from unirl.core.errors import UniRLError
from unirl.core.observe.events import EventStream, read_events
from unirl.core.observe.recorded import Recorded
from unirl.core.types.array import Array
from unirl.core.types.data import MediaRef
from unirl.core.types.track import Status, Track

__all__ = ["MediaFolder", "MediaKind", "RunFolderError", "Sample", "SampleBatch", "open_picture", "read_media"]

MediaKind = Literal["images", "texts"]
MEDIA = "media"
INDEX = "index.jsonl"
ANIMATED = ".webp"
ANIMATION = 320
"""Longest edge of an animation, in pixels."""
INPUTS = "inputs"
"""Folder of the images that prompts refer to."""
INPUT = 512
"""Longest edge of one of them as saved, in pixels."""
STRIP = 6
"""Most frames of a strip."""


class RunFolderError(UniRLError):
    """A folder holds no run, or one that cannot be read."""

    exit_code = 2


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One saved image, video or text."""

    file: Path
    """A PNG, of a video a strip of its frames; or the text in UTF-8."""
    prompt: str
    reward: float | None
    """None where it has none."""
    name: str = ""
    """Its id, which `unirl show` takes; "" in runs before this report."""
    is_truncated: bool = False
    """It was cut off by the length limit."""
    parent: Path | None = None
    """File of the sample that it was made from; None for one made from a prompt."""
    inputs: tuple[Path, ...] = ()
    """Images that its prompt refers to, scaled down."""
    media: tuple[MediaRef, ...] = ()
    """All media that its prompt refers to, as the prompt file has them; none in runs before this report."""

    @property
    def question(self) -> tuple[str, tuple[Path, ...]]:
        """Prompt and images: one instruction may be given with many images."""
        return self.prompt, self.inputs

    @property
    def animation(self) -> Path | None:
        """The animation of a video, whose `file` is a strip of its frames."""
        file = self.file.with_suffix(ANIMATED)
        return file if file.is_file() else None

    @property
    def text(self) -> str:
        """Completion of a text sample. Raises RunFolderError for a file that is not UTF-8 text."""
        try:
            # As bytes: ends of lines stay what they are.
            return self.file.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RunFolderError(f"{self.file}: it cannot be read as a text: {error}") from error


@dataclass(frozen=True, kw_only=True)
class SampleBatch:
    """The images or texts that arrived at once under one key."""

    kind: MediaKind
    key: str
    step: int
    samples: tuple[Sample, ...]
    num_left_out: int
    """Samples of the batch that were not saved."""


class MediaFolder:
    """Writes samples as they arrive. A resumed run continues in the same folder and index."""

    def __init__(self, folder: Path, *, max_images: int, max_texts: int, resumed_at: int | None) -> None:
        self._folder = folder / MEDIA
        self._max_images = max_images
        self._max_texts = max_texts
        self._saved: dict[str, dict[str, str]] = {}
        """Track -> sample id -> file of its last samples."""
        self._inputs: dict[MediaRef, str] = {}
        """Image of a prompt -> its file here."""
        if resumed_at is not None:
            self._note("run_resumed", step=resumed_at)

    def save(self, key: str, track: Track, *, step: int) -> None:
        """Save the first samples as `media/step-000010/<key>-00.png`, or `.txt`, then their line of the index.

        Of a video, the PNG is a strip of frames; the animation lies beside it as `.webp`. Sounds are not saved. Of a
        child track, samples whose parents were saved just before. Images that prompts refer to are saved once, under
        `media/inputs`.
        """
        media = track.media
        if media is None or media.kind == "audio":
            return
        parents = self._saved.get(track.parent_track or "", {})
        of = [None] * track.num_rows if not parents else [parents.get(name) for name in track.parent_ids or ()]
        limit = self._max_texts if media.kind == "text" else self._max_images
        rows = [row for row, parent in enumerate(of) if parent is not None or not parents][:limit]
        if media.kind == "text":
            files = [self._text(key, number, media.texts[row], step) for number, row in enumerate(rows)]
        else:
            save = self._image if media.rate is None else partial(self._video, rate=media.rate)
            files = [save(key, number, media.array(row), step) for number, row in enumerate(rows)]
        names = [f"{file.parent.name}/{file.name}" for file in files]
        self._saved[track.name] = {track.sample_ids[row]: name for row, name in zip(rows, names, strict=True)}
        samples = [
            {
                "file": name,
                "sample": track.sample_ids[row],
                "prompt": track.inputs.prompts[row],
                "reward": None if track.rewards is None else float(track.rewards[row]),
                "is_truncated": track.status[row] is Status.TRUNCATED,
                "parent": of[row],
                # A child shows its parent instead.
                "inputs": [] if track.parent_track else self._asked(track.inputs.media[row]),
                "media": [] if track.parent_track else [asdict(ref) for ref in track.inputs.media[row]],
            }
            for row, name in zip(rows, names, strict=True)
        ]
        kind = "texts" if media.kind == "text" else "images"
        self._note(kind, step=step, key=key, samples=samples, num_left_out=track.num_rows - len(rows))

    def _asked(self, media: Sequence[MediaRef]) -> list[str]:
        """Files of the images among them, scaled down."""
        # Reading takes torch, which `unirl report` goes without.
        from unirl.numerics.media import load_image

        images = [ref for ref in media if ref.modality == "image"]
        for ref in images:
            if ref not in self._inputs:
                file = self._folder / INPUTS / f"{hashlib.sha256(ref.uri.encode()).hexdigest()[:16]}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                picture = _picture(load_image(ref))
                picture.thumbnail((INPUT, INPUT))
                picture.save(file)
                self._inputs[ref] = f"{INPUTS}/{file.name}"
        return [self._inputs[ref] for ref in images]

    def _text(self, key: str, number: int, text: str, step: int) -> Path:
        file = self._file(key, number, ".txt", step=step)
        # As bytes: ends of lines stay what they are.
        file.write_bytes(text.encode("utf-8"))
        return file

    def _image(self, key: str, number: int, image: Array, step: int) -> Path:
        file = self._file(key, number, ".png", step=step)
        _picture(image).save(file)
        return file

    def _video(self, key: str, number: int, video: Array, step: int, *, rate: float) -> Path:
        frames = [_picture(frame) for frame in video]
        spread = dict.fromkeys(round(at * (len(frames) - 1) / (STRIP - 1)) for at in range(STRIP))
        width, height = frames[0].size
        strip = Image.new("RGB", (width * len(spread), height))
        for place, at in enumerate(spread):
            strip.paste(frames[at], (place * width, 0))
        file = self._file(key, number, ".png", step=step)
        strip.save(file)
        for frame in frames:
            frame.thumbnail((ANIMATION, ANIMATION))
        frames[0].save(
            file.with_suffix(ANIMATED), save_all=True, append_images=frames[1:], duration=round(1000 / rate), loop=0
        )
        return file

    def _file(self, key: str, number: int, suffix: str, *, step: int) -> Path:
        """Where to save a sample, in a folder that is there."""
        folder = self._folder / f"step-{step:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        stem = re.sub(r"[^\w.-]", "-", key)
        return folder / f"{stem}-{number:02d}{suffix}"

    def _note(self, kind: str, *, step: int, **data: Any) -> None:
        """One line of the index, safe on disk when this returns."""
        index = EventStream(self._folder / INDEX)
        try:
            index.emit(kind, step=step, **data)
        finally:
            index.close()


def read_media(folder: Path) -> list[SampleBatch]:
    """The batches of samples of a run, by step; those that a resumed run made again count once. Empty without any.

    Raises ValueError, with file and line, for a damaged index and for files that are missing, named twice, or not in
    the folder of samples: the page would show whatever they lead to.
    """
    index = folder / MEDIA / INDEX
    if not index.exists():
        return []
    batches: dict[tuple[int, str, MediaKind], SampleBatch] = {}
    saved = _SavedFiles(index.parent)
    for event in read_events(index):
        if event.kind == "run_resumed":
            batches = {at: batch for at, batch in batches.items() if batch.step <= event.step}
        elif event.kind in ("images", "texts"):
            read = Recorded(where=event.read_from, values=event.data)
            kind: MediaKind = "images" if event.kind == "images" else "texts"
            batches[event.step, read.text("key"), kind] = SampleBatch(
                kind=kind,
                key=read.text("key"),
                step=event.step,
                samples=tuple(_sample(saved, item) for item in read.sections("samples")),
                num_left_out=read.count("num_left_out"),
            )
    files = Counter(sample.file for batch in batches.values() for sample in batch.samples)
    if files and files.most_common(1)[0][1] > 1:
        raise ValueError(f"{index}: it names {files.most_common(1)[0][0].relative_to(index.parent)} twice.")
    return sorted(batches.values(), key=lambda batch: (batch.step, batch.key, batch.kind))


def _picture(image: Array) -> Image.Image:
    """image: [3, H, W] in [0, 1]."""
    pixels = (image.detach().float().clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu()
    return Image.fromarray(pixels.numpy())


def open_picture(file: Path) -> Image.Image:
    """The decoded image in a file. Raises RunFolderError for a file that has none, or one of too many pixels."""
    try:
        with Image.open(file) as opened:
            opened.load()
            return opened
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise RunFolderError(f"{file}: it cannot be read as an image: {error}") from error


class _SavedFiles:
    """Files that an index names, in the folder of samples."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_inside: dict[Path, bool] = {}

    def find(self, name: str, item: Recorded) -> Path:
        """The file of this name. Raises ValueError when it or its animation leads elsewhere, and when it is missing."""
        file = self.folder / name
        if not all(self._leads_inside(one) for one in (file, file.with_name(f"{file.stem}{ANIMATED}"))):
            raise ValueError(f"{item.where}: {item.path}file: got {name!r}, expected a file in {self.folder}.")
        if not file.is_file():
            raise ValueError(f"{item.where}: it names {name}, which is missing.")
        return file

    def _leads_inside(self, file: Path) -> bool:
        """`is_inside` of the folder. Resolving costs a system call for each part of a path, and an index may name
        thousands of files: one that is not a link lies where its own folder does, which is resolved once."""
        try:
            is_resolved = file.name != ".." and not stat.S_ISLNK(file.lstat().st_mode)
        except FileNotFoundError:
            is_resolved = True
        except (OSError, ValueError):
            is_resolved = False
        if not is_resolved or file == self.folder:
            return is_inside(file, self.folder)
        if file.parent not in self._is_inside:
            self._is_inside[file.parent] = is_inside(file.parent, self.folder)
        return self._is_inside[file.parent]


def _sample(saved: _SavedFiles, item: Recorded) -> Sample:
    parent = item.optional_text("parent")
    return Sample(
        file=saved.find(item.text("file"), item),
        prompt=item.text("prompt"),
        reward=item.optional_number("reward"),
        name=item.text("sample", default=""),
        is_truncated=item.flag("is_truncated"),
        parent=None if parent is None else saved.folder / parent,
        # Runs before this report have none.
        inputs=tuple(saved.find(name, item) for name in item.texts("inputs")),
        media=tuple(
            MediaRef(modality=ref.text("modality"), role=ref.text("role"), uri=ref.text("uri"))
            for ref in item.sections("media")
        ),
    )
