"""Build the documentation site: `python docs/build.py [FOLDER]`, by default into `site`.

The pages are those of `docs/`, the READMEs of every dist and the reference, which is written from the code. Links
between them become links of the site; links to other files lead to the repository
(`--source`), and without it are plain text. Sphinx turns the pages
into HTML and fails on a broken link. Each page is published as Markdown beside its HTML, and `llms.txt` lists them.
"""

from __future__ import annotations

import argparse
import itertools
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SETTINGS = DOCS / "site"
BESIDES_DOCS = (
    "packages/*/README.md",
    "plugins/*/*/README.md",
    "conformance/**/*.md",
    "benchmarks/**/*.md",
    "CHANGES.md",
    "CONTRIBUTING.md",
)
LISTED = ("packages", "plugins")
"""Folders whose READMEs get a page that lists them."""
GENERATED = "docs/reference"
FENCE = re.compile(r"^(?P<fence>`{3,}).*?^(?P=fence) *$", re.DOTALL | re.MULTILINE)
LINK = re.compile(
    rf"(?P<code>{FENCE.pattern})"
    r"|(?P<image>!?)\[(?P<text>(?:`[^`]*`|[^]`])*)\]\((?P<target>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)"
    r"|(?P<inline>`[^`\n]+`)",
    re.DOTALL | re.MULTILINE,
)
"""A link, or code: what looks like a link in it is none."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page. Its text is Markdown whose links are those of the site."""

    path: str
    """Where its Markdown is on the site."""
    text: str
    contents: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Captions, and below each the pages that navigation shows there, as Sphinx takes them."""

    @property
    def summary(self) -> str:
        """First sentence of its prose, without links."""
        for block in FENCE.sub("", self.text).split("\n\n"):
            if re.match(r"[\w`*\[]", block):
                prose = LINK.sub(lambda link: link["text"] or link[0], " ".join(block.split()))
                return re.split(r"(?<=[.!?])\s", prose)[0].removesuffix(":").replace("**", "")
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "site", help="where to write the site")
    parser.add_argument(
        "--source",
        default="",
        metavar="URL",
        help="beginning of links to files of the repository; without it they are text",
    )
    options = parser.parse_args()
    if options.folder.exists() and any(options.folder.iterdir()) and not (options.folder / "llms.txt").is_file():
        parser.error(f"{options.folder} has files that are not a site: name another folder, or empty it.")
    with tempfile.TemporaryDirectory() as temporary:
        written = Path(temporary) / "reference"
        command = (sys.executable, DOCS / "reference/generate.py", "--into", written)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in committed()}
        sources |= {f"{GENERATED}/{path.name}": path.read_text(encoding="utf-8") for path in written.iterdir()}
        folder = Path(temporary) / "pages"
        pages = write(sources, folder, source=options.source.rstrip("/"))
        shutil.rmtree(options.folder, ignore_errors=True)
        build = ("-b", "html", "-q", "-W", "--keep-going", "-j", "auto", "-c", SETTINGS, "-d", Path(temporary) / "read")
        done = subprocess.run([sys.executable, "-m", "sphinx", *build, folder, options.folder], check=False)
        if done.returncode:
            raise SystemExit(f"Sphinx failed with exit code {done.returncode}; its warnings are above.")
        publish(pages, folder, options.folder)
    print(f"wrote {len(pages)} pages: {options.folder / 'index.html'}")


def committed() -> Iterator[Path]:
    """Sources of pages, without those that `generate.py` may have left in its folder."""
    for path in DOCS.rglob("*.md"):
        if path.parent != ROOT / GENERATED or path.name == "README.md":
            yield path
    for pattern in BESIDES_DOCS:
        yield from ROOT.glob(pattern)


def site_path(source: str) -> str:
    """Path on the site of a page of the repository: that of a README is the name of its folder."""
    return re.sub(r"/README\.md$", ".md", source.removeprefix("docs/"))


def write(sources: dict[str, str], folder: Path, *, source: str) -> list[Page]:
    """Write what Sphinx reads, and return its pages; the first is the start page."""
    index = f"{GENERATED}/README.md"
    sources[index] = re.sub(r"^\| `(\w+\.md)`", r"| [`\1`](\1)", sources[index], flags=re.MULTILINE)
    for name in LISTED:
        sources[f"{name}/README.md"] = listing(name, sources)
    paths = {path: site_path(path) for path in sources} | {"README.md": "index.md"}
    pages = []
    for path, text in sources.items():
        text = linked(text, path, paths, folder=folder, source=source)
        pages.append(Page(path=paths[path], text=text, contents=contents(text, paths[path])))
    for page in pages:
        (folder / page.path).parent.mkdir(parents=True, exist_ok=True)
        trees = [
            "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", *entries, "```", ""])
            for caption, entries in page.contents
        ]
        (folder / page.path).write_text(page.text + "".join(trees), encoding="utf-8")
    return sorted(pages, key=lambda page: (page.path != "index.md", page.path))


def listing(name: str, sources: dict[str, str]) -> str:
    """A page that lists the READMEs of a folder, by the folders between."""
    lines = [
        f"# {name.capitalize()}\n",
        f"Dists in the folder `{name}` of the repository. Each can be installed alone.\n",
    ]
    readmes = sorted(path for path in sources if path.startswith(f"{name}/"))
    for parent, group in itertools.groupby(readmes, key=lambda path: path.split("/")[-3]):
        lines += [f"\n## {parent.capitalize()}\n"] if parent != name else []
        lines += [f"- [{title_of(sources[path])}]({path.removeprefix(f'{name}/')})" for path in group]
    return "\n".join(lines) + "\n"


def contents(text: str, path: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Navigation below a page that lists others: those under each of its headings."""
    if path not in ("index.md", "reference.md", *(f"{name}.md" for name in LISTED)):
        return ()
    result = []
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:] or [text.removeprefix("# ")]:
        links = re.findall(r"^(?:- |\| )\[(.*?)\]\((\S+?)\.md\)", section, re.MULTILINE)
        # Below the start page, pages have the titles of its lists; elsewhere their own.
        entries = (f"{title} </{target}>" if path == "index.md" else f"/{target}" for title, target in links)
        result.append((section.split("\n")[0], tuple(entries)))
    return tuple(result)


