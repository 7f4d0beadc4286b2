"""The server of `unirl view`: what it answers, to whom, and what it does not hand out."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from interruptible import interruptible
from pages import ROOT
from unirl.core.cli import main
from unirl.trackers.report.view.library import Library
from unirl.trackers.report.view.server import PAGE, ViewServer, start_server
from view_runs import END, STAGES, start, step, with_samples, write

PAGES = (ROOT / "docs/how-to/view-runs.md", ROOT / "plugins/trackers/report/README.md")
NAME = "sweep/a <b> 'c' ü"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of two stages with samples, in a folder of runs."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    events = [start(name="<script>alert(1)</script>", stages=STAGES), step(1, loss=0.5), END]
    return with_samples(write(tmp_path / "runs" / NAME, *events))


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[ViewServer]:
    with start_server(Library([tmp_path / "runs"]), host="127.0.0.1", port=0) as result:
        thread = threading.Thread(target=result.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield result
        result.shutdown()
        thread.join()


class Answer:
    def __init__(self, server: ViewServer, path: str, *, method: str = "GET", **headers: str) -> None:
        address = urlsplit(server.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        self.status, self.headers, self.content = response.status, response.headers, response.read()
        connection.close()

    @property
    def data(self) -> Any:
        assert self.status == 200 and self.headers["Content-Type"] == "application/json", (self.status, self.content)
        return json.loads(self.content)


AT = f"/api/runs/{quote(NAME, safe='')}"


def test_the_api_has_the_numbers_of_the_run(server: ViewServer) -> None:
    answer = Answer(server, "/api/runs").data
    assert list(answer["runs"]) == [NAME] and not answer["is_more"]
    assert answer["runs"][NAME]["state"] == "done"
    assert Answer(server, f"{AT}/curves").data[0] == {"group": "train", "name": "loss", "steps": [1], "values": [0.5]}
    assert Answer(server, f"{AT}/details").data["recipe"]["model.use"] == "sd3"
    assert Answer(server, f"{AT}/samples").data == {"train": [], "eval": [0], "problem": ""}


def test_samples_have_their_lineage_and_their_pictures(server: ViewServer, folder: Path) -> None:
    answer = Answer(server, "/api/runs").data
    (family,) = Answer(server, f"{AT}/samples/eval/0").data["families"]
    (rewrite,) = family["branches"]
    (image,) = rewrite["branches"]
    assert (rewrite["stage"], rewrite["head"], image["stage"], image["name"]) == (
        *("rewrite", "a red disk", "image", "r0/p/0/image-0"),
    )
    picture = Answer(server, f"/{image['image']}")
    assert picture.headers["Content-Type"] == "image/png"
    assert picture.content == (folder / "media" / "step-000000" / "i.png").read_bytes()
    assert answer["runs"][NAME]["problem"] == ""


def test_every_file_of_the_page_is_served_and_loads_nothing_from_elsewhere(server: ViewServer) -> None:
    for name, kind in {"": PAGE["index.html"], **PAGE}.items():
        answer = Answer(server, f"/{name}")
        assert answer.status == 200 and answer.headers["Content-Type"] == kind
        text = answer.content.decode().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text and "innerHTML" not in text and "@import" not in text
    assert b"--series0: #2463d1" in Answer(server, "/view.css").content


@pytest.mark.parametrize("path", ["/", "/api/runs", "/nowhere"])
def test_every_answer_has_the_headers_that_keep_other_pages_out(server: ViewServer, path: str) -> None:
    headers = Answer(server, path).headers
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Cache-Control"] == "no-store" and "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("localhost:1", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("10.1.2.3:8420", 200)),
        *((socket.gethostname(), 200), ("evil.example", 403), ("127.0.0.1.evil.example", 403), ("", 403), ("[", 403)),
    ],
)
def test_a_page_elsewhere_whose_name_leads_here_is_refused(server: ViewServer, host: str, status: int) -> None:
    assert Answer(server, "/api/runs", Host=host).status == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_sent(server: ViewServer, method: str) -> None:
    assert Answer(server, "/api/runs", method=method).status == 501


def test_a_head_request_has_the_length_without_the_content(server: ViewServer) -> None:
    answer = Answer(server, "/view.js", method="HEAD")
    assert answer.status == 200 and answer.content == b""
    assert int(answer.headers["Content-Length"]) == len(Answer(server, "/view.js").content)


@pytest.mark.parametrize(
    "path",
    [
        *("step-000000/../../../../../secret.png", "..%2f..%2f..%2f..%2fsecret.png", "%2Fetc%2Fpasswd", "/etc/passwd"),
        *("link.png", "folder/secret.png", "index.jsonl", "step-000000/r.txt", "a%00.png", "", "step-000000"),
    ],
)
def test_only_pictures_of_samples_are_handed_out(server: ViewServer, folder: Path, tmp_path: Path, path: str) -> None:
    (folder / "media" / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "media" / "folder").symlink_to(tmp_path)
    answer = Answer(server, f"/media/{quote(NAME, safe='')}/{path}")
    assert answer.status == 404 and b"secret" not in answer.content


def test_samples_that_are_a_link_to_elsewhere_are_not_shown(server: ViewServer, folder: Path, tmp_path: Path) -> None:
    (folder / "media").rename(tmp_path / "elsewhere")
    (folder / "media").symlink_to(tmp_path / "elsewhere")
    assert "leads out of the run folder" in Answer(server, f"{AT}/samples").data["problem"]
    assert Answer(server, f"/media/{quote(NAME, safe='')}/step-000000/i.png").status == 404


@pytest.mark.parametrize(
    "path",
    ["/api/runs/none/curves", f"{AT}/other", f"{AT}/samples/eval/x", f"{AT}/samples/other/0", "/../view.js", "/index"],
)
def test_other_addresses_have_nothing(server: ViewServer, path: str) -> None:
    assert Answer(server, path).status == 404


def test_a_run_that_grows_is_seen(server: ViewServer, folder: Path) -> None:
    before = Answer(server, "/api/runs").data["runs"][NAME]
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(step(2, loss=0.25)) + "\n")
    after = Answer(server, "/api/runs").data["runs"][NAME]
    assert (before["step"], after["step"]) == (1, 2) and before["version"] != after["version"]
    assert Answer(server, f"{AT}/curves").data[0]["values"] == [0.5, 0.25]


def test_a_browser_that_leaves_is_not_an_error(server: ViewServer, capfd: pytest.CaptureFixture[str]) -> None:
    """A reset while it answers: nothing is printed, and the next request is answered."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=30) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(b"GET /view.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
    assert Answer(server, "/api/runs").status == 200
    server.shutdown()
    server.server_close()
    assert capfd.readouterr().err == ""


