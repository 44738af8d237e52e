"""Downloads from a server on this machine."""

import gzip
import hashlib
import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

from freshet.data import load
from freshet.data.catalogue import CATALOGUE
from freshet.data.download import DownloadBar, Remote, download
from freshet.errors import DataError
from tests.data import builders as build


class Site:
    """A small web server with faults."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.files: dict[str, bytes] = {}
        self.faults: list[str] = []  # consumed one per request: "error", "cut", "wrong"
        self.requests = 0


@pytest.fixture
def site() -> Iterator[Site]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            here.requests += 1
            data = here.files.get(self.path.lstrip("/"))
            fault = here.faults.pop(0) if here.faults else ""
            if data is None or fault == "error":
                self.send_error(404 if data is None else 503)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Content-Encoding", "x-gzip")  # Apache sends this for .gz files; they must not be decoded
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if fault == "cut" else data[::-1] if fault == "wrong" else data)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    here = Site(f"http://127.0.0.1:{server.server_port}/")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield here
    server.shutdown()
    server.server_close()


def remote(site: Site, data: bytes) -> Remote:
    site.files["file.gz"] = data
    digest = hashlib.sha256(data).hexdigest()
    return Remote("file.gz", f"sha256:{digest}", (site.url + "missing.gz", site.url + "file.gz"))


DATA = gzip.compress(b"some data" * 1000)


def test_the_first_address_that_works_is_used(site: Site, tmp_path: Path) -> None:
    path = download("toy", remote(site, DATA), tmp_path / "new")
    assert path.read_bytes() == DATA
    requests = site.requests
    assert download("toy", remote(site, DATA), tmp_path / "new") == path
    assert site.requests == requests  # the file exists already


@pytest.mark.parametrize("fault", ["error", "cut", "wrong"])
def test_a_failed_download_is_retried(site: Site, tmp_path: Path, fault: str) -> None:
    site.faults = ["", fault]
    assert download("toy", remote(site, DATA), tmp_path, pause=0.01).read_bytes() == DATA
    assert [p.name for p in tmp_path.iterdir()] == ["file.gz"]


@pytest.mark.parametrize(
    ("fault", "says"), [("wrong", "wrong checksum"), ("error", "answered 503"), ("cut", "broke off")]
)
def test_a_lasting_fault_gives_one_sentence_and_leaves_no_files(
    site: Site, tmp_path: Path, fault: str, says: str
) -> None:
    site.faults = ["", fault] * 3
    with pytest.raises(DataError) as caught:
        download("toy", remote(site, DATA), tmp_path, pause=0.01)
    message = str(caught.value)
    assert says in message
    assert "--data-dir" in message and "\n" not in message
    assert list(tmp_path.iterdir()) == []


def test_no_network_gives_one_sentence(tmp_path: Path) -> None:
    gone = Remote("file.gz", "md5:00", ("http://127.0.0.1:9/file.gz",))
    with pytest.raises(DataError, match="no connection"):
        download("toy", gone, tmp_path, attempts=1)


@pytest.mark.usefixtures("nowhere")
def test_load_downloads_into_the_cache(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = build.write_fashion(tmp_path / "made")
    remotes = []
    for path in sorted((tmp_path / "made").iterdir()):
        site.files[path.name] = path.read_bytes()
        remotes.append(Remote(path.name, "md5:" + hashlib.md5(path.read_bytes()).hexdigest(), (site.url + path.name,)))
    spec = CATALOGUE["fashion-mnist"]
    monkeypatch.setitem(CATALOGUE, "fashion-mnist", type(spec)(**{**vars(spec), "remotes": tuple(remotes)}))
    data = load("fashion-mnist", any_size=True)
    assert np.array_equal(data.x_train, expected["x_train"])
    requests = site.requests
    load("fashion-mnist", any_size=True)
    assert site.requests == requests == 4


def test_progress_draws_only_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, drawn in ((io.StringIO(), False), (Terminal(), True)):
        bar = DownloadBar("file", stream)
        bar.total = 2_000_000
        bar.update(2_000_000)
        bar.close()
        assert ("100%" in stream.getvalue()) is drawn
