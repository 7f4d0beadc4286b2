"""Parts of the bridge that run without vLLM-Omni: names, prompts, and which rows an expert has."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from unirl.core.types.sampling import LatentSamplingConfig
from unirl.models.wan.bridges.vllm_omni import ONE_EXPERT, TWO_EXPERTS

SAMPLING = LatentSamplingConfig(max_sequence_length=4)


class Prompts:
    """Stand-in for the pipeline that keeps the prompt that it encodes."""

    seen = ""

    def encode_prompt(self, prompt: str, **_: Any) -> tuple[torch.Tensor, None]:
        self.seen = prompt
        return torch.zeros(1, 4, 2), None


def test_entities_are_decoded_twice_as_in_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ftfy")
    pipeline = Prompts()
    ONE_EXPERT.encode(pipeline, "a &amp;amp; b “c”", SAMPLING)
    assert pipeline.seen == 'a & b "c"'


def test_without_ftfy_a_prompt_that_it_may_change_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ftfy", None)
    pipeline = Prompts()
    ONE_EXPERT.encode(pipeline, "a red ring,\n a &gt; b", SAMPLING)
    assert pipeline.seen == "a red ring,\n a > b"
    with pytest.raises(ValueError, match=r"“c”.*Install ftfy there, or use printable ASCII"):
        ONE_EXPERT.encode(pipeline, "“c”", SAMPLING)


def test_each_row_goes_to_the_expert_of_its_noise_by_the_checkpoints_boundary(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(json.dumps({"boundary_ratio": 0.7}))

    def expert(sign: int) -> Any:
        return lambda hidden_states, timestep, **_: (hidden_states + sign * timestep.view(-1, 1, 1, 1, 1),)

    settings = SimpleNamespace(model=str(tmp_path), dtype=torch.float32)
    pipeline = SimpleNamespace(transformer=expert(1), transformer_2=expert(-1), od_config=settings)
    sigma = torch.tensor([0.2, 0.7, 0.69, 1.0])
    given = {"prompt_embeds": torch.zeros(4, 4, 2)}
    result = TWO_EXPERTS.velocity(pipeline, torch.zeros(4, 1, 1, 1, 1), sigma, given).flatten()
    torch.testing.assert_close(result, torch.tensor([-200.0, 700.0, -690.0, 1000.0]))
    one = ONE_EXPERT.velocity(pipeline, torch.zeros(4, 1, 1, 1, 1), sigma, given).flatten()
    torch.testing.assert_close(one, 1000 * sigma)
