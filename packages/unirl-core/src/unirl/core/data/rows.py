"""Rows of data in the forms that people have: text files, tables, saved datasets, folders of images with captions."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, cast

from ..errors import DataError

__all__ = ["IMAGES", "VIDEOS", "Reading", "data_files", "installed", "kind_of", "read_rows"]

Rows: TypeAlias = "Iterator[tuple[str, object]]"
"""Place of a row (`file:line`, or `file[index]` where there are no lines), and the row, or its DataError."""

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
VIDEOS = (".mp4", ".mov", ".mkv", ".webm", ".avi")
CAPTION = ".txt"
BATCH_ROWS = 1024
MEDIA_ROWS = 16
"""Rows of a batch with a column of bytes, each of which may be an image of several MB."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Settings of a reader."""

    prompt_key: str = "prompt"
    """Key of the list of rows in a `.json` object."""
    unread: Collection[str] = ()
    """Columns of tables that are not read."""
    check: Callable[[Path, Collection[str]], None] = lambda path, columns: None
    """Called with the columns of a table before its rows; raises for missing ones."""

    def columns(self, path: Path, names: Collection[str]) -> list[str]:
        """The columns of a table that are read. Raises DataError."""
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise DataError(f"{path}: got several columns {twice[0]!r}, expected one; rename the others.")
        if names:
            self.check(path, names)
        return [name for name in names if name not in self.unread]


def read_rows(path: Path, reading: Reading) -> Rows:
    """The rows of a file or folder in order, streamed except for `.json`.

    A row of a table is an object without its empty cells. Raises DataError for a file or folder that cannot be read.
    """
    if path.is_dir():
        return _folder(path, reading)
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        ending = f"suffix {path.suffix!r}" if path.suffix else "no suffix"
        hint = ""
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) and not path.exists():
            hint = f" A dataset of the Hub is hf://datasets/{path}@COMMIT/SPLIT."
        raise DataError(
            f"{path}: got {ending}, expected a prompt file ending in {', '.join(READERS)}, a folder that `datasets` "
            f"has saved, or a folder of images with captions.{hint}"
        )
    if not path.exists():
        raise DataError(f"{path}: no such prompt file.")
    return reader(path, reading)


def data_files(path: Path) -> list[Path]:
    """The files whose content is the data of a path, in a fixed order."""
    if not path.is_dir():
        return [path]
    shards = sorted(path.glob("*.arrow")) if (path / "state.json").is_file() else []
    return shards or [file for file in _visible(path) if file.suffix.lower() in (*IMAGES, CAPTION)]


def installed(module: str, *, place: object, dist: str) -> Any:
    """A library of the extra `data`. Raises DataError with the command that installs it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise DataError(f"{place}: reading it needs {dist}. Install it: `pip install 'unirl-core[data]'`.") from error


def kind_of(value: object) -> str:
    """Kind of a value, in words: `text`, `a number`, `a boolean`, `a list`, `an object`, `null`, `bytes`."""
    names = {
        **{"dict": "an object", "list": "a list", "str": "text", "bool": "a boolean", "NoneType": "null"},
        **{"int": "a number", "float": "a number", "bytes": "bytes"},
    }
    return names.get(type(value).__name__, f"a {type(value).__name__}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of each line that is not empty. Only LF and CRLF end one: a prompt may contain U+2028."""
    start = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    # A byte order mark is not part of the first prompt.
                    text = line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\n").removesuffix("\r")
                except UnicodeDecodeError as error:
                    raise _not_utf8(f"{path}:{number}", start + error.start) from error
                start += len(line)
                if text.strip():
                    yield number, text
    except OSError as error:
        raise _unreadable(path, error) from error


def _text(path: Path, reading: Reading) -> Rows:
    reading.columns(path, ["prompt"])
    for number, line in _lines(path):
        yield f"{path}:{number}", line.strip()


