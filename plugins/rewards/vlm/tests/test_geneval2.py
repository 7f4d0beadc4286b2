"""GenEval 2 with known answers from a scripted endpoint, and against plain transformers on random weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from unirl.core.errors import RewardFailed
from unirl.core.roles import Scores
from unirl.rewards.vlm.config import Geneval2Config
from unirl.rewards.vlm.geneval2 import build
from unirl.rewards.vlm.tiny import write
from vlm_chat_server import Reply, images_of, serving, text_of
from vlm_samples import images, samples

BICYCLES = {
    "vqa_list": [
        ["How many bicycles are in the image?", "four"],
        ["Are the bicycles white?", "Yes"],
        ["Are the bicycles in front of the cows?", "Yes"],
        ["Are there any cows in the image?", "Yes"],
    ],
    "skills": ["count", "attribute", "position", "object"],
}
ANSWERS = {
    "How many": {"4": 0.3, "four": 0.2, " Four": 0.1, "3": 0.25, "fourteen": 0.15},
    "white": {"Yes": 0.7, " yes": 0.1, "No": 0.2},
    "in front": {"No": 0.6, "Yes": 0.4},
    "any cows": {"Yes": 0.9, "Yep": 0.1},
}
"""Part of a question -> probability of each first token."""


def scripted(_: int, body: dict[str, Any]) -> Reply:
    (shares,) = (shares for part, shares in ANSWERS.items() if part in text_of(body))
    return Reply(text="", finish_reason="length", tokens={token: math.log(share) for token, share in shares.items()})


def scored(metadata: dict[str, Any], **settings: Any) -> tuple[Scores, list[dict[str, Any]]]:
    with serving(scripted) as chat:
        reward = build(Geneval2Config(base_url=chat.url, **settings), device="cpu")
        result = reward.score(samples(["p"], images(1), metadata=[metadata]))
        reward.close()
    return result, chat.requests


def test_soft_tifa_is_the_mean_probability_of_the_expected_answers() -> None:
    scores, requests = scored(BICYCLES)
    # All spellings of four, and of yes, together: 0.3 + 0.2 + 0.1 and so on.
    shares = {"count": 0.6, "attribute": 0.8, "position": 0.4, "object": 0.9}
    expected = {
        "geometric": math.prod(shares.values()) ** (1 / 4),
        "arithmetic": sum(shares.values()) / 4,
        "strict": 0.0,
        "verb": 1.0,
        **shares,
    }
    assert {name: part.item() for name, part in scores.parts.items()} == pytest.approx(expected, abs=1e-6)
    assert scores.values.item() == pytest.approx(expected["geometric"], abs=1e-6)
    questions = sorted(text_of(body) for body in requests)
    assert questions == sorted(f"{question} Answer in one word." for question, _ in BICYCLES["vqa_list"])
    fields = {key: requests[0][key] for key in ("logprobs", "top_logprobs", "max_tokens", "temperature")}
    assert fields == {"logprobs": True, "top_logprobs": 20, "max_tokens": 1, "temperature": 0}
    assert len(images_of(requests[0])) == 1


def test_strict_is_1_where_every_most_probable_answer_is_the_expected_one() -> None:
    rows = [0, 1, 3]
    right = {key: [values[row] for row in rows] for key, values in BICYCLES.items()}
    assert scored(right, score="strict")[0].values.item() == 1.0
    assert scored(BICYCLES, score="strict")[0].values.item() == 0.0
    assert scored(BICYCLES, score="arithmetic")[0].values.item() == pytest.approx(0.675, abs=1e-6)


def test_an_answer_that_is_never_given_makes_the_geometric_mean_0() -> None:
    scores, _ = scored({"vqa_list": [["Are the bicycles white?", "green"], ["Are there any cows?", "Yes"]]})
    assert scores.values.item() == 0.0
    assert scores.parts["arithmetic"].item() == pytest.approx(0.45, abs=1e-6)


@pytest.mark.parametrize("tokens", [None, {}], ids=["none", "empty"])
def test_an_endpoint_without_log_probs_raises(tokens: dict[str, float] | None) -> None:
    with serving(lambda *_: Reply(text="Yes", tokens=tokens)) as chat:
        reward = build(Geneval2Config(base_url=chat.url), device="cpu")
        with pytest.raises(RewardFailed, match=r"without choices\[0\]\.logprobs\.content\[0\]\.top_logprobs"):
            reward.score(samples(["p"], images(1), metadata=[BICYCLES]))
        reward.close()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "vqa_list: got None, expected a list of one pair"),
        ({"vqa_list": []}, "vqa_list: got []"),
        ({"vqa_list": [["Is it red?"]]}, "vqa_list[0]: got ['Is it red?'], expected a pair"),
        ({"vqa_list": [["Is it red?", True]]}, "vqa_list[0]: got ['Is it red?', True], expected a pair"),
        ({"vqa_list": [["What is it?", "a dog"]]}, "vqa_list[0][1]: got 'a dog', expected one word"),
        ({"vqa_list": [["Is it red?", "Yes"]], "skills": []}, "skills: got [], expected a list with one entry for"),
        ({"vqa_list": [["Is it red?", "Yes"]], "skills": ["atribute"]}, "skills[0]: got 'atribute', expected one of"),
    ],
)
def test_metadata_of_another_form_are_refused_with_sample_and_path(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardFailed) as caught:
        scored(metadata)
    assert str(caught.value).startswith("reward.geneval2: metadata of sample 's0' (prompt 'p'): ")
    assert message in str(caught.value)


def test_in_process_the_first_tokens_of_all_spellings_count_once(tmp_path: Path) -> None:
    write(tmp_path, seed=0)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path)
    processor: Any = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    pixels = images(1)
    pil = Image.fromarray((pixels[0] * 255).round().byte().permute(1, 2, 0).numpy())
    seen = processor(images=[pil], return_tensors="pt")
    pads = "<|image_pad|>" * (int(seen["image_grid_thw"].prod()) // 4)

    def share(question: str, letters: str) -> float:
        whole = (
            f"<|im_start|>user\n<|vision_start|>{pads}<|vision_end|>{question} Answer in one word.<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        tokens = tokenizer(whole, return_tensors="pt")
        types = (tokens["input_ids"] == tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
        with torch.no_grad():
            logits = model(**tokens, **seen, mm_token_type_ids=types).logits[0, -1].double()
        # A token is a byte here, so that spellings after a space share theirs.
        return float(logits.softmax(-1)[[tokenizer.convert_tokens_to_ids(letter) for letter in letters]].sum())

    reward = build(Geneval2Config(model=str(tmp_path), dtype="float32", batch_size=2), device="cpu")
    metadata = {"vqa_list": BICYCLES["vqa_list"][:2], "skills": BICYCLES["skills"][:2]}
    scores = reward.score(samples(["p"], pixels, metadata=[metadata]))
    expected = [share(BICYCLES["vqa_list"][0][0], "fF4Ġ"), share(BICYCLES["vqa_list"][1][0], "yYĠ")]
    result = [scores.parts["count"].item(), scores.parts["attribute"].item()]
    # Logits of size 1 differ by about 1e-6 between batches of one and two, and so do probabilities, in proportion.
    assert result == pytest.approx(expected, rel=2e-5)
    assert scores.values.item() == pytest.approx(math.sqrt(math.prod(expected)), rel=2e-5)
