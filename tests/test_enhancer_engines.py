"""Recipes of a writer that thinks before it writes a prompt for a frozen painter, on miniatures of both and on the real
engines: those of vLLM, and those of SGLang."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from external_engines.environments import make
from miniature_recipes import miniature_words
from unirl.conformance.part_factory import PartFactory
from unirl.core.errors import RunFailed
from unirl.core.plugins.catalog import Catalog
from unirl.core.recipe.compose import compose
from unirl.core.types.request import Request
from unirl.core.types.track import Track
from unirl.engine_host.external import ExternalEngine
from unirl.engine_host.latent_engine import ExternalLatentEngine
from unirl.engine_host.text_engine import ExternalTextEngine
from unirl.loop.checkpoints import Checkpoints
from writer_and_painter import numbers

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[1]
MARKER = "e"
"""A letter that a miniature writes in some texts of 64 bytes and not in others."""
SMALL = (
    "run.save_every=1",
    "run.keep=0",
    f"stages.image.marker={MARKER}",
    "sampling.rewrite.max_new_tokens=64",
    "engine.rewrite.kv_cache_mb=64",
    "engine.rewrite.max_num_seqs=16",
    "engine.rewrite.max_model_len=512",
    # Rounding of another batch then flips no token.
    "engine.rewrite.dtype=float32",
)


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PartFactory]:
    factory = PartFactory(Catalog.discover(), tmp_path_factory.mktemp("factory"))
    yield factory
    factory.close()


@dataclass
class Noted:
    """What the engines gave and got in each rollout."""

    texts: dict[int, tuple[str, ...]] = field(default_factory=lambda: dict[int, tuple[str, ...]]())
    """Texts of the writer."""
    painted: dict[int, dict[str, str]] = field(default_factory=lambda: dict[int, dict[str, str]]())
    """Id of a text -> what the painter drew for it."""
    strike: dict[type[ExternalEngine], int] = field(default_factory=lambda: dict[type[ExternalEngine], int]())
    """Engine -> rollout in which its process is killed."""


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """Notes of all rollouts; evaluations are off."""
    result = Noted()
    write, paint = ExternalTextEngine.generate, ExternalLatentEngine.generate

    def strike(engine: ExternalEngine, request: Request) -> None:
        if result.strike.get(type(engine)) == request.rollout:
            os.kill(engine._process.pid, signal.SIGKILL)

    def written(engine: ExternalTextEngine, request: Request) -> Track:
        strike(engine, request)
        track = write(engine, request)
        assert track.media is not None
        result.texts[request.rollout] = track.media.texts
        return track

    def drawn(engine: ExternalLatentEngine, request: Request) -> Track:
        strike(engine, request)
        result.painted[request.rollout] = dict(zip(request.inputs.ids, request.inputs.texts, strict=True))
        return paint(engine, request)

    monkeypatch.setattr(ExternalTextEngine, "generate", written)
    monkeypatch.setattr(ExternalLatentEngine, "generate", drawn)
    return result


def words(name: str, factory: PartFactory, folder: Path, *more: str) -> list[str]:
    """A recipe on its miniatures and its own engines."""
    (prompts := folder / "prompts").mkdir()
    own = [word for word in miniature_words(name, factory, prompts, directory=ROOT) if not word.startswith("engine@")]
    return [*own, *SMALL, f"run.dir={folder / 'run'}", *more]


def check_fallbacks(noted: Noted, steps: dict[int, dict[str, float]]) -> None:
    """Texts without the marker, or with nothing behind it, are counted; the painter drew the prompt for them, and what
    follows the last marker for the others."""
    lost: list[bool] = []
    for step, metrics in steps.items():
        behind = [text.split(MARKER)[-1].strip() if MARKER in text else "" for text in noted.texts[step - 1]]
        assert metrics["image/fallbacks"] == behind.count("") / len(behind)
        for text, (name, drawn) in zip(behind, noted.painted[step - 1].items(), strict=True):
            # r<rollout>/<prompt id>/<number>, of rows named after the prompts file.
            number = int(name.split("/")[1].rpartition(":")[2])
            assert drawn == (text or f"prompt {number}")
        lost += [not text for text in behind]
    assert any(lost) and not all(lost)


def check_curves(steps: dict[int, dict[str, float]], *, upto: int) -> None:
    assert list(steps) == list(range(1, upto + 1))
    for metrics in steps.values():
        assert metrics["rewrite/updates"] == 2 and math.isfinite(metrics["rewrite/loss"])
        # Mean credit; both are means of the same fp32 numbers of order 1.
        assert metrics["rewrite/reward_mean"] == pytest.approx(metrics["image/reward_mean"], abs=1e-6)


def test_a_killed_engine_of_either_stage_ends_the_run_which_resumes_with_the_same_texts(
    factory: PartFactory, tmp_path: Path, noted: Noted
) -> None:
    """The writer's engine is killed in the second rollout, the painter's in the third."""
    make("vllm")
    make("vllm-omni")
    name = "enhancer/qwen3-sd3"
    plan = compose(name, words(name, factory, tmp_path, "run.max_steps=3"), catalog=factory.catalog, directory=ROOT)
    noted.strike = {ExternalTextEngine: 1}
    with pytest.raises(RunFailed, match=r"engine 'vllm'.*(died|ended|is not running)"):
        numbers(plan)
    assert Checkpoints(tmp_path / "run" / "checkpoints").load().step == 1
    noted.strike = {ExternalLatentEngine: 2}
    with pytest.raises(RunFailed, match=r"engine 'vllm-omni'.*(died|ended|is not running)"):
        numbers(plan, resume=tmp_path / "run")
    assert Checkpoints(tmp_path / "run" / "checkpoints").load().step == 2
    noted.strike = {}
    numbers(plan, resume=tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    steps = {event["step"]: event["metrics"] for event in events if event["kind"] == "step"}
    check_curves(steps, upto=3)
    check_fallbacks(noted, steps)

    # Never killed, with the painter in this process.
    texts, noted.texts = noted.texts, {}
    (whole := tmp_path / "whole").mkdir()
    more = ("run.max_steps=3", "engine@engine.image=trainside")
    expected = numbers(compose(name, words(name, factory, whole, *more), catalog=factory.catalog, directory=ROOT))
    assert texts == noted.texts
    for step, metrics in expected.items():
        # Kilobytes of a JPEG, which pixels of 8 bits decide: those of the painter's engine may be a level off.
        assert steps[step]["image/reward_mean"] == pytest.approx(metrics["image/reward_mean"], rel=1e-2)


def test_another_painter_takes_two_steps_on_engines_of_sglang(
    factory: PartFactory, tmp_path: Path, noted: Noted
) -> None:
    make("sglang-llm")
    make("sglang")
    name = "enhancer/qwen3-qwen-image"
    engines = ("engine@engine.rewrite=sglang-llm", "engine@engine.image=sglang")
    more = ("run.max_steps=2", *engines)
    plan = compose(name, words(name, factory, tmp_path, *more), catalog=factory.catalog, directory=ROOT)
    steps = numbers(plan)
    check_curves(steps, upto=2)
    check_fallbacks(noted, steps)
