"""The scripts that make the checkpoints, as modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
SCRIPTS = (
    "packages/unirl-quickstart/scripts/checkpoint_files.py",
    "packages/unirl-quickstart/scripts/make_checkpoint.py",
    "packages/unirl-quickstart/scripts/make_edit_checkpoint.py",
    "packages/unirl-quickstart/scripts/make_text_checkpoint.py",
    "packages/unirl-quickstart/scripts/make_video_checkpoint.py",
    "packages/unirl-quickstart/scripts/make_vl_checkpoint.py",
    "packages/unirl-quickstart/scripts/make_writer_checkpoint.py",
    "packages/unirl-quickstart/scripts/tiny_qwen3.py",
    "packages/unirl-quickstart/scripts/training.py",
    "packages/unirl-quickstart/scripts/video_vae.py",
)
"""From the root, so that a change of one runs the tests again."""


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