def test_a_port_in_use_is_one_error(server: ViewServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = urlsplit(server.url).port
    with pytest.raises(SystemExit) as caught:
        main(["view", str(tmp_path / "runs"), "--port", str(port)])
    message = capsys.readouterr().err
    assert caught.value.code == 2 and "Traceback" not in message
    assert f"--port {port} on 127.0.0.1: Address already in use. Give another one with --port" in message


def test_a_host_of_another_machine_is_one_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["view", str(folder), "--host", "192.0.2.1", "--port", "0"])
    assert caught.value.code == 2 and "192.0.2.1" in capsys.readouterr().err


SHOWN = re.findall(r"^    unirl view (.*?)(?:\s+#.*)?$", "".join(map(Path.read_text, PAGES)), flags=re.MULTILINE)


@pytest.mark.parametrize("words", sorted(set(SHOWN)))
def test_a_command_that_a_page_shows_is_accepted(
    words: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a server, which the next test interrupts."""
    monkeypatch.chdir(tmp_path)
    given = words.split()
    with pytest.raises(SystemExit) as caught:
        main(["view", *given, *(() if "--static" in given else ("--static", "page"))])
    assert caught.value.code == 0, capsys.readouterr().err
    assert capsys.readouterr().out.split() == ["1", "runs", str(tmp_path / "page" / "index.html")]


def test_the_command_serves_until_it_is_interrupted(folder: Path) -> None:
    words = interruptible("view", folder, "--port", "0")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        count, _, url, *_ = process.stdout.readline().split()
        address = urlsplit(url)
        assert (count, address.hostname) == ("1", "127.0.0.1")
        connection = http.client.HTTPConnection("localhost", address.port, timeout=30)
        connection.request("GET", "/api/runs")
        assert list(json.loads(connection.getresponse().read())["runs"]) == [folder.name]
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "ended\n" and process.stderr.read() == ""
    assert process.returncode == 0
