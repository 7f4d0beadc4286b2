"""Reading the files in which sets are published: JSONL and parquet."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, cast

from unirl.core.errors import DataError

from .example import PromptSet, SourceRow

__all__ = ["FORMATS", "read_source"]

FORMATS = (".parquet", ".jsonl")
BATCH_ROWS = 64
"""In a set with images, a batch is 64 files of up to a few MB."""


def read_source(path: Path, *, prompts: PromptSet) -> Iterator[SourceRow]:
    """The rows of a file, in order, streamed.

    Raises DataError for a file that is missing or of another format, lines that are not JSON objects, and
    missing required columns.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file.")
    if path.suffix not in FORMATS:
        raise DataError(f"{path}: got suffix {path.suffix!r}, expected {' or '.join(FORMATS)}.")
    rows = _parquet(path, prompts) if path.suffix == ".parquet" else _jsonl(path, prompts)
    for number, values in enumerate(rows):
        yield SourceRow(name=f"{path.name}:{number}", folder=path.parent, values=values)


def _jsonl(path: Path, prompts: PromptSet) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        try:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    row: object = json.loads(line)
                except (json.JSONDecodeError, RecursionError) as error:
                    raise DataError(f"{where}: not a line of JSON: {error}.") from error
                if not isinstance(row, dict):
                    raise DataError(f"{where}: got {type(row).__name__}, expected an object.")
                table = cast(dict[str, Any], row)
                _check_columns(where, table.keys(), prompts)
                yield table
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start} of a block.") from error


def _parquet(path: Path, prompts: PromptSet) -> Iterator[dict[str, Any]]:
    # `unirl --help` imports this module.
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            _check_columns(str(path), file.schema_arrow.names, prompts)
            expected = {*(name for names in prompts.columns for name in names), *prompts.also}
            columns = [name for name in file.schema_arrow.names if name in expected]
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a parquet file that can be read: {error}.") from error


def _check_columns(where: str, found: Collection[str], prompts: PromptSet) -> None:
    missing = [names for names in prompts.columns if not set(names) & set(found)]
    if missing:
        expected = ", ".join(" or ".join(map(repr, names)) for names in missing)
        raise DataError(
            f"{where}: {prompts.name} needs the column {expected}, which is missing; got {', '.join(found) or 'none'}."
        )
