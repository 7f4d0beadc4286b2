"""The page about models that write and draw: its example does what it says, and its claims exist."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from pages import ROOT
from unirl.conformance.claims import all_claims
from unirl.conformance.doubles.tiny_decoder import ASSISTANT, END, USER
from unirl.core.errors import RecipeError
from unirl.core.types.data import MediaRef
from unirl.core.types.inputs import Inputs, Turn
from unirl.core.types.sampling import LatentSamplingConfig, TextSamplingConfig
from unirl.numerics.tokens.batches import pad_batch

PAGE = (ROOT / "docs/how-to/models-that-write-and-draw.md").read_text(encoding="utf-8")
TEXT, IMAGE = TextSamplingConfig(max_new_tokens=4), LatentSamplingConfig(num_inference_steps=2, height=16, width=16)
SAMPLED = (40, 41, END)


@pytest.fixture
def doodle() -> Any:
    """The model of the page."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {"__name__": "doodle"}
    exec(compile(code, "doodle.py", "exec"), names)
    return names["Doodle"](seed=0)


def given(*turns: Turn) -> Inputs:
    return Inputs(ids=("p",), prompts=("hi",), texts=("hi",), media=((),), turns=(turns,) if turns else None)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_turn_is_its_sampled_tokens_with_the_end_that_a_cut_one_lacks(doodle: Any, is_cut: bool) -> None:
    turns = (
        # Tokens that are no text of their own count, and the text does not.
        Turn(stage="plan", text="anything", tokens=SAMPLED[:2] if is_cut else SAMPLED),
        Turn(stage="image", text="Draw."),
    )
    (tokens,) = doodle.encode(given(*turns), sampling=IMAGE)["tokens"]
    assert tokens.tolist() == [USER, *b"hi", END, ASSISTANT, *SAMPLED, USER, *b"Draw.", END]
    (prompt,) = doodle.prompt_tokens(given(*turns), sampling=TEXT)
    assert prompt.tolist() == [*tokens.tolist(), ASSISTANT]
    (first,) = doodle.prompt_tokens(given(), sampling=TEXT)
    assert prompt.tolist()[: len(first)] == first.tolist() and first.tolist() == [USER, *b"hi", END, ASSISTANT]


def test_what_the_format_cannot_have_is_refused(doodle: Any) -> None:
    picture = Turn(stage="image", media=(MediaRef(modality="image", role="source", uri="a.png"),))
    with pytest.raises(RecipeError, match=r"stages\.image: got an image to continue from"):
        doodle.encode(given(picture), sampling=IMAGE)
    with pytest.raises(RecipeError, match=r"sampling\.chat"):
        doodle.prompt_tokens(given(), sampling=TextSamplingConfig(system_prompt="be brief"))


def test_both_tracks_train_the_same_weights_which_no_condition_depends_on(doodle: Any) -> None:
    before = doodle.encode(given(Turn(stage="plan", tokens=SAMPLED)), sampling=IMAGE)
    x, sigma = torch.ones(1, *doodle.latent_shape(IMAGE)), torch.tensor([0.5])
    (prompt,) = doodle.prompt_tokens(given(), sampling=TEXT)
    batch = pad_batch([prompt], [torch.tensor(SAMPLED)], pad_token=doodle.pad_token)
    for output in (doodle.velocity(x, sigma, before).sum(), doodle.score(batch, temperature=1.0)[0].sum()):
        doodle.net.zero_grad()
        output.backward()
        for name in ("enter", "blocks.0.mixed", "blocks.1.down"):
            gradient = doodle.net.get_submodule(name).weight.grad
            assert gradient is not None and bool(gradient.any()), name
    first = doodle.velocity(x, sigma, before)
    with torch.no_grad():
        doodle.net.enter.weight.add_(1.0)
    after = doodle.encode(given(Turn(stage="plan", tokens=SAMPLED)), sampling=IMAGE)
    assert torch.equal(after["tokens"][0], before["tokens"][0])
    assert not torch.equal(doodle.velocity(x, sigma, after), first), "the tokens are embedded by what trains"


def test_the_claims_that_the_page_names_are_claims() -> None:
    known = {each.name for each in all_claims()}
    named = set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+){3,})`", PAGE))
    assert len(named) >= 10 and named <= known, named - known
