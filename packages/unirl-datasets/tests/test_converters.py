"""Published sets become prompt files. The sources here are small files in the published layouts."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow.parquet import write_table
from unirl.core.cli import main
from unirl.core.data.prompts import read_prompts
from unirl.core.errors import DataError
from unirl.core.types.data import Prompt
from unirl.datasets.convert import Conversion, convert
from unirl.datasets.example import INSTRUCTION
from unirl.datasets.sets import prompt_set


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    write_table(pyarrow.Table.from_pylist(rows), path)
    return path


WRITERS = {".jsonl": jsonl, ".parquet": parquet}


def converted(name: str, source: Path, **options: Any) -> tuple[Conversion, tuple[Prompt, ...]]:
    out = source.with_name("out.jsonl")
    done = convert(prompt_set(name), [source], out, **options)
    assert done.rows_read == done.written + sum(done.dropped.values())
    return done, read_prompts(out)


@pytest.mark.parametrize("ending", WRITERS)
def test_gsm8k(tmp_path: Path, ending: str) -> None:
    rows = [
        {"question": "How many eggs? ", "answer": "She has 16 - 3 = <<16-3=13>>13.\n#### 13"},
        {"question": "How much is it?", "answer": "It is much.\n#### 1,080"},
        {"question": "A question without its number?", "answer": "Nothing."},
        {"question": "", "answer": "#### 1"},
    ]
    done, prompts = converted("gsm8k", WRITERS[ending](tmp_path / f"train{ending}", rows))
    assert [prompt.metadata for prompt in prompts] == [{"answer": "13"}, {"answer": "1080"}]
    assert prompts[0].text == f"How many eggs?\n\n{INSTRUCTION}"
    assert [prompt.prompt_id for prompt in prompts] == [f"train{ending}:0", f"train{ending}:1"]
    assert done.dropped == {"no `####` with a number behind it in the answer": 1, "no question": 1}


def dapo_row(question: str, answer: str, index: int) -> dict[str, Any]:
    before = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    )
    after = '\n\nRemember to put your answer on its own line after "Answer:".'
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": before + question + after, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"uuid-{index}"},
    }


@pytest.mark.parametrize("ending", WRITERS)
def test_dapo_math_has_each_question_once_and_none_with_two_answers(tmp_path: Path, ending: str) -> None:
    """The public table repeats every question, and gives seven of them two answers."""
    questions = [("Two\n\nparagraphs?", "34"), ("Disputed?", "1"), ("Other?", "-7"), ("Disputed?", "2")]
    rows = [dapo_row(*questions[n % 4], n) for n in range(12)]
    done, prompts = converted("dapo-math-17k", WRITERS[ending](tmp_path / f"dapo{ending}", rows), instruction="")
    assert [(prompt.text, prompt.metadata) for prompt in prompts] == [
        ("Two\n\nparagraphs?", {"answer": "34"}),
        ("Other?", {"answer": "-7"}),
    ]
    assert done.rows_read == 12
    assert done.dropped == {
        "a question with different answers; all its rows": 6,
        "the same question as an earlier row": 4,
    }


def test_dapo_math_takes_prompts_that_are_text(tmp_path: Path) -> None:
    row = {**dapo_row("", "34", 0), "prompt": "What is 2 x 17?"}
    _, (prompt,) = converted("dapo-math-17k", jsonl(tmp_path / "processed.jsonl", [row]), instruction="")
    assert prompt.text == "What is 2 x 17?"


@pytest.mark.parametrize(
    ("row", "answer", "kept"),
    [
        ({"ID": "2024-I-1", "Problem": "Why?", "Solution": "So.", "Answer": 204}, "204", {"id": "2024-I-1"}),
        (
            {"id": 60, "problem": "Why?", "solution": "So.", "answer": "025", "url": "u", "year": "2024"},
            "25",
            {"id": 60, "year": "2024"},
        ),
        ({"id": 60, "problem": "Why?", "solution": r"\boxed{204}", "url": "u"}, "204", {"id": 60}),
        ({"problem": "Why?", "answer": "70", "id": "0"}, "70", {"id": "0"}),
        ({"question": "Why?", "answer": r"336^\circ"}, "336", {}),
    ],
)
@pytest.mark.parametrize("ending", WRITERS)
def test_aime_in_its_published_layouts(
    tmp_path: Path, ending: str, row: dict[str, Any], answer: str, kept: dict[str, Any]
) -> None:
    _, (prompt,) = converted("aime", WRITERS[ending](tmp_path / f"aime{ending}", [row]), instruction="")
    assert prompt.text == "Why?"
    assert prompt.metadata == {"answer": answer, **kept}


def test_an_answer_that_aime_cannot_have_is_dropped_and_counted(tmp_path: Path) -> None:
    rows = [{"problem": f"{answer}?", "answer": answer} for answer in ("1000", "-3", "1/2", "7", "")]
    done, (prompt,) = converted("aime", jsonl(tmp_path / "aime.jsonl", rows))
    assert prompt.metadata["answer"] == "7"
    assert done.dropped == {"the answer is not an integer from 0 to 999": 4}


def png(level: int) -> bytes:
    image = pytest.importorskip("PIL.Image").new("RGB", (4, 4), (level, level, level))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_geometry3k_writes_its_images_beside_the_file(tmp_path: Path) -> None:
    """The same words about another figure are another question; with the same figure they are the same."""
    rows = [
        {"images": [{"bytes": png(level), "path": None}], "problem": "<image>Find x.", "answer": r"2 \sqrt { 221 }"}
        for level in (0, 90, 0)
    ]
    rows.append({"images": [{"bytes": png(1), "path": None}], "problem": "<image><image>Find y.", "answer": "1"})
    done, prompts = converted("geometry3k", parquet(tmp_path / "train.parquet", rows), instruction="")
    assert [prompt.text for prompt in prompts] == ["Find x."] * 2
    assert prompts[0].metadata == {"answer": r"2 \sqrt { 221 }"}
    (first,), (second,) = (prompt.media for prompt in prompts)
    assert (first.modality, first.role) == ("image", "condition")
    assert first.uri == str(tmp_path / "out.media" / "train.parquet-0-0.png")
    assert [Path(ref.uri).read_bytes() for ref in (first, second)] == [png(0), png(90)]
    assert done.media == tmp_path / "out.media"
    assert done.dropped == {"not as many <image> marks as images": 1, "the same question as an earlier row": 1}


def test_images_of_a_jsonl_source_are_files_beside_it(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(5))
    row = {"images": ["a.png"], "problem": "<image>Find x.", "answer": "1"}
    _, (prompt,) = converted("geometry3k", jsonl(tmp_path / "geo.jsonl", [row]))
    assert Path(prompt.media[0].uri).read_bytes() == png(5)
    with pytest.raises(DataError, match=r"geo.jsonl:0: column 'images' must be image files.*b.png"):
        converted("geometry3k", jsonl(tmp_path / "geo.jsonl", [{**row, "images": ["b.png"]}]), overwrite=True)


def magicbrush_row(instruction: str | None, source: bytes | None, turn: int) -> dict[str, Any]:
    images = {"source_img": source, "mask_img": png(1), "target_img": png(2)}
    columns = {name: data and {"bytes": data, "path": f"{name}.png"} for name, data in images.items()}
    return {"img_id": "242679", "turn_index": turn, "instruction": instruction, **columns}


def test_magicbrush_has_the_source_of_every_turn(tmp_path: Path) -> None:
    rows = [
        magicbrush_row("Make the cat\nred. ", png(10), 1),
        magicbrush_row("Add a hat.", png(20), 2),
        magicbrush_row("Make the cat red.", png(10), 1),
        magicbrush_row("Make the cat red.", png(20), 3),
        magicbrush_row(" ", png(10), 1),
        magicbrush_row(None, png(10), 1),
        magicbrush_row("Add a hat.", None, 1),
    ]
    done, prompts = converted("magicbrush", parquet(tmp_path / "train-00000-of-00051.parquet", rows))
    assert [prompt.text for prompt in prompts] == ["Make the cat\nred.", "Add a hat.", "Make the cat red."]
    assert [prompt.metadata for prompt in prompts] == [{"img_id": "242679", "turn_index": turn} for turn in (1, 2, 3)]
    refs = [ref for prompt in prompts for ref in prompt.media]
    assert [(ref.modality, ref.role) for ref in refs] == [("image", "source")] * 3
    assert [Path(ref.uri).read_bytes() for ref in refs] == [png(10), png(20), png(20)]
    assert done.media == tmp_path / "out.media" and len(list(done.media.iterdir())) == 3
    assert done.dropped == {
        "no instruction": 2,
        "no source image": 1,
        "the same question as an earlier row": 1,
    }


def gedit_row(instruction: str, language: str, source: object) -> dict[str, Any]:
    return {
        "task_type": "subject-remove",
        "key": f"key-{language}",
        "instruction": instruction,
        "instruction_language": language,
        "input_image": source,
        "input_image_raw": {"bytes": png(7), "path": None},
        "Intersection_exist": True,
    }


def test_gedit_bench_keeps_kind_and_language_of_each_instruction(tmp_path: Path) -> None:
    rows = [
        gedit_row("Remove the cat.", "en", {"bytes": png(3), "path": None}),
        gedit_row("去掉猫。", "cn", {"bytes": png(3), "path": None}),
    ]
    done, prompts = converted("gedit-bench", parquet(tmp_path / "gedit.parquet", rows))
    assert [prompt.text for prompt in prompts] == ["Remove the cat.", "去掉猫。"]
    assert [prompt.metadata for prompt in prompts] == [
        {
            "key": f"key-{language}",
            "task_type": "subject-remove",
            "instruction_language": language,
            "Intersection_exist": True,
        }
        for language in ("en", "cn")
    ]
    assert [Path(prompt.media[0].uri).read_bytes() for prompt in prompts] == [png(3)] * 2
    assert {prompt.media[0].role for prompt in prompts} == {"source"} and not done.dropped


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        (
            "magicbrush",
            {"instruction": "Add a hat."},
            r"needs the column 'source_img', 'img_id', 'turn_index', which is m",
        ),
        (
            "gedit-bench",
            {"instruction": "Add a hat."},
            r"needs the column 'input_image', 'key', 'task_type', 'instruction_",
        ),
        ("magicbrush", magicbrush_row("Add a hat.", b"text", 1), r"train.parquet:0: an image begins with b'text'"),
        (
            "gedit-bench",
            gedit_row("Add a hat.", "en", {"bytes": b"", "path": "no.png"}),
            r"'input_image' must be image f",
        ),
    ],
    ids=["magicbrush-columns", "gedit-columns", "no-image-file", "no-bytes"],
)
def test_edits_that_cannot_be_read_are_refused_and_nothing_is_left(
    tmp_path: Path, name: str, row: dict[str, Any], message: str
) -> None:
    good = {"magicbrush": magicbrush_row("Make it red.", png(1), 1), "gedit-bench": gedit_row("Red.", "en", None)}[name]
    rows = [row] if len(row) == 1 else [row, {**good, "instruction": "Something else."}]
    source = parquet(tmp_path / "train.parquet", rows)
    with pytest.raises(DataError, match=message):
        converted(name, source)
    assert [path.name for path in tmp_path.iterdir()] == ["train.parquet"]


def test_images_of_dropped_questions_are_removed(tmp_path: Path) -> None:
    """Two answers to one question about one figure: neither it nor its image stays."""
    figure, other = ({"bytes": png(level), "path": None} for level in (0, 90))
    rows = [{"images": [figure], "problem": "<image>Find x.", "answer": answer} for answer in ("1", "2")]
    rows.append({"images": [other], "problem": "<image>Find x.", "answer": "1"})
    done, (prompt,) = converted("geometry3k", parquet(tmp_path / "train.parquet", rows))
    assert done.dropped == {"a question with different answers; all its rows": 2}
    assert [file.name for file in (tmp_path / "out.media").iterdir()] == [Path(prompt.media[0].uri).name]


@pytest.mark.parametrize("ending", WRITERS)
def test_a_missing_column_is_named_with_what_was_found(tmp_path: Path, ending: str) -> None:
    source = WRITERS[ending](tmp_path / f"train{ending}", [{"question": "Why?", "response": "So."}])
    with pytest.raises(DataError, match=r"gsm8k needs the column 'answer', which is missing; got question, response"):
        converted("gsm8k", source)
    with pytest.raises(DataError, match=r"needs the column 'answer' or 'Answer' or 'solution'"):
        converted("aime", source)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "broken.jsonl:1: not a line of JSON"),
        ('{"question": "a", "answer": "#### 1"}\n7', "broken.jsonl:2: got int, expected an object"),
        ('{"question": 7, "answer": "#### 1"}', r"broken.jsonl:0: column 'question' must be text; got 7"),
        ("", "nothing to write. 0 rows were read."),
        ('{"question": "\\ud800", "answer": "#### 1"}', "1 rows were read; 1 dropped: text that is not valid Unicode"),
    ],
)
def test_sources_that_cannot_be_read_are_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "broken.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        converted("gsm8k", tmp_path / "broken.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["broken.jsonl"], "nothing is left behind"


def test_files_that_are_no_sources_are_refused(tmp_path: Path) -> None:
    (tmp_path / "no.parquet").write_bytes(b"PAR0")
    (tmp_path / "no.csv").write_text("a,b")
    (tmp_path / "latin.jsonl").write_bytes('{"question": "é"}'.encode("latin-1"))
    for name, message in (
        ("no.parquet", "not a parquet file"),
        ("no.csv", "expected .parquet or .jsonl"),
        ("none.jsonl", "no such file"),
        ("latin.jsonl", "not UTF-8"),
    ):
        with pytest.raises(DataError, match=message):
            converted("gsm8k", tmp_path / name)


def test_what_exists_stays_unless_told_otherwise(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "train.jsonl", [{"question": "Why?", "answer": "#### 1"}])
    out = tmp_path / "out.jsonl"
    out.write_text("precious")
    with pytest.raises(DataError, match="already exists"):
        converted("gsm8k", source)
    assert out.read_text() == "precious"
    converted("gsm8k", source, overwrite=True)
    with pytest.raises(DataError, match="is also a source"):
        convert(prompt_set("gsm8k"), [source], source, overwrite=True)
    with pytest.raises(DataError, match=r"ends in \.jsonl"):
        convert(prompt_set("gsm8k"), [source], tmp_path / "out.parquet")
    with pytest.raises(DataError, match="2 sources have this name"):
        convert(prompt_set("gsm8k"), [source, source], tmp_path / "two.jsonl")


def test_a_conversion_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    """The second image is none: the first was written by then, and neither it nor half a file remains."""
    rows = [
        {"images": [{"bytes": data, "path": None}], "problem": "<image>Find x.", "answer": "1"}
        for data in (png(0), b"text")
    ]
    source = parquet(tmp_path / "train.parquet", rows)
    (tmp_path / "out.jsonl").write_text("precious")
    with pytest.raises(DataError, match="neither PNG, JPEG, GIF nor WebP"):
        converted("geometry3k", source, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "train.parquet"]
    assert (tmp_path / "out.jsonl").read_text() == "precious"


def test_what_a_failing_replacement_would_replace_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"images": ["a.png"], "problem": "<image>Find x.", "answer": "1"}
    (tmp_path / "a.png").write_bytes(png(5))
    source, replace = jsonl(tmp_path / "geo.jsonl", [row]), Path.replace
    _, (prompt,) = converted("geometry3k", source)
    before = sorted(path.name for path in tmp_path.iterdir())
    (tmp_path / "a.png").write_bytes(png(7))

    def fail(self: Path, target: Path) -> Path:
        if target.name == "out.jsonl":
            raise OSError("no space")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        converted("geometry3k", source, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert Path(prompt.media[0].uri).read_bytes() == png(5)
    monkeypatch.undo()
    _, (prompt,) = converted("geometry3k", source, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert Path(prompt.media[0].uri).read_bytes() == png(7)


def test_several_sources_make_one_file(tmp_path: Path) -> None:
    one = jsonl(tmp_path / "I.jsonl", [{"question": "Why?", "answer": "70"}])
    two = jsonl(tmp_path / "II.jsonl", [{"question": "How?", "answer": "82"}, {"question": "Why?", "answer": "70"}])
    done = convert(prompt_set("aime"), [one, two], tmp_path / "aime.jsonl")
    assert (done.rows_read, done.written) == (3, 2)
    assert [prompt.prompt_id for prompt in read_prompts(tmp_path / "aime.jsonl")] == ["I.jsonl:0", "II.jsonl:0"]


def test_the_command_reports_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": "Why?", "answer": "#### 1"}] * 2
    source, out = jsonl(tmp_path / "train.jsonl", rows), tmp_path / "out.jsonl"

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["data", "convert", *words])
        printed = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, printed.out, printed.err

    code, text, _ = run("gsm8k", str(source), str(out), "--json")
    assert code == 0
    assert json.loads(text) == {
        "rows_read": 2,
        "written": 1,
        "dropped": {"the same question as an earlier row": 1},
        "file": str(out),
        "media": None,
    }
    code, text, _ = run("gsm8k", str(source), str(out), "--overwrite")
    assert code == 0
    assert "1 dropped: the same question as an earlier row" in text
    code, _, error = run("gsm9k", str(source), str(out))
    assert code == 2
    assert "did you mean 'gsm8k'?" in error
