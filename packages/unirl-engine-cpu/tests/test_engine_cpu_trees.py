"""The source trees build with uv alone, and the installed packages work, in separate interpreters."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from unirl import engine_cpu

FOLDER = Path(engine_cpu.__file__).parent
TREES = sorted(path.parent.name for path in FOLDER.glob("*/pyproject.toml"))
TORCHVISION = {
    "torchvision/__init__.py": "from . import extension\nfrom . import _meta_registrations\n",
    "torchvision/extension.py": "def _has_ops():\n    return {has_ops}\n",
    "torchvision/_meta_registrations.py": (
        "import torch\n"
        "for name in ('nms', 'qnms'):\n"
        "    torch.library.register_fake(f'torchvision::{name}')(lambda *_: None)\n"
    ),
}
"""The order of torchvision's own imports: the attempt to load its compiled half, then what needs its operators."""


@pytest.mark.parametrize("tree", TREES)
def test_a_tree_builds_without_an_index(tree: str, tmp_path: Path) -> None:
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("not run: there is no uv on the path")
    copy = shutil.copytree(FOLDER / tree, tmp_path / tree)
    subprocess.run([uv, "build", "--offline", "--quiet", "--wheel", "--out-dir", tmp_path, copy], check=True)
    (made,) = tmp_path.glob("*.whl")
    inside = zipfile.ZipFile(made).namelist()
    for file in (FOLDER / tree / "src").rglob("*.py"):
        assert str(file.relative_to(FOLDER / tree / "src")) in inside
    if tree == "torchvision-schemas":
        assert any(name.endswith(".data/purelib/unirl-torchvision-schemas.pth") for name in inside)


@pytest.mark.parametrize(
    ("has_ops", "watches", "ends_well"), [(False, False, False), (False, True, True), (True, True, False)]
)
def test_operators_are_declared_where_the_compiled_half_is_missing_and_nowhere_else(
    has_ops: bool, watches: bool, ends_well: bool, tmp_path: Path
) -> None:
    """Without a compiled half that declares them, the last case shows that nothing else did."""
    for name, text in TORCHVISION.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text.replace("{has_ops}", str(has_ops)), encoding="utf-8")
    done = run(watches, "import torchvision", tmp_path)
    assert (done.returncode == 0) is ends_well
    assert ends_well or "operator torchvision::nms does not exist" in done.stderr


def test_watching_twice_is_watching_once_and_imports_nothing_heavy(tmp_path: Path) -> None:
    line = "import sys, unirl_torchvision_schemas as t; n = len(sys.meta_path); t.watch(); print(len(sys.meta_path) - n, 'torch' in sys.modules)"
    assert run(True, line, tmp_path).stdout == "0 False\n"


def run(watches: bool, line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    source = FOLDER / "torchvision-schemas"
    start = (source / "purelib" / "unirl-torchvision-schemas.pth").read_text() if watches else ""
    code = f"import sys; sys.path[:0] = [{str(source / 'src')!r}, {str(folder)!r}]\n{start}\n{line}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
