"""Another project's dist `unirl` beside ours, in a folder of installed files: noticed, with the way out that works."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import pytest
import unirl.core

COMMAND = (
    "import click\nfrom unirl.part.greeting import TEXT\n\n@click.command()\ndef command():\n    click.echo(TEXT)\n"
)
OURS = {"unirl/part/hello.py": COMMAND, "unirl/part/greeting.py": "TEXT = 'hello'\n"}
THEIRS = {"unirl/__init__.py": "", "unirl/part/greeting.py": "GREETING = 1\n", "unirl/other.py": "import torch\n"}
REINSTALL = "pip install --force-reinstall --no-deps unirl-part==1.0"


class Site:
    """A folder of installed dists."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ours = folder / "site", folder / "others"
        self.ours.mkdir()
        for item in Path(sysconfig.get_path("purelib")).iterdir():
            # Without editable installs of this workspace.
            if "unirl" not in item.name and item.suffix != ".pth":
                (self.ours / item.name).symlink_to(item)
        core = Path(unirl.core.__file__).parent
        sources = [*core.rglob("*.py"), *core.glob("*.toml")]
        files = {f"unirl/core/{file.relative_to(core)}": file.read_text() for file in sources}
        self.install("unirl-core", files, "recipes = unirl.core.cli.recipes:command\n")

    def install(self, name: str, files: Mapping[str, str], commands: str = "", *, version: str = "1.0") -> None:
        lines: list[str] = []
        for path, text in files.items():
            file = self.folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            if name == "unirl":  # hashes are optional
                lines.append(f"{path},,\n")
                continue
            digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).decode().rstrip("=")
            lines.append(f"{path},sha256={digest},{file.stat().st_size}\n")
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[unirl.commands]\n{commands}" if commands else "")
        (info / "RECORD").write_text(f"{''.join(lines)}{info.name}/RECORD,,\n")

    def uninstall(self, name: str) -> None:
        """As pip does: every file of its record."""
        (info,) = self.folder.glob(f"{name.replace('-', '_')}-*.dist-info")
        for line in (info / "RECORD").read_text().splitlines():
            (self.folder / line.split(",")[0]).unlink()
        shutil.rmtree(info)

    def run(self, *words: str) -> tuple[int, str]:
        """Exit code and output of `unirl WORDS`."""
        code = (
            f"import sys; sys.path[:0] = {[str(self.folder), str(self.ours)]}; from unirl.core.cli import main; main()"
        )
        done = subprocess.run(
            [sys.executable, "-S", "-B", "-c", code, *words],
            capture_output=True,
            text=True,
            cwd=self.folder,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def site(tmp_path: Path) -> Site:
    result = Site(tmp_path)
    result.install("unirl-part", OURS, "hello = unirl.part.hello:command\n")
    assert result.run("hello") == (0, "hello\n")
    return result


def test_every_command_notices_another_project_of_the_name_and_its_advice_works(site: Site) -> None:
    site.install("unirl", THEIRS, version="0.3")
    for words in (("hello",), ("recipes", "--json"), ("train", "quickstart")):
        code, said = site.run(*words)
        assert code == 3
        assert f"error: {site.folder / 'unirl/__init__.py'} makes 'unirl' a plain module" in said
        assert "It belongs to unirl 0.3: use a fresh environment without it. Or uninstall it, and reinstall" in said
        assert f"`pip uninstall -y unirl && {REINSTALL}`" in said
    site.uninstall("unirl")
    code, said = site.run("hello")
    assert code == 3 and "importing 'unirl.part.hello' needs 'unirl.part.greeting', which is" in said
    assert "by the records of unirl-part (unirl/part/greeting.py). Reinstall:" in said and f"`{REINSTALL}`" in said
    site.install("unirl-part", OURS, "hello = unirl.part.hello:command\n")
    assert site.run("hello") == (0, "hello\n")


def test_a_dist_that_shares_no_file_is_only_uninstalled(site: Site) -> None:
    site.install("unirl", {"unirl/models/__init__.py": ""}, version="0.3")
    code, said = site.run("hello")
    assert code == 3
    assert "makes 'unirl.models' a plain module" in said and "uninstall it: `pip uninstall unirl`." in said
    site.uninstall("unirl")
    assert site.run("hello") == (0, "hello\n")
