"""Data in the forms that people have it: the same prompts from each, and one clear error for what cannot be read.

The files are written by the libraries that write them elsewhere: csv, pyarrow, datasets and Pillow.
"""

from __future__ import annotations

import csv
import io
import json
import sys
import time
import tracemalloc
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet
from unirl.core.data.columns import Columns
from unirl.core.data.hub import hub_rows
from unirl.core.data.prompts import read_prompts
from unirl.core.data.run_data import data_hash
from unirl.core.errors import DataError
from unirl.core.types.data import MediaRef

ROWS = [
    {"caption": "a red ring,\non the left", "answer": "12"},
    {"caption": 'ein "großer" Stern', "answer": "007"},
    {"caption": "three squares", "answer": "3"},
]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_csv(path: Path, rows: list[dict[str, Any]] = ROWS, *, encoding: str = "utf-8-sig") -> Path:
    with path.open("w", newline="", encoding=encoding) as file:
        table = csv.DictWriter(file, [*rows[0]])
        table.writeheader()
        table.writerows(rows)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_saved(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return path


def write_json(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return path


def write_jsonl(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


FORMS = [
    ("p.csv", write_csv),
    ("p.CSV", write_csv),
    ("p.parquet", write_parquet),
    ("p", write_saved),
    ("p.json", write_json),
    ("p.jsonl", write_jsonl),
]


def png(color: str = "red", mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (8, 4), color).save(file, format="PNG")
    return file.getvalue()


@pytest.mark.parametrize(("name", "write"), FORMS)
def test_every_form_gives_the_same_prompts_each_time(tmp_path: Path, name: str, write: Callable[[Path], Path]) -> None:
    path, columns = write(tmp_path / name), Columns(names={"prompt": "caption", "truth": "answer"})
    prompts = read_prompts(path, columns=columns)
    assert [(one.prompt_id, one.text, one.metadata) for one in prompts] == [
        (f"{name}:{index}", row["caption"], {"truth": row["answer"]}) for index, row in enumerate(ROWS)
    ]
    # A resumed run reads them again.
    assert list(read_prompts(path, columns=columns)) == list(prompts)
    with pytest.raises(
        DataError, match=r"data.columns.prompt: got 'captoin', but .*p.* has no such column; it has 'answer', 'caption'"
    ):
        read_prompts(path, columns=Columns(names={"prompt": "captoin"}))


@pytest.mark.parametrize(("name", "write"), FORMS)
def test_a_row_may_not_set_what_holds_for_all_unless_its_column_is_renamed_or_left_out(
    tmp_path: Path, name: str, write: Callable[[Path, list[dict[str, Any]]], Path]
) -> None:
    path, settings = write(tmp_path / name, [{"prompt": "a", "height": "64"}]), {"height": "sampling.height"}
    with pytest.raises(DataError) as caught:
        read_prompts(path, settings=settings)
    assert (
        "'height' cannot be set for one row; sampling.height sets it for all. Leave the column out with "
        "data.columns.height=null. If a reward is to read it, rename it, such as data.columns.row_height=height"
    ) in str(caught.value)
    for columns, metadata in (({"height": None}, {}), ({"row_height": "height"}, {"row_height": "64"})):
        (prompt,) = read_prompts(path, settings=settings, columns=Columns(names=columns))
        assert prompt.metadata == metadata


def test_a_setting_beside_metadata_is_refused_as_well(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a", "metadata": {"k": 1}, "seed": 3}])
    with pytest.raises(DataError, match=r"p.jsonl:1: 'seed' cannot be set for one row; run.seed sets it for all"):
        read_prompts(path, settings={"seed": "run.seed"})


def test_a_cell_of_csv_may_be_long(tmp_path: Path) -> None:
    """Longer than the 131,072 characters that Python's reader takes by default."""
    text = "word " * 30_000
    write_csv(tmp_path / "p.csv", [{"prompt": "short"}, {"prompt": text}])
    assert [len(prompt.text.split()) for prompt in read_prompts(tmp_path / "p.csv")] == [1, 30_000]


def test_rows_of_csv_are_named_by_their_first_line(tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,n\r\n"a\nb",1\r\n\r\nc\r\n"d",,\r\ne,2\r\n')
    with pytest.raises(DataError) as caught:
        read_prompts(path)
    assert str(caught.value).splitlines() == [
        f"{path}:5: got 1 cells, expected 2, as the header has.",
        f"{path}:6: got 3 cells, expected 2, as the header has.",
    ]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("p.csv", b"", "p.csv: the prompt file contains no prompts"),
        ("p.csv", b"prompt\n", "p.csv: the prompt file contains no prompts"),
        ("p.csv", b"prompt,prompt\na,b\n", "p.csv: got several columns 'prompt', expected one; rename the others"),
        ("p.csv", b'prompt\na\n"b\nc\n', "p.csv:3: not CSV: unexpected end of data"),
        ("p.csv", b"text\na\n", r"p.csv:2: no 'prompt' \(or 'caption'\); got \['text'\]"),
        ("p.csv", "prompt\na\ngroß\n".encode("latin-1"), r"p.csv:3: not UTF-8 text \(byte 12\); save the file as UTF-8"),
        ("p.csv", "prompt\na\n".encode("utf-16"), r"p.csv:1: not UTF-8 text \(byte 0\)"),
        ("p.txt", "a\nb\n".encode("utf-16"), r"p.txt:1: not UTF-8 text \(byte 0\); save the file as UTF-8"),
        ("p.parquet", b"", "p.parquet: not a parquet file that can be read: Parquet file size is 0 bytes"),
        ("p.parquet", b"PAR1 and no more", "p.parquet: not a parquet file that can be read"),
        ("p.json", b'{"rows": []}', "p.json: got an object, expected a list of rows, or an object that has one under"),
        ("p.xlsx", b"a", "p.xlsx: got suffix '.xlsx', expected a prompt file ending in .txt, .jsonl, .json, .csv, .parquet"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_read_names_itself(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says):
        read_prompts(tmp_path / name)


def test_tables_of_no_rows_and_values_without_a_json_form_are_refused(tmp_path: Path) -> None:
    empty = pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
    parquet.write_table(empty, tmp_path / "none.parquet")
    with pytest.raises(DataError, match=r"none.parquet: the prompt file contains no prompts"):
        read_prompts(tmp_path / "none.parquet")
    path = write_parquet(
        tmp_path / "p.parquet", [{"prompt": "a", "made": None}, {"prompt": "b", "made": date(2026, 1, 2)}]
    )
    with pytest.raises(DataError, match=r"p.parquet\[1\]: 'made' holds a date .*data.columns.made=null"):
        read_prompts(path)
    path = write_parquet(tmp_path / "nan.parquet", [{"prompt": "a", "x": float("nan")}])
    with pytest.raises(DataError, match=r"nan.parquet\[0\]: 'x' holds a number nan"):
        read_prompts(path)


def test_a_library_that_is_not_installed_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "p.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        DataError, match=r"p.parquet: reading it needs pyarrow. Install it: `pip install 'unirl-core\[data\]'`"
    ):
        read_prompts(path)


def test_one_column_under_two_fields_and_no_column_at_all_are_refused() -> None:
    with pytest.raises(
        DataError, match=r"data.columns.answer: got column 'text', which data.columns.prompt names already"
    ):
        Columns(names={"prompt": "text", "answer": "text"})
    with pytest.raises(DataError, match=r"data.columns.prompt: got '', expected a column, or null"):
        Columns(names={"prompt": ""})


def test_a_mapped_column_stands_in_for_the_one_of_our_name(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "p.csv", [{"prompt": "short", "long": "a long one", "answer": "1"}])
    (prompt,) = read_prompts(path, columns=Columns(names={"prompt": "long"}))
    assert (prompt.text, prompt.metadata) == ("a long one", {"answer": "1"})
    (prompt,) = read_prompts(path, columns=Columns(names={"prompt": "long", "short": "prompt"}))
    assert (prompt.text, prompt.metadata) == ("a long one", {"answer": "1", "short": "short"})


def test_held_out_prompts_may_have_our_names_beside_training_prompts_with_others(tmp_path: Path) -> None:
    columns = Columns(names={"prompt": "caption", "answer": "solution"}, own_names=True)
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a", "answer": "1"}])
    assert [(one.text, one.metadata) for one in read_prompts(path, columns=columns)] == [("a", {"answer": "1"})]
    path = write_csv(tmp_path / "p.csv", [{"prompt": "a", "solution": "1"}])
    with pytest.raises(DataError, match=r"data.columns.prompt: got 'caption', but .*p.csv has no such column"):
        read_prompts(path, columns=columns)


@pytest.mark.parametrize(("name", "write"), [("p.parquet", write_parquet), ("p", write_saved)])
def test_images_in_a_table_become_files_named_after_their_row(
    tmp_path: Path, name: str, write: Callable[[Path, list[dict[str, Any]]], Path]
) -> None:
    Image.new("RGB", (2, 2)).save(tmp_path / "beside.png")
    pictures = [{"bytes": png("red"), "path": "a.png"}, {"bytes": None, "path": str(tmp_path / "beside.png")}]
    path = write(
        tmp_path / name, [{"prompt": text, "picture": each} for text, each in zip("ab", pictures, strict=True)]
    )
    columns = Columns(names={"source": "picture"}, media=tmp_path / "cache")
    first, second = read_prompts(path, columns=columns)
    (ref,) = first.media
    assert (ref.modality, ref.role, first.metadata) == ("image", "source", {})
    assert Path(ref.uri).read_bytes() == png("red")
    assert Path(ref.uri).parent == tmp_path / "cache" / name and Path(ref.uri).name.startswith("row-0-source-")
    assert second.media == (MediaRef(modality="image", role="source", uri=str(tmp_path / "beside.png")),)
    assert [one.media for one in read_prompts(path, columns=columns)] == [first.media, second.media]
    with pytest.raises(
        DataError,
        match=r"\[0\]: column 'picture' holds images, which have no role. Name it, such as data.columns.source=picture",
    ):
        read_prompts(path, columns=Columns(takes=["source"]))
    assert not any(one.media for one in read_prompts(path, columns=Columns(names={"picture": None})))


def test_bytes_that_are_not_an_image_are_refused_by_file_and_row(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "source": png()}, {"prompt": "b", "source": b"GIF, or so"}]
    path = write_parquet(tmp_path / "p.parquet", rows)
    with pytest.raises(DataError, match=r"p.parquet\[1\]: 'source' holds 10 bytes that are not an image"):
        read_prompts(path, columns=Columns(media=tmp_path / "cache"))


def test_a_column_of_paths_is_media_where_it_is_mapped_to_a_role(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "a.mp4").touch()
    path = write_csv(tmp_path / "p.csv", [{"prompt": "a", "file": "a.png", "clip": "a.mp4"}])
    (prompt,) = read_prompts(path, columns=Columns(names={"source": "file", "target": "clip"}))
    assert prompt.media == (
        MediaRef(modality="image", role="source", uri=str(tmp_path / "a.png")),
        MediaRef(modality="video", role="target", uri=str(tmp_path / "a.mp4")),
    )
    write_csv(path, [{"prompt": "a", "file": "gone.png", "answer": "so it is"}])
    with pytest.raises(DataError, match=r"p.csv:2: 'source': got 'gone.png', but the file .* does not exist"):
        read_prompts(path, columns=Columns(names={"source": "file"}))
    with pytest.raises(DataError, match=r"'answer' \(data.columns.source\) must be an image, .*; got 'so it is'"):
        read_prompts(path, columns=Columns(names={"source": "answer"}))
    # A stored completion is text.
    (prompt,) = read_prompts(path, columns=Columns(names={"target": "answer"}))
    assert prompt.metadata["target"] == "so it is" and not prompt.media


def write_captions(folder: Path) -> Path:
    (folder / "more").mkdir(parents=True)
    (folder / ".cache").mkdir()
    for name, caption in (("b.png", "a ring"), ("a.JPG", "\ufeffein Stern\n"), ("more/c.webp", "a square")):
        Image.new("RGB", (4, 4)).save(folder / name)
        (folder / name).with_suffix(".txt").write_text(caption, encoding="utf-8")
    (folder / ".cache" / "d.png").write_bytes(png())
    return folder


def test_a_folder_of_images_has_a_prompt_for_each_caption(tmp_path: Path) -> None:
    folder = write_captions(tmp_path / "set")
    prompts = read_prompts(folder, columns=Columns(names={"target": "image"}))
    assert [(one.prompt_id, one.text, Path(one.media[0].uri)) for one in prompts] == [
        ("set:0", "ein Stern", folder / "a.JPG"),
        ("set:1", "a ring", folder / "b.png"),
        ("set:2", "a square", folder / "more" / "c.webp"),
    ]
    assert [one.media for one in read_prompts(folder, columns=Columns(names={"image": None}))] == [()] * 3
    with pytest.raises(
        DataError, match=r"column 'image' holds images, which have no role. Leave them out: data.columns.image=null"
    ):
        read_prompts(folder)


def test_images_without_captions_and_captions_without_images_are_all_named(tmp_path: Path) -> None:
    folder = write_captions(tmp_path / "set")
    (folder / "b.txt").unlink()
    (folder / "more" / "c.webp").rename(folder / "more" / "c.heic")
    (folder / "a.txt").write_bytes("groß".encode("latin-1"))
    with pytest.raises(DataError) as caught:
        read_prompts(folder, columns=Columns(names={"image": None}))
    assert str(caught.value).splitlines() == [
        f"{folder}/a.txt: not UTF-8 text (byte 3); save the file as UTF-8.",
        f"{folder}/b.png: no caption beside the image; write it to b.txt.",
        f"{folder}/more/c.txt: no image c of .png, .jpg, .jpeg, .webp, .bmp, .tif, .tiff, .gif beside the caption.",
    ]


def test_other_folders_are_refused_by_what_they_hold(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="got a folder of nothing, expected one that `datasets` has saved, or images"):
        read_prompts(tmp_path)
    write_parquet(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"got a folder of a.parquet, .*Name a file instead, such as a .parquet"):
        read_prompts(tmp_path)
    write_jsonl(tmp_path / "metadata.jsonl", [{"file_name": "a.png", "prompt": "a"}])
    with pytest.raises(
        DataError, match=r"captions are in metadata.jsonl, expected that file: .*data.columns.source=file_name"
    ):
        read_prompts(tmp_path)
    write_saved(tmp_path / "both" / "train")
    (tmp_path / "both" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(DataError, match=r"both: got a folder with several splits, expected one of them: .*both/train"):
        read_prompts(tmp_path / "both")


@pytest.mark.parametrize("write", [write_captions, write_saved])
def test_the_hash_of_a_folder_is_that_of_its_data(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    folder = write(tmp_path / "set")
    first = data_hash(folder)
    (folder / ".DS_Store").touch()
    assert data_hash(folder) == first
    assert data_hash(folder.rename(tmp_path / "moved")) == first
    file = next(one for one in sorted((tmp_path / "moved").iterdir()) if one.suffix in (".arrow", ".txt"))
    file.write_bytes(file.read_bytes() + b" ")
    assert data_hash(tmp_path / "moved") != first


def test_a_table_is_read_in_batches(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number:0100}", "answer": str(number)} for number in range(20_000)]
    path = write_parquet(tmp_path / "p.parquet", rows)
    tracemalloc.start()
    prompts = read_prompts(path)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Beyond the prompts: a batch of 1,024 rows, a twentieth of them, and an index of their ids. Rows read at once would
    # take as much as the prompts again.
    assert peak < 1.4 * kept
    assert [one.text for one in prompts] == [row["prompt"] for row in rows]
    assert prompts[7].metadata == {"answer": "7"}


@pytest.mark.parametrize(
    "uri", ["hf://a/b", "hf://datasets/a/b", "hf://datasets/a/b@main/train", f"hf://datasets/b@{COMMIT}/train"]
)
def test_a_dataset_of_the_hub_is_named_with_its_commit_and_split(tmp_path: Path, uri: str) -> None:
    with pytest.raises(
        DataError, match=r"expected hf://datasets/OWNER/NAME@COMMIT/SPLIT, .* 40 hex digits: branches and tags"
    ):
        hub_rows(uri, cache=tmp_path)


@pytest.mark.parametrize("is_offline", [True, False])
def test_a_dataset_of_the_hub_without_a_network_is_a_quick_error_that_says_what_to_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_offline: bool
) -> None:
    import datasets  # noqa: F401  # its import is not what is timed
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", is_offline)
    # Nothing listens there.
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    began = time.perf_counter()
    with pytest.raises(DataError) as caught:
        hub_rows(f"hf://datasets/a/b@{COMMIT}/train", cache=tmp_path)
    assert time.perf_counter() - began < 15
    assert f"`hf download a/b --repo-type dataset --revision {COMMIT}`" in str(caught.value)
    assert "not in the cache" in str(caught.value) and list(tmp_path.iterdir()) == []


def test_a_dataset_of_the_hub_is_streamed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    rows = [{"prompt": row["caption"], "source": {"bytes": png(), "path": "a.png"}} for row in ROWS]
    saved = datasets.Dataset.from_list(rows).cast_column("source", datasets.Image())
    calls: list[tuple[object, ...]] = []

    def load_dataset(name: str, config: str | None, **options: object) -> Any:
        calls.append((name, config, options))
        return saved.to_iterable_dataset(num_shards=2)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    uri = f"hf://datasets/a/b@{COMMIT}/small/train"
    first = hub_rows(uri, cache=tmp_path)
    assert calls == [("a/b", "small", {"split": "train", "revision": COMMIT, "streaming": True})]
    prompts = read_prompts(first, columns=Columns(media=tmp_path / "images"))
    assert [one.text for one in prompts] == [row["caption"] for row in ROWS]
    assert Path(prompts[2].media[0].uri).read_bytes() == png()
    # A resumed run asks nobody.
    assert hub_rows(uri, cache=tmp_path) == first and len(calls) == 1


def test_a_stream_that_breaks_off_leaves_nothing_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    import huggingface_hub

    def broken() -> Any:
        yield {"prompt": "a"}
        raise ConnectionError("the line is cut")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.IterableDataset.from_generator(broken))
    with pytest.raises(DataError, match="cannot be fetched: the line is cut"):
        hub_rows(f"hf://datasets/a/b@{COMMIT}/train", cache=tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
