"""``view``: a server of one directory, for this machine alone, and the page's files."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.parse

import pytest

import ckptfmt_tools.cli.view
from ckptfmt.__main__ import main
from ckptfmt_tools.cli.serving import PAGE_FILES, ViewServer
from tests.cli.conftest import ROOT


@pytest.fixture
def page(tmp_path):
    """A built page, in the place of the real one."""
    folder = tmp_path / "page"
    folder.mkdir()
    for name in PAGE_FILES:
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def server(page, tmp_path):
    root = tmp_path / "root"
    (root / "run").mkdir(parents=True)
    (root / "run" / "é file").write_bytes(bytes(range(100)))
    (tmp_path / "secret").write_text("secret")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "folder-link").symlink_to(tmp_path)
    os.mkfifo(root / "pipe")
    with ViewServer(page, root) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path, method="GET", token=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    with contextlib.closing(connection):
        connection.putrequest(
            method, f"/{token or server.token}/{path}", skip_host="Host" in headers
        )
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.getheaders())


FILE = "data/run/" + urllib.parse.quote("é file")


def test_the_page_and_the_files_are_served(server):
    assert ask(server, "")[:2] == (200, b"index.html")
    assert ask(server, "?url=data/")[1] == b"index.html"
    assert ask(server, "view.js")[2]["Content-Type"].startswith("text/javascript")
    status, content, headers = ask(server, FILE)
    assert (status, content) == (200, bytes(range(100)))
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("wanted", "status", "content"),
    [
        ("bytes=0-9", 206, bytes(range(10))),
        ("bytes=90-", 206, bytes(range(90, 100))),
        ("bytes=90-200", 206, bytes(range(90, 100))),
        ("bytes=100-100", 416, b""),
        ("bytes=5-4", 416, b""),
        ("bytes=0-1,3-4", 200, bytes(range(100))),
        ("lines=0-1", 200, bytes(range(100))),
    ],
)
def test_ranges(server, wanted, status, content):
    assert ask(server, FILE, Range=wanted)[:2] == (status, content)


def test_the_size_of_a_file_is_known_without_its_bytes(server):
    status, content, headers = ask(server, FILE, method="HEAD")
    assert (status, content, headers["Content-Length"]) == (200, b"", "100")
    headers = ask(server, FILE, Range="bytes=7-8")[2]
    assert headers["Content-Range"] == "bytes 7-8/100"


def test_folders_are_listed_and_links_are_no_files(server):
    entries = {one["name"]: one["type"] for one in json.loads(ask(server, "data/")[1])}
    assert entries == {"run": "directory", "link": "other", "folder-link": "other", "pipe": "other"}
    assert json.loads(ask(server, "data/run/")[1]) == [{"name": "é file", "type": "file"}]


@pytest.mark.parametrize(
    "path",
    [
        "data/link",
        "data/folder-link/secret",
        "data/folder-link/",
        "data/pipe",
        "data/../secret",
        "data/%2e%2e/secret",
        "data/..%2fsecret",
        "data//secret",
        "data/run",
        "data/run/no-such-file",
        "data/no-such-folder/",
        "data/%00",
        "data",
        "../secret",
        "page",
    ],
)
def test_nothing_else_is_served(server, path):
    status, content, _ = ask(server, path)
    assert (status, content) == (404, b"")


def test_a_request_needs_the_token_and_the_host_of_the_server(server):
    assert ask(server, "", token="x" * len(server.token))[0] == 404
    assert ask(server, FILE, Host=f"localhost:{server.server_port}")[0] == 200
    assert ask(server, FILE, Host="evil.example")[0] == 421
    assert ask(server, FILE, Host=f"evil.example:{server.server_port}")[0] == 421
    assert ask(server, FILE, method="POST")[0] == 501
    assert server.server_address[0] == "127.0.0.1"


def test_the_command_needs_the_page_and_a_directory(tmp_path, page, monkeypatch, capsys):
    monkeypatch.setattr(ckptfmt_tools.cli.view, "PAGE", tmp_path / "nothing")
    assert main(["view", str(tmp_path)]) == 2
    assert "make view" in capsys.readouterr().err
    monkeypatch.setattr(ckptfmt_tools.cli.view, "PAGE", page)
    assert main(["view", "s3://bucket/run"]) == 2
    assert "ckptfmt mirror" in capsys.readouterr().err


PROGRAM = """
import pathlib, sys, ckptfmt_tools.cli.view as view
view.PAGE = pathlib.Path(sys.argv[1])
from ckptfmt.__main__ import main
sys.exit(main(["view", sys.argv[2], "--json"]))
"""


def test_the_command_serves_the_run_of_a_checkpoint_until_it_is_interrupted(page, run_path):
    """A delta needs the checkpoints beside it."""
    step = next(path for path in sorted(run_path.iterdir()) if path.name.startswith("step-"))
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(page), str(step)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        lines = iter(process.stdout.readline, "}\n")
        said = json.loads("".join([*lines, "}"]))
        url = urllib.parse.urlsplit(said["url"])
        assert said["directory"] == str(run_path)
        assert urllib.parse.parse_qs(url.fragment) == {"view": ["checkpoint"], "path": [step.name]}
        connection = http.client.HTTPConnection("127.0.0.1", url.port, timeout=20)
        with contextlib.closing(connection):
            connection.request("GET", f"{url.path}data/run.json")
            assert connection.getresponse().read() == (run_path / "run.json").read_bytes()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
