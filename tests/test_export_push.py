"""`unirl export --push`: what it sends to the Hugging Face Hub, here a server that speaks as much of its interface."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from huggingface_hub import HfApi, constants
from unirl.core.cli import main
from unirl.core.errors import RecipeError, UniRLError
from unirl.tools.export.push import check_push, push

# The library's own, of its client for HTTP.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")

TOKEN = "hf_of-this-test"
REPO = "acme/shapes"


@dataclass
class Hub:
    """What the server holds."""

    address: str = ""
    private: dict[str, bool] = field(default_factory=lambda: dict[str, bool]())
    files: dict[str, bytes] = field(default_factory=lambda: dict[str, bytes]())
    blobs: dict[str, bytes] = field(default_factory=lambda: dict[str, bytes]())
    messages: list[str] = field(default_factory=lambda: list[str]())
    asked: list[str] = field(default_factory=lambda: list[str]())
    refuses: str = ""
    """Paths with this in them are refused."""

    @property
    def api(self) -> HfApi:
        return HfApi(endpoint=self.address, token=TOKEN)

    def answer(self, method: str, path: str, body: bytes, token: str) -> tuple[int, Any]:
        self.asked.append(f"{method} {path}")
        if self.refuses and self.refuses in path:
            return 403, {"error": "the hub is full"}
        if method == "PUT":
            self.blobs[path.rpartition("/")[2]] = body
            return 200, {}
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/whoami-v2":
            return 200, {"type": "user", "name": "acme", "orgs": []}
        given: Any = {} if path.endswith("/commit/main") or not body else json.loads(body)
        if path == "/api/repos/create":
            name = "/".join(filter(None, [given.get("organization"), given["name"]]))
            name = name if "/" in name else f"acme/{name}"
            is_new = name not in self.private
            self.private.setdefault(name, given.get("private", given.get("visibility") == "private"))
            return (200 if is_new else 409), {"url": f"{self.address}/{name}", "name": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == f"/api/models/{REPO}/preupload/main":
            # As the hub decides: weights are large files.
            modes = {True: "lfs", False: "regular"}
            files = [(file["path"], modes[file["path"].endswith(".safetensors")]) for file in given["files"]]
            return 200, {"files": [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in files]}
        if path == f"/{REPO}.git/info/lfs/objects/batch":
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.address}/blobs/{one['oid']}"}}}
                for one in given["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        if path == f"/api/models/{REPO}/commit/main":
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    self.messages.append(value["summary"])
                elif line["key"] == "file":
                    self.files[value["path"]] = base64.b64decode(value["content"])
                else:
                    self.files[value["path"]] = self.blobs[value["oid"]]
            return 200, {
                "success": True,
                "commitOid": "0" * 40,
                "commitUrl": f"{self.address}/{REPO}/commit/{'0' * 40}",
            }
        return 404, {"error": f"this hub does not know {method} {path}"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    held = Hub()

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = urlsplit(self.path).path
            status, answer = held.answer(self.command, path, body, self.headers.get("Authorization", ""))
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PUT = respond

        def log_message(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        held.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield held
        server.shutdown()
        thread.join()


@pytest.fixture
def export(tmp_path: Path) -> Path:
    folder = tmp_path / "shapes"
    (folder / "samples").mkdir(parents=True)
    (folder / "README.md").write_text("# Shapes\n")
    (folder / "samples" / "0.png").write_bytes(bytes(range(256)))
    (folder / "pytorch_lora_weights.safetensors").write_bytes(b"weights" * 1000)
    return folder


@pytest.mark.parametrize("public", [False, True])
def test_every_file_arrives_in_one_commit_of_a_repository_that_is_private_unless_asked(
    hub: Hub, export: Path, public: bool
) -> None:
    check_push(REPO, api=hub.api)
    address = push(export, REPO, public=public, step=40, api=hub.api)
    assert hub.private == {REPO: not public}
    assert hub.files == {
        path.relative_to(export).as_posix(): path.read_bytes() for path in export.rglob("*") if path.is_file()
    }
    assert hub.messages == ["Step 40"] and address == f"{hub.address}/{REPO}/commit/{'0' * 40}"
    assert len(hub.blobs) == 1, "weights go as a large file"


def test_a_second_push_is_a_further_commit_and_leaves_a_public_repository_public(hub: Hub, export: Path) -> None:
    push(export, REPO, public=True, step=40, api=hub.api)
    (export / "README.md").write_text("# Shapes, trained longer\n")
    push(export, REPO, public=False, step=80, api=hub.api)
    assert hub.private == {REPO: False} and hub.messages == ["Step 40", "Step 80"]
    assert hub.files["README.md"] == b"# Shapes, trained longer\n"


@pytest.mark.parametrize("at", ["/commit/", "/blobs/", "/repos/create"])
def test_an_upload_that_fails_says_where_the_export_is_and_how_to_try_again(hub: Hub, export: Path, at: str) -> None:
    hub.refuses = at
    with pytest.raises(UniRLError, match=f"is complete in {export}; `hf upload {REPO} {export}` tries again") as raised:
        push(export, REPO, public=False, step=40, api=hub.api)
    assert hub.files == {} and ("the hub is full" in str(raised.value) or "pytorch_lora_weights" in str(raised.value))


@pytest.mark.parametrize(
    ("repo", "says"),
    [
        ("shapes", "got 'shapes', expected OWNER/NAME"),
        ("a/b/c", "got 'a/b/c', expected OWNER/NAME"),
        ("acme/-shapes", "'acme/-shapes'"),
        ("acme/a b", "'acme/a b'"),
    ],
)
def test_a_name_that_is_none_of_the_hub_is_refused_before_anything_is_asked(hub: Hub, repo: str, says: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(says)):
        check_push(repo, api=hub.api)
    assert hub.asked == []


def test_a_wrong_token_none_and_a_hub_that_is_away_are_told_apart(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="--push: the hub does not answer as it should: Invalid user token"):
        check_push(REPO, api=HfApi(endpoint=hub.address, token="hf_wrong"))
    with pytest.raises(RecipeError, match="log in with `hf auth login`, or set HF_TOKEN"):
        check_push(REPO, api=HfApi(endpoint=hub.address, token=None))
    with pytest.raises(RecipeError, match="--push: the hub does not answer as it should"):
        check_push(REPO, api=HfApi(endpoint="http://127.0.0.1:9", token=TOKEN))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RecipeError, match="--push: HF_HUB_OFFLINE is set"):
        check_push(REPO, api=hub.api)


def test_the_command_checks_the_hub_before_it_looks_at_the_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["export", str(tmp_path / "none"), "--to", str(tmp_path / "out")]
    for options, says in ((["--push", "shapes"], "expected OWNER/NAME"), (["--public"], "give --push OWNER/NAME")):
        with pytest.raises(SystemExit) as ended:
            main([*words, *options])
        assert ended.value.code == 2 and says in capsys.readouterr().err
