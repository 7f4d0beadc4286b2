"""The scripts that make the checkpoints, as modules."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
SCRIPTS = (
    "packages/unirl-quickstart/scripts/checkpoint_files.py",
    "packages/unirl-quickstart/scripts/make_checkpoint.py",
    "packages/unirl-quickstart/scripts/make_edit_checkpoint.py",
    "packages/unirl-quickstart/scripts/make_i2v_checkpoint.py",
    "packages/unirl-quickstart/scripts/make_image_tokens_checkpoint.py",
    "packages/unirl-quickstart/scripts/make_revise_checkpoint.py",
    "packages/unirl-quickstart/scripts/make_text_checkpoint.py",
    "packages/unirl-quickstart/scripts/make_tools_checkpoint.py",
    "packages/unirl-quickstart/scripts/make_unified_checkpoint.py",
    "packages/unirl-quickstart/scripts/make_video_checkpoint.py",
    "packages/unirl-quickstart/scripts/make_vl_checkpoint.py",
    "packages/unirl-quickstart/scripts/make_writer_checkpoint.py",
    "packages/unirl-quickstart/scripts/shapes_vq.py",
    "packages/unirl-quickstart/scripts/tiny_qwen3.py",
    "packages/unirl-quickstart/scripts/tiny_wan.py",
    "packages/unirl-quickstart/scripts/training.py",
    "packages/unirl-quickstart/scripts/video_vae.py",
)
"""Paths from the root, so that a change of one runs the tests again."""


@pytest.fixture
def check_ordinary() -> Callable[[Any, Path], None]:
    """`check_ordinary(pipeline, folder)` loads a shipped checkpoint with diffusers' class, which says nothing about it:
    all its modules are in fp32, and its files have 2.5 MB at most."""

    def check(pipeline: Any, folder: Path) -> None:
        reply: list[str] = []

        class Listener(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                reply.append(record.getMessage())

        listener = Listener(level=logging.WARNING)
        loggers = [logging.getLogger(name) for name in ("diffusers", "transformers", "huggingface_hub")]
        for logger in loggers:
            logger.addHandler(listener)
        try:
            loaded = pipeline.from_pretrained(folder, local_files_only=True)
        finally:
            for logger in loggers:
                logger.removeHandler(listener)
        assert reply == []
        parts = [part for part in loaded.components.values() if isinstance(part, torch.nn.Module)]
        assert {parameter.dtype for part in parts for parameter in part.parameters()} == {torch.float32}
        assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= 2_500_000

    return check


@pytest.fixture(scope="session")
def load_script() -> Iterator[Callable[[str], ModuleType]]:
    """`load_script(name)` imports a script of this package; scripts import their neighbours by name."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in {(ROOT / script).parent for script in SCRIPTS}:
            patch.syspath_prepend(str(folder))
        yield import_module
    for script in SCRIPTS:
        sys.modules.pop(Path(script).stem, None)


@pytest.fixture(scope="session")
def run_script(load_script: Callable[[str], ModuleType]) -> Callable[..., dict[str, bytes]]:
    """`run_script(name, folder, *arguments)` runs a script's `main` and gives the files it wrote, by relative path."""

    def run(name: str, folder: Path, *arguments: str) -> dict[str, bytes]:
        import torch

        threads = torch.get_num_threads()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [f"{name}.py", f"--out={folder}", *arguments])
            load_script(name).main()
        torch.set_num_threads(threads)
        return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}

    return run


@pytest.fixture
def rewards_of(tmp_path: Path) -> Callable[..., list[float]]:
    """`rewards_of(recipe, name, *words)` trains for 20 steps and gives the mean of reward `name` on held-out prompts
    before and after."""

    def run(recipe: str, name: str, *words: str) -> list[float]:
        from unirl.core.plugins.catalog import Catalog
        from unirl.core.recipe.compose import compose
        from unirl.core.types.event import Event
        from unirl.loop.run import train

        catalog, result = Catalog.discover(), list[float]()
        settings = [f"run.dir={tmp_path}", "run.max_steps=20", "eval.every=20", "run.save_every=0", "~tracker.report"]
        overrides = [*settings, *words]

        def note(event: Event) -> None:
            if event.kind == "evaluated":
                result.append(event.data["metrics"][f"reward/{name}"])

        plan = compose(recipe, overrides, catalog=catalog)
        train(plan, catalog=catalog, overrides=overrides, listeners=[note])
        return result

    return run