def _jsonl(path: Path, _: Reading) -> Rows:
    for number, line in _lines(path):
        where = f"{path}:{number}"
        try:
            yield where, _parsed(line, where, path, first_line=number)
        except DataError as error:
            yield where, error


def _csv(path: Path, reading: Reading) -> Rows:
    line = 1
    # Prompts and test cases may be longer than its 128 KiB.
    csv.field_size_limit(2**31 - 1)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            table = csv.reader(file, strict=True)
            names = next(table, list[str]())
            columns = {*reading.columns(path, names)}
            line = table.line_num + 1
            for cells in table:
                # A quoted cell may contain line breaks; the row is named by its first line.
                where, line = f"{path}:{line}", table.line_num + 1
                if len(cells) == len(names):
                    row = zip(names, cells, strict=True)
                    yield where, {name: cell for name, cell in row if cell and name in columns}
                elif cells:
                    got = DataError(f"{where}: got {len(cells)} cells, expected {len(names)}, as the header has.")
                    yield where, got
    except csv.Error as error:
        raise DataError(f"{path}:{line}: not CSV: {error}. Quote cells that contain commas or line breaks.") from error
    except UnicodeDecodeError as error:
        for _line in _lines(path):
            # Raises with the line, which the decoder of a whole block does not know.
            pass
        raise _not_utf8(str(path), error.start) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _parquet(path: Path, reading: Reading) -> Rows:
    pyarrow = installed("pyarrow", place=path, dist="pyarrow")
    parquet = installed("pyarrow.parquet", place=path, dist="pyarrow")
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            columns = reading.columns(path, schema.names)
            batches = file.iter_batches(batch_size=_batch_rows(schema, columns), columns=columns)
            yield from _arrow_rows(path, batches)
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a parquet file that can be read: {error}.") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _saved(path: Path, reading: Reading) -> Rows:
    datasets = installed("datasets", place=path, dist="datasets")
    try:
        saved = datasets.load_from_disk(str(path))
    except Exception as error:
        raise DataError(f"{path}: `datasets` cannot load this folder: {error}") from error
    if isinstance(saved, dict):
        splits = " or ".join(str(path / name) for name in cast(dict[str, Any], saved))
        raise DataError(f"{path}: got a folder with several splits, expected one of them: {splits}.")
    columns = reading.columns(path, saved.column_names)
    schema = saved.features.arrow_schema
    # As arrow, images stay the bytes of their files.
    batches = saved.select_columns(columns).with_format("arrow").iter(batch_size=_batch_rows(schema, columns))
    yield from _arrow_rows(path, batches)


def _images(path: Path, reading: Reading) -> Rows:
    """Images with the text file of the same name as caption, the layout of kohya's scripts and ai-toolkit."""
    columns = reading.columns(path, ["prompt", "image"])
    files = _visible(path)
    images = [file for file in files if file.suffix.lower() in IMAGES]
    captions = {file.with_suffix(""): file for file in files if file.suffix.lower() == CAPTION}
    for image in images:
        caption = captions.get(image.with_suffix(""))
        if caption is None:
            yield str(image), DataError(f"no caption beside the image; write it to {image.stem}{CAPTION}.")
            continue
        try:
            row: dict[str, object] = {"prompt": caption.read_text(encoding="utf-8-sig").strip()}
        except UnicodeDecodeError as error:
            yield str(caption), _not_utf8(str(caption), error.start)
            continue
        if "image" in columns:
            row["image"] = {"bytes": None, "path": str(image.relative_to(path))}
        yield str(caption), row
    named = {image.with_suffix("") for image in images}
    for stem, file in captions.items():
        if stem not in named:
            yield str(file), DataError(f"no image {stem.name} of {', '.join(IMAGES)} beside the caption.")