def title_of(text: str) -> str:
    return re.findall(r"^# (.*)$", text, re.MULTILINE)[0].replace("`", "")


def linked(text: str, path: str, paths: dict[str, str], *, folder: Path, source: str) -> str:
    """The text of a page with links of the site. Images that it shows are copied to where they are linked."""
    here, folder_on_site = posixpath.dirname(path), posixpath.dirname(paths[path]) or "."

    def link(match: re.Match[str]) -> str:
        target, shown = match["target"], f"{match['image']}[{match['text']}]"
        if not target or "://" in target:
            return match[0]
        full = posixpath.normpath(posixpath.join(here, target))
        place = paths.get(full) or paths.get(f"{full}/README.md")
        if place is None and match["image"]:
            place = site_path(full)
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / full, folder / place)
        if place is None and not source:
            return match["text"]
        url = posixpath.relpath(place, folder_on_site) if place else f"{source}/{full}"
        return f"{shown}({url}{match['anchor'] or ''})"

    return LINK.sub(link, text)


def publish(pages: list[Page], folder: Path, site: Path) -> None:
    """Add to a built site each page as Markdown, with its images, `llms.txt` and `llms-full.txt`."""
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".md":
            (site / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, site / path.relative_to(folder))
    for page in pages:
        (site / page.path).parent.mkdir(parents=True, exist_ok=True)
        (site / page.path).write_text(page.text, encoding="utf-8")
    named = {page.path: page for page in pages}
    start = pages[0]
    lines = [f"# {title_of(start.text)}", "", f"> {' '.join(start.text.split(chr(10) * 2)[1].split())}", ""]
    lines += [
        "Each page is Markdown at its address with `.md` for `.html`. All in one: [llms-full.txt](llms-full.txt).",
        "",
    ]
    order = [start]
    for caption, entries in start.contents:
        lines += [f"## {caption}", ""]
        for entry in entries:
            page = named[re.findall(r"</(.*)>", entry)[0] + ".md"]
            lines.append(f"- [{entry.split(' <')[0]}]({page.path}): {page.summary}")
            order.append(page)
        lines.append("")
    order += [page for page in pages if page not in order]
    (site / "llms.txt").write_text("\n".join(lines), encoding="utf-8")
    full = "\n\n".join(f"<!-- {page.path} -->\n\n{page.text.strip()}" for page in order)
    (site / "llms-full.txt").write_text(full + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
