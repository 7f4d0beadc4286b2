"""Building the parts of a plan: what was started is closed when a later part cannot be built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from unirl.backends.fsdp2.backend import Fsdp2Backend
from unirl.core.errors import RunFailed
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.engines.trainside.engine import TrainsideEngine
from unirl.loop import build
from unirl.loop.checked_reward import CheckedReward
from writer_and_painter import RECIPE, composed


@pytest.mark.parametrize(
    ("failing", "closed"),
    [
        ("backend.painter", ["backend.writer"]),
        ("reward.light", ["reward.shapes", "backend.writer", "backend.painter"]),
        ("engine.image", ["engine.rewrite", "reward.shapes", "reward.light", "backend.writer", "backend.painter"]),
        (
            "algorithm.rewrite",
            ["engine.rewrite", "engine.image", "reward.shapes", "reward.light", "backend.writer", "backend.painter"],
        ),
    ],
)
@pytest.mark.parametrize("close_fails", [False, True])
def test_parts_are_closed_when_a_later_one_cannot_be_built(
    failing: str, closed: list[str], close_fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "writer.yaml").write_text(RECIPE, encoding="utf-8")
    words = (
        "+backend@backend.painter=fsdp2",
        "+algorithm@algorithm.image=flow-grpo",
        "+reward@reward.light=brightness",
    )
    plan = composed(tmp_path / "writer.yaml", *words)
    real, keys, calls = build.build_part, dict[int, str](), list[str]()

    def built(choice: Any, catalog: Catalog, **context: Any) -> Any:
        if choice.key == failing:
            raise RunFailed(f"{failing}: no memory left")
        part = real(choice, catalog, **context)
        keys[id(part)] = choice.key
        return part

    def noted(part: Any) -> None:
        calls.append(part._key if isinstance(part, CheckedReward) else keys[id(part)])
        closing[type(part)](part)
        if close_fails:
            raise RuntimeError("it hangs")

    monkeypatch.setattr(build, "build_part", built)
    closing: dict[type, Any] = {cls: cls.close for cls in (TrainsideEngine, Fsdp2Backend, CheckedReward)}
    for cls in closing:
        monkeypatch.setattr(cls, "close", noted)
    with pytest.raises(RunFailed, match=rf"^{failing}: no memory left") as raised:
        build.build_parts(plan, catalog=Catalog.discover())
    assert calls == closed
    notes = [note for note in getattr(raised.value, "__notes__", []) if "failed in phase 'close'" in note]
    assert len(notes) == (len(closed) if close_fails else 0)


def test_every_build_sets_the_precision_of_products() -> None:
    catalog = Catalog.discover()
    before = torch.get_float32_matmul_precision()
    try:
        for words, expected in ((["run.matmul_precision=high"], "high"), ([], "highest")):
            plan = compose("quickstart", words, catalog=catalog)
            with build.built_parts(plan, catalog=catalog):
                assert torch.get_float32_matmul_precision() == expected
    finally:
        torch.set_float32_matmul_precision(before)
