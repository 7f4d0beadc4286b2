"""Data of users through whole runs: each form of docs/how-to/prompt-files.md is taken, and a resume repeats it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pages import ROOT
from PIL import Image
from pyarrow import parquet
from unirl.core.data.run_data import read_data
from unirl.core.errors import DataError
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.loop.run import train
from unirl.quickstart import edit_prompts_path

PAGE = ROOT / "docs/how-to/prompt-files.md"
SHOWN = re.findall(r"^\|.*\| `unirl train (.*)` \|$", PAGE.read_text(encoding="utf-8"), re.M)
COMMIT = "89abcdef" * 5


def write_image(path: Path) -> bytes:
    Image.new("RGB", (16, 16), "red").save(path)
    return path.read_bytes()


def write_shown(name: str, folder: Path) -> str:
    """Write the data of a command of the page; returns the name under which it is there."""
    texts = [f"prompt {number}" for number in range(64)]
    if name.startswith("hf://"):
        file = folder / f"cache/hub/OWNER/NAME/{COMMIT}/default/NAME-train.parquet"
        file.parent.mkdir(parents=True)
        parquet.write_table(pyarrow.table({"prompt": texts}), file)
        return name.replace("COMMIT", COMMIT)
    image = write_image(folder / "a.png")
    path = folder / name
    if path.suffix == ".parquet":
        images = [{"bytes": image, "path": None}] * len(texts)
        parquet.write_table(pyarrow.table({"instruction": texts, "image": images}), path)
    elif name == "my-dataset":
        import datasets

        datasets.disable_progress_bars()
        rows = datasets.Dataset.from_dict({"prompt": texts, "image": [str(folder / "a.png")] * len(texts)})
        rows.cast_column("image", datasets.Image()).save_to_disk(str(path))
    elif name == "my-images":
        path.mkdir()
        for number, text in enumerate(texts):
            write_image(path / f"{number}.png")
            (path / f"{number}.txt").write_text(text)
    else:
        lines = {
            ".txt": texts,
            ".csv": ["caption", *texts],
            ".jsonl": [json.dumps({"prompt": text}) for text in texts],
            ".json": [json.dumps(texts)],
        }
        path.write_text("\n".join(lines[path.suffix]))
    return name


@pytest.mark.parametrize("command", SHOWN)
def test_each_form_that_the_page_shows_is_taken(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe, *overrides = shlex.split(command)
    (name,) = (one.removeprefix("data.train=") for one in overrides if one.startswith("data.train="))
    there = write_shown(name, tmp_path)
    overrides = [one.replace(name, there) for one in overrides]
    plan = compose(recipe, [*overrides, "data.cache=cache"], catalog=Catalog.discover())
    data = read_data(plan)
    assert sorted(one.text for one in data.prompts) == sorted(f"prompt {number}" for number in range(64))
    assert list(data.hashes) == ["data.train"] and len(data.hashes["data.train"]) == 64
    # Read again it is the same, in the same order.
    again = read_data(plan)
    assert list(again.prompts) == list(data.prompts) and again.hashes == data.hashes


def test_the_page_shows_every_form() -> None:
    names = [next(one for one in command.split() if "data.train" in one).partition("=")[2] for command in SHOWN]
    assert {Path(name).suffix for name in names} >= {".txt", ".jsonl", ".json", ".csv", ".parquet"} and len(names) == 8


@pytest.fixture
def edits(tmp_path: Path) -> Path:
    """The first edits of the quickstart as a parquet file of another's columns, with the images in it."""
    source = edit_prompts_path("train")
    rows = list[dict[str, Any]]()
    for line in source.read_text(encoding="utf-8").splitlines()[:7]:
        row = json.loads(line)
        content = (source.parent / row["media"][0]["uri"]).read_bytes()
        rows.append({"instruction": row["prompt"], "before": {"bytes": content, "path": None}, **row["metadata"]})
    path = tmp_path / "edits.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.fixture
def words(edits: Path, tmp_path: Path) -> Callable[[str], list[str]]:
    return lambda name: [
        f"data.train={edits}",
        "data.columns.prompt=instruction",
        "data.columns.source=before",
        f"data.cache={tmp_path / 'cache'}",
        "data.prompts_per_step=2",
        "data.samples_per_prompt=2",
        "data.eval=null",
        "~tracker.report",
        f"run.dir={tmp_path / name}",
    ]


@pytest.mark.slow
def test_a_resumed_run_takes_the_same_prompts_of_a_table(words: Callable[[str], list[str]], tmp_path: Path) -> None:
    catalog = Catalog.discover()

    def start(name: str, *more: str, resume: Path | None = None) -> list[dict[str, float]]:
        given = [*words(name), *more]
        folder = train(compose("quickstart-edit", given, catalog=catalog), catalog=catalog, resume=resume).folder
        lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
        return [line["metrics"] for line in lines if line["kind"] == "step"]

    whole = start("whole", "run.max_steps=2")
    start("parts", "run.max_steps=2", "run.stop_at=1")
    assert start("parts", "run.max_steps=2", resume=tmp_path / "parts") == whole and len(whole) == 2


def test_held_out_prompts_in_our_form_go_with_a_table_for_training(words: Callable[[str], list[str]]) -> None:
    given = [*(one for one in words("run") if one != "data.eval=null"), f"data.eval={edit_prompts_path('heldout')}"]
    data = read_data(compose("quickstart-edit", given, catalog=Catalog.discover()))
    assert len(data.prompts) == 7 and data.held_out[0].media[0].role == "source"


def test_an_error_begins_with_the_key_of_the_file(words: Callable[[str], list[str]]) -> None:
    given = [one for one in words("run") if "columns.source" not in one]
    with pytest.raises(
        DataError,
        match=r"^data.train: .*edits.parquet\[0\]: column 'before' holds images, .*data.columns.source=before",
    ):
        read_data(compose("quickstart-edit", given, catalog=Catalog.discover()))
