"""Prompt files: three formats, one schema, and one error that names file and line for each bad row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unirl.core.data.prompts import PromptOrder, read_prompts
from unirl.core.errors import DataError
from unirl.core.types.data import MediaRef


def write(folder: Path, name: str, content: object) -> Path:
    path = folder / name
    text = content if isinstance(content, str) else json.dumps(content, indent=1, ensure_ascii=False)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_text_file_has_one_prompt_a_line(tmp_path: Path) -> None:
    prompts = read_prompts(write(tmp_path, "train.txt", "\ufeff a ring \r\n\n  \nein großer Stern\u2028zwei\n"))
    assert [(p.prompt_id, p.text, p.metadata, p.media) for p in prompts] == [
        ("train.txt:0", "a ring", {}, ()),
        ("train.txt:1", "ein großer Stern\u2028zwei", {}, ()),
    ]


def test_further_keys_are_metadata_unless_there_is_one(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "color": "red", "answer": 3},
        {"caption": "b", "prompt_id": "x/1", "metadata": {"k": [1]}, "color": "lost"},
        {"prompt": "c", "prompt_id": 7, "metadata": None, "color": "blue"},
    ]
    lines = "\n\n".join(json.dumps(row) for row in rows)
    prompts = read_prompts(write(tmp_path, "p.jsonl", lines))
    assert [(p.prompt_id, p.text, p.metadata) for p in prompts] == [
        ("p.jsonl:0", "a", {"color": "red", "answer": 3}),
        ("x/1", "b", {"k": [1]}),
        ("7", "c", {"color": "blue"}),
    ]


@pytest.mark.parametrize(
    ("content", "key", "texts"),
    [
        (["a", {"prompt": "b"}], "prompt", ["a", "b"]),
        ({"prompts": ["a", "b"]}, "prompt", ["a", "b"]),
        ({"caption": ["a"]}, "prompt", ["a"]),
        ({"caption": "a"}, "prompt", ["a"]),
        ({"prompt": ["a"], "version": 2}, "prompt", ["a"]),
        ({"questions": [{"questions": "a"}, "b"]}, "questions", ["a", "b"]),
    ],
)
def test_a_json_file_is_a_list_or_an_object_with_one(tmp_path: Path, content: Any, key: str, texts: list[str]) -> None:
    prompts = read_prompts(write(tmp_path, "p.json", content), prompt_key=key)
    assert [prompt.text for prompt in prompts] == texts


def test_media_are_found_beside_the_file_and_remote_ones_left_alone(tmp_path: Path) -> None:
    (tmp_path / "frames").mkdir()
    image = tmp_path / "frames" / "a.png"
    image.touch()
    uris = ["frames/a.png", str(image), "https://h/x.png", "http://h/x.png", "s3://b/x.png", "gs://b/x.png"]
    rows = [{"prompt": "a", "media_refs": [{"modality": "image", "role": "condition", "uri": uri}]} for uri in uris]
    rows.append({"prompt": "b", "media": [{"modality": "video", "role": "source", "uri": uris[0]}]})
    prompts = read_prompts(write(tmp_path, "p.json", rows))
    assert [prompt.media[0].uri for prompt in prompts[:-1]] == [str(image), str(image), *uris[2:]]
    assert prompts[-1].media == (MediaRef(modality="video", role="source", uri=str(image)),)


REF = {"modality": "image", "role": "condition", "uri": "gone.png"}


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("p.yaml", "a", r"p.yaml: got suffix '.yaml', expected a prompt file ending in .txt, .jsonl, .json, .csv"),
        ("p", "a", "got no suffix"),
        ("p.txt", "\n \n", "p.txt: the prompt file contains no prompts"),
        ("p.json", "", "p.json: the prompt file contains no prompts"),
        ("p.json", [], "p.json: the prompt file contains no prompts"),
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": }\n', r"p.jsonl:3: not JSON: Expecting value at column 12"),
        ("p.json", '[\n"a",\n}', r"p.json:3: not JSON"),
        ("p.jsonl", '{"prompt": "a"}\n["b"]', "p.jsonl:2: got a list, expected an object"),
        ("p.json", '[\n "a",\n 3\n]', "p.json:3: got a number, expected an object"),
        ("p.json", '{"x": 1,\n "prompts": [\n "a",\n {"prompt": "b",\n  "n": 1},\n ""]}', "p.json:6: 'prompt' must be a non-empty string"),
        ("p.json", "3", "p.json: got a number, expected a list of prompts"),
        ("p.json", {"prompts": 3}, "p.json: got a number under 'prompts', expected a list of prompts"),
        ("p.json", {"rows": ["a"]}, r"under 'prompts', 'caption' or 'prompt' \(data.prompt_key\); it has \['rows'\]"),
        ("p.jsonl", '{"text": "a"}', r"p.jsonl:1: no 'prompt' \(or 'caption'\); got \['text'\]"),
        ("p.jsonl", '{"prompt": "  "}', "p.jsonl:1: 'prompt' must be a non-empty string; got \"  \""),
        ("p.jsonl", '{"prompt": null, "caption": "a"}', "'prompt' must be a non-empty string; got null"),
        ("p.jsonl", '{"prompt": "a", "prompt_id": ""}', "p.jsonl:1: 'prompt_id' must be a non-empty string"),
        ("p.jsonl", '{"prompt": "a", "prompt_id": true}', "p.jsonl:1: 'prompt_id' must be a non-empty string"),
        ("p.jsonl", '{"prompt": "a", "metadata": [1]}', "p.jsonl:1: 'metadata' must be an object; got a list"),
        ("p.jsonl", '{"prompt": "a", "prompt_embeds": [1]}', "p.jsonl:1: 'prompt_embeds' holds precomputed embeddings"),
        ("p.jsonl", '{"prompt": "a", "prompt_embed_path": "x"}', "'prompt_embed_path' holds precomputed embeddings"),
        (
            "p.jsonl",
            '{"prompt": "a", "prompt_id": "x"}\n{"prompt": "b", "prompt_id": "x"}',
            "p.jsonl:2: duplicate prompt_id 'x', first used in .*p.jsonl:1; ids must be unique",
        ),
        ("p.jsonl", '{"prompt": "a", "prompt_id": "p.jsonl:1"}\n{"prompt": "b"}', "p.jsonl:2: duplicate prompt_id 'p.jsonl:1'"),
        ("p.json", [{"prompt": "a", "media": [REF]}], r"p.json:2: media\[0\].uri: got 'gone.png', but the file .*gone.png does not exist"),
        (
            "p.json",
            [{"prompt": "a", "media_refs": [{**REF, "uri": "ftp://h/x"}]}],
            r"media_refs\[0\].uri: got 'ftp://h/x', expected a path or a URI",
        ),
        ("p.json", [{"prompt": "a", "media": [{"uri": "x"}]}], r"media\[0\] must have exactly modality, role and uri"),
        ("p.json", [{"prompt": "a", "media": ["x"]}], r"media\[0\] must have exactly modality, role and uri"),
        ("p.json", [{"prompt": "a", "media": [{**REF, "role": ""}]}], r"media\[0\].role must be a non-empty string"),
        ("p.json", [{"prompt": "a", "media": REF}], "'media' must be a list"),
        ("p.json", [{"prompt": "a", "media": [], "media_refs": []}], "got both 'media' and 'media_refs'"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, name: str, content: object, says: str) -> None:
    with pytest.raises(DataError, match=says):
        read_prompts(write(tmp_path, name, content))


def test_all_problems_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    rows = [
        '{"prompt": ""}',
        "{",
        *['{"prompt": 1}'] * 3,
        '{"prompt": "a"}',
        *[f'{{"prompt": {n}}}' for n in range(2, 20)],
    ]
    with pytest.raises(DataError) as caught:
        read_prompts(write(tmp_path, "p.jsonl", "\n".join(rows)))
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("p.jsonl:1: 'prompt' must be a non-empty string; got \"\".")
    assert "p.jsonl:2: not JSON" in lines[1]
    assert lines[2].endswith("p.jsonl:3: 'prompt' must be a non-empty string; got 1. 2 more rows have this.")
    # 21 different ones.
    assert len(lines) == 11 and lines[-1] == "11 more problems follow."


@pytest.mark.parametrize("uri", ["https://example.org/p.jsonl", "s3://bucket/p.jsonl"])
def test_a_url_is_no_prompt_file(uri: str) -> None:
    with pytest.raises(DataError, match="got a URL, expected a file on this machine; download it first"):
        read_prompts(Path(uri))


def test_a_missing_file_a_folder_and_wrong_bytes_are_errors_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone.txt: no such prompt file"):
        read_prompts(tmp_path / "gone.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(DataError, match=r"folder.txt: got a folder of nothing, expected one that `datasets` has saved"):
        read_prompts(tmp_path / "folder.txt")
    (tmp_path / "latin.txt").write_bytes("a\nb\ngroß\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin.txt:3: not UTF-8 text \(byte 7\)"):
        read_prompts(tmp_path / "latin.txt")


sizes = st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))


@given(sizes, st.integers(-(2**70), 2**70), st.booleans(), st.integers(0, 200))
def test_every_epoch_has_each_prompt_once_and_no_step_has_one_twice(
    size: tuple[int, int], seed: int, shuffle: bool, start: int
) -> None:
    num_prompts, per_step = size
    order = PromptOrder(num_prompts, per_step, seed=seed, shuffle=shuffle)
    # From any epoch on: rows start * n to (start + 3) * n of the endless sequence are three whole epochs.
    first, last = start * num_prompts, (start + 3) * num_prompts
    steps = [order.step(step) for step in range(first // per_step, -(-last // per_step))]
    assert all(len(set(step)) == per_step for step in steps)
    rows = [index for step in steps for index in step][first % per_step :]
    for epoch in range(3):
        assert sorted(rows[epoch * num_prompts : (epoch + 1) * num_prompts]) == list(range(num_prompts))


def test_a_step_depends_on_its_number_alone() -> None:
    forward = PromptOrder(10, 4, seed=3)
    steps = [forward.step(step) for step in range(40)]
    backward = PromptOrder(10, 4, seed=3)
    assert [backward.step(step) for step in reversed(range(40))] == steps[::-1]


def test_seeds_and_epochs_differ_and_no_shuffle_is_file_order() -> None:
    assert PromptOrder(100, 100, seed=1).step(0) != PromptOrder(100, 100, seed=2).step(0)
    assert PromptOrder(100, 100, seed=1).step(0) != PromptOrder(100, 100, seed=1).step(1)
    plain = PromptOrder(5, 2, shuffle=False)
    assert [plain.step(step) for step in range(3)] == [(0, 1), (2, 3), (4, 0)]


def test_the_order_is_the_same_on_every_machine() -> None:
    # Sorting by the raw words of Philox, which NumPy promises to keep; found once on Linux x86-64 with NumPy 2.4.
    import numpy as np

    words = np.random.Philox(key=np.array([5, 0], dtype=np.uint64)).random_raw(6)
    expected = tuple(sorted(range(6), key=lambda index: int(words[index])))
    assert PromptOrder(6, 6, seed=5).step(0) == expected


def test_every_order_is_equally_likely_after_a_shared_step() -> None:
    """5 prompts by 3: step 1 shares epochs 0 and 1. Over many seeds each prompt must come last equally often."""
    counts = [0] * 5
    seeds = 1000
    for seed in range(seeds):
        order = PromptOrder(5, 3, seed=seed)
        # Rows 5 to 9 are epoch 1; its last row is the first of step 3.
        counts[order.step(3)[0]] += 1
    # A binomial count has a standard deviation of sqrt(1000 * 0.2 * 0.8) = 12.6; seeds are fixed, so this never flickers.
    assert max(abs(count - seeds / 5) for count in counts) < 4 * 12.6


@pytest.mark.parametrize(("num_prompts", "per_step"), [(3, 4), (3, 0), (0, 1)])
def test_more_prompts_a_step_than_there_are_is_refused(num_prompts: int, per_step: int) -> None:
    with pytest.raises(DataError, match=f"data.prompts_per_step: got {per_step}, expected 1 to {num_prompts}"):
        PromptOrder(num_prompts, per_step)


def test_steps_count_from_0() -> None:
    with pytest.raises(ValueError, match="steps count from 0"):
        PromptOrder(3, 1).step(-1)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "a", "answer": NaN}', "NaN is not JSON"),
        ('{"prompt": "a", "answer": -Infinity}', "-Infinity is not JSON"),
        ('{"prompt": "a", "prompt": "b"}', "duplicate key 'prompt'"),
        ('{"prompt": "a\\u0000b"}', "'prompt' contains a NUL character at position 1"),
        ('{"prompt": "a\\ud800b"}', "'prompt' contains an unpaired surrogate at position 1"),
        (json.dumps({"prompt": "ab" * 2**17 + "c"}), "'prompt' is 262145 bytes long; the limit is 262144"),
    ],
)
def test_what_no_tokenizer_or_reward_takes_is_refused_with_its_line(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(DataError) as caught:
        read_prompts(write(tmp_path, "bad.jsonl", f'{{"prompt": "good"}}\n{line}\n'))
    assert str(caught.value).startswith(f"{tmp_path}/bad.jsonl:2: ") and says in str(caught.value)