def _folder(path: Path, reading: Reading) -> Rows:
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return _saved(path, reading)
    for table in (path / "metadata.jsonl", path / "metadata.csv", path / "metadata.parquet"):
        if table.is_file():
            raise DataError(
                f"{path}: got a folder whose captions are in {table.name}, expected that file: {table}. Its column of "
                "paths is media under a role, such as data.columns.source=file_name."
            )
    files = _visible(path)
    if any(file.suffix.lower() in IMAGES for file in files):
        return _images(path, reading)
    names = sorted(str(file.relative_to(path)) for file in files)
    raise DataError(
        f"{path}: got a folder of {', '.join(names[:3]) or 'nothing'}{', ...' if names[3:] else ''}, expected one that "
        "`datasets` has saved, or images with captions (a.png and a.txt). Name a file instead, such as a .parquet."
    )


def _visible(folder: Path) -> list[Path]:
    """Files of a folder and its subfolders, without hidden ones."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]


def _batch_rows(schema: Any, columns: Collection[str]) -> int:
    has_bytes = any("binary" in str(schema.field(name).type) for name in columns)
    return MEDIA_ROWS if has_bytes else BATCH_ROWS


def _arrow_rows(path: Path, batches: Any) -> Rows:
    index = 0
    for batch in batches:
        for row in cast(list[dict[str, object]], batch.to_pylist()):
            yield f"{path}[{index}]", {name: value for name, value in row.items() if value is not None}
            index += 1


def _json(path: Path, reading: Reading) -> Rows:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise _not_utf8(f"{path}:{line}", error.start) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    if not text.strip():
        return
    data = _parsed(text, str(path), path, first_line=1)
    key = ""
    if isinstance(data, dict):
        table = cast(dict[str, object], data)
        result = [name for name in dict.fromkeys(("prompts", "caption", reading.prompt_key)) if name in table]
        if not result:
            raise DataError(
                f"{path}: got an object, expected a list of rows, or an object that has one under 'prompts', 'caption' "
                f"or {reading.prompt_key!r} (data.prompt_key); it has {sorted(table) or 'nothing'}."
            )
        key = result[0]
        data = [table[key]] if isinstance(table[key], str) else table[key]
    if not isinstance(data, list):
        raise DataError(f"{path}: got {kind_of(data)}{f' under {key!r}' if key else ''}, expected a list of prompts.")
    lines = _line_numbers(text, key)
    rows = cast(list[object], data)
    for index, row in enumerate(rows):
        line = lines[index] if len(lines) == len(rows) else None
        yield f"{path}:{line}" if line else f"{path}[{index}]", row


def _line_numbers(text: str, key: str) -> list[int]:
    """Line on which each item of the list begins; the list is the whole file, or the value of `key`."""
    decoder, between = json.JSONDecoder(), re.compile(r"[ \t\r\n,]*")
    at = 0
    if key:
        quoted = json.dumps(key)
        at = text.find(quoted) + len(quoted)
    at = text.find("[", at) + 1
    numbers: list[int] = []
    line, counted = 1, 0
    while at:
        space = between.match(text, at)
        at = space.end() if space else at
        try:
            _, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            break
        line, counted = line + text.count("\n", counted, at), at
        numbers.append(line)
        at = end
    return numbers


def _parsed(text: str, where: str, path: Path, *, first_line: int) -> object:
    try:
        return _DECODER.decode(text)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{first_line + error.lineno - 1}: not JSON: {error.msg} at column {error.colno}."
        ) from error
    except RecursionError as error:
        raise DataError(f"{where}: nested too deeply to be read.") from error


def _no_number(word: str) -> object:
    raise DataError(f"{word} is not JSON; write a number, or null.")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise DataError(f"duplicate key {twice!r} in one object; keep one.")
    return table


_DECODER = json.JSONDecoder(parse_constant=_no_number, object_pairs_hook=_unique)


def _not_utf8(where: str, byte: int) -> DataError:
    return DataError(f"{where}: not UTF-8 text (byte {byte}); save the file as UTF-8.")


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path}: the prompt file cannot be read: {error.strerror or error}.")


READERS: Mapping[str, Callable[[Path, Reading], Rows]] = MappingProxyType(
    {".txt": _text, ".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
)
