"""Columns of a user's data under our field names, and images that columns hold."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

from ..disk import writing
from ..errors import DataError
from ..names import did_you_mean
from ..specs.spec import MediaRole
from ..types.data import MediaRef
from .rows import IMAGES, VIDEOS, installed, kind_of

__all__ = ["Columns", "is_json", "local_uri"]

REMOTE = ("http://", "https://", "s3://", "gs://")
ROLES: tuple[str, ...] = get_args(MediaRole)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The mapping `data.columns`, and the folder that embedded images are written to."""

    names: Mapping[str, str | None] = field(default_factory=lambda: dict[str, str | None]())
    """Field -> column of the user's data; None leaves the field out."""
    media: Path | None = None
    """Folder for images that tables hold as bytes; None refuses them."""
    own_names: bool = False
    """Data that has none of the mapped columns is read under our names: held-out data in our form beside training data
    in the user's."""
    takes: Collection[str] = ()
    """Roles of media that the run takes, for messages."""

    def __post_init__(self) -> None:
        first: dict[str, str] = {}
        for name, column in self.names.items():
            if column == "":
                raise DataError(f"data.columns.{name}: got '', expected a column, or null to leave the field out.")
            if column is None:
                continue
            if column in first:
                raise DataError(
                    f"data.columns.{name}: got column {column!r}, which data.columns.{first[column]} names already; "
                    "remove one of the two."
                )
            first[column] = name

    @property
    def unread(self) -> set[str]:
        """Columns of tables that are not read: their field is left out, or taken from another column."""
        if self.own_names:
            return {name for name, column in self.names.items() if column is None} - self._sources
        return self.names.keys() - self._sources

    @property
    def _sources(self) -> set[str]:
        return {column for column in self.names.values() if column}

    def mapped(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row under our names."""
        sources = self._sources
        if self.own_names and sources.isdisjoint(row):
            sources, names = set[str](), {name: None for name, column in self.names.items() if column is None}
        else:
            names = self.names
        result = {name: value for name, value in row.items() if name not in sources and name not in names}
        return result | {name: row[column] for name, column in names.items() if column and column in row}

    def check(self, path: Path, present: Collection[str]) -> None:
        """Refuse a mapped column that data does not have. present: its columns."""
        if self.own_names and self._sources.isdisjoint(present):
            return
        for name, column in self.names.items():
            if column and column not in present:
                raise DataError(
                    f"data.columns.{name}: got {column!r}, but {path} has no such column; it has "
                    f"{', '.join(map(repr, sorted(present))) or 'none'}{did_you_mean(column, [*present]) or '.'}"
                )

    def media_of(self, row: dict[str, Any], *, where: str, path: Path) -> tuple[MediaRef, ...]:
        """The media that columns of a row hold; takes them out of the row. path: the file or folder of the row.

        Images as bytes are written to files, named after the data, the row and the column.
        """
        refs: list[MediaRef] = []
        for role in ROLES:
            if role not in row:
                continue
            value: object = row[role]
            items = _items(value)
            if (items and all(map(_is_embedded, items))) or (self.names.get(role) and _is_file_name(value)):
                refs += [self._ref(item, role, number, where=where, path=path) for number, item in enumerate(items)]
                del row[role]
            elif self.names.get(role) and role in ("source", "first_frame", "condition"):
                raise DataError(
                    f"{where}: {self.names[role]!r} (data.columns.{role}) must be an image, or the path of an image or "
                    f"video ending in {', '.join((*IMAGES, *VIDEOS))}; got {_shown(value)}."
                )
        for name, value in row.items():
            items = () if isinstance(value, str) else _items(value)
            if items and all(map(_is_embedded, items)):
                raise DataError(f"{where}: column {name!r} holds images, which have no role. {self._advice(name)}")
        return tuple(refs)

    def _advice(self, name: str) -> str:
        taken = [role for role in ROLES if role in self.takes]
        advice = f"Leave them out: data.columns.{name}=null"
        return f"Name it, such as data.columns.{taken[0]}={name}. {advice}." if taken else f"{advice}."

    def _ref(self, item: object, role: str, number: int, *, where: str, path: Path) -> MediaRef:
        fields = cast(dict[str, object], item) if isinstance(item, dict) else {"bytes": item, "path": item}
        content, uri = fields["bytes"], fields["path"]
        if isinstance(content, bytes):
            file = self._written(content, f"{role}{number or ''}", where=where, path=path)
            return MediaRef(modality="image", role=role, uri=str(file))
        if not isinstance(uri, str) or not uri:
            raise DataError(f"{where}: {role!r} has neither the bytes nor the path of an image.")
        modality = "video" if uri.lower().endswith(VIDEOS) else "image"
        folder = path if path.is_dir() else path.parent
        return MediaRef(modality=modality, role=role, uri=local_uri(uri, folder, f"{where}: {role!r}"))

    def _written(self, content: bytes, name: str, *, where: str, path: Path) -> Path:
        """The file of an embedded image; its name has the row, for errors of readers that see the file alone."""
        images = installed("PIL.Image", place=where, dist="Pillow")
        try:
            with images.open(io.BytesIO(content)) as image:
                ending = str(image.format).lower()
        except (OSError, SyntaxError, ValueError, images.DecompressionBombError) as error:
            raise DataError(
                f"{where}: {name!r} holds {len(content)} bytes that are not an image in a format that Pillow reads."
            ) from error
        if self.media is None:
            raise DataError(f"{where}: {name!r} holds the bytes of an image, expected the path of a file.")
        row = where.removeprefix(str(path)).strip("[]:")
        digest = hashlib.sha256(content).hexdigest()[:16]
        file = self.media / path.name / f"row-{row}-{name}-{digest}.{ending}"
        if not file.is_file():
            # Another process may be writing the same image.
            part = file.with_suffix(f".{os.getpid()}.part")
            try:
                with writing(file):
                    file.parent.mkdir(parents=True, exist_ok=True)
                    part.write_bytes(content)
                    part.replace(file)
            except OSError as error:
                raise DataError(f"data.cache: {file} cannot be written: {error.strerror or error}.") from error
        return file.absolute()


def local_uri(uri: str, folder: Path, place: str) -> str:
    """The absolute path of a file, or a URL unchanged."""
    if uri.startswith(REMOTE):
        return uri
    if "://" in uri:
        raise DataError(f"{place}: got {uri!r}, expected a path or a URI with {', '.join(REMOTE)}.")
    file = (folder / uri).absolute()
    if not file.is_file():
        raise DataError(f"{place}: got {uri!r}, but the file {file} does not exist.")
    return str(file)


def is_json(value: object) -> bool:
    """Whether JSON has a form for a value; it has none for dates, bytes and NaN, which tables may hold."""
    if isinstance(value, dict):
        table = cast(dict[object, object], value)
        return all(isinstance(name, str) and is_json(each) for name, each in table.items())
    if isinstance(value, list):
        return all(map(is_json, cast(list[object], value)))
    if isinstance(value, float):
        return abs(value) < float("inf")
    return value is None or isinstance(value, (str, bool, int))


def _items(value: object) -> list[object]:
    return cast(list[object], value) if isinstance(value, list) else [value]


def _is_embedded(value: object) -> bool:
    """An image as `datasets` and parquet keep it: the bytes of a file, or {bytes, path}."""
    return isinstance(value, bytes) or (
        isinstance(value, dict) and {*cast(dict[str, object], value)} == {"bytes", "path"}
    )


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and value.lower().endswith((*IMAGES, *VIDEOS))


def _shown(value: object) -> str:
    return f"{value!r:.80}" if isinstance(value, (str, int, float)) else kind_of(value)
