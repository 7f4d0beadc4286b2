"""Datasets of the Hugging Face Hub, streamed once to a file that runs are started and resumed from."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from ..disk import writing
from ..errors import DataError, UniRLError
from .rows import installed

__all__ = ["HUB", "hub_rows"]

HUB = "hf://"
FORM = "hf://datasets/OWNER/NAME@COMMIT/SPLIT, or .../CONFIG/SPLIT"
TIMEOUT_S = 10
BATCH_ROWS = 256
_URI = re.compile(
    r"hf://datasets/(?P<name>[\w.-]+/[\w.-]+)@(?P<commit>[0-9a-f]{40})/((?P<config>[\w.-]+)/)?(?P<split>[\w.-]+)"
)


def hub_rows(uri: str, *, cache: Path) -> Path:
    """The parquet file in the cache with the rows of a split of a dataset, which the first call streams there.

    The commit pins the rows, so a file that exists is complete and needs no network.
    Raises DataError for another form, and when the dataset cannot be fetched.
    """
    match = _URI.fullmatch(uri)
    if match is None:
        raise DataError(f"got {uri!r}, expected {FORM}, with a commit of 40 hex digits: branches and tags move.")
    name, commit, config, split = match["name"], match["commit"], match["config"], match["split"]
    owner, _, short = name.partition("/")
    file = cache / "hub" / owner / short / commit / (config or "default") / f"{short}-{split}.parquet"
    if file.is_file():
        return file
    datasets = installed("datasets", place=uri, dist="datasets")
    hub = installed("huggingface_hub", place=uri, dist="datasets")
    try:
        # Asked first, and once: `datasets` tries for minutes.
        hub.HfApi().dataset_info(name, revision=commit, timeout=TIMEOUT_S)
    except Exception as error:
        raise _not_fetched(uri, file, name, commit, error) from error
    print(f"{uri}: streaming to {file}, once", file=sys.stderr, flush=True)
    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        with writing(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            _stream(datasets.load_dataset(name, config, split=split, revision=commit, streaming=True), part)
            part.replace(file)
    except UniRLError:
        raise
    except Exception as error:
        raise _not_fetched(uri, file, name, commit, error) from error
    finally:
        part.unlink(missing_ok=True)
    return file


def _stream(rows: Any, part: Path) -> None:
    """Write rows to a parquet file, batch by batch; images stay the bytes of their files."""
    parquet = installed("pyarrow.parquet", place=part, dist="pyarrow")
    writer: Any = None
    try:
        for table in rows.with_format("arrow").iter(batch_size=BATCH_ROWS):
            if writer is None:
                schema = rows.features.arrow_schema if rows.features else table.schema
                writer = parquet.ParquetWriter(part, schema)
            writer.write_table(table.cast(writer.schema))
    finally:
        if writer is not None:
            writer.close()
    if writer is None:
        raise DataError("the split has no rows")


def _not_fetched(uri: str, file: Path, name: str, commit: str, error: Exception) -> DataError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return DataError(
        f"{uri}: not in the cache ({file}), and it cannot be fetched: {reason}. Check name, commit and split, or "
        f"download it where there is a network, `hf download {name} --repo-type dataset --revision {commit}`, and name "
        "its file in place of the hf:// address."
    )
