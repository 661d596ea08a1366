"""A folder of wheels in pieces small enough to carry to a machine without a network, and back.

    python -m tests.benchmarks.pieces fetch .whl vllm==0.25.1 msgspec…     # for the other machine's Python
    python -m tests.benchmarks.pieces split .whl .pieces --mb 60           # .pieces/000, 001, …, index.json
    python -m tests.benchmarks.pieces join .pieces .whl                    # there; each piece's hash is checked
    python -m tests.benchmarks.gpu_report --out OUT --wheels .whl

Pieces may arrive one by one in any order: `join` names the ones that are missing or damaged. It is
plain Python, without anything of ours.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
from pathlib import Path

INDEX = "index.json"
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64", "linux_x86_64"]


class _Pieces:
    """A file that ends every `size` bytes and goes on in the next one."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size
        self.hashes: list[str] = []
        self._held = bytearray()

    def write(self, data: bytes) -> int:
        self._held += data
        while len(self._held) >= self.size:
            self._put(self.size)
        return len(data)

    def _put(self, count: int) -> None:
        piece = bytes(self._held[:count])
        del self._held[:count]
        (self.folder / f"{len(self.hashes):03}").write_bytes(piece)
        self.hashes.append(hashlib.sha256(piece).hexdigest())

    def finish(self) -> list[str]:
        if self._held:
            self._put(len(self._held))
        return self.hashes


def split(source: Path, folder: Path, size: int) -> list[str]:
    """Write the files of `source` as pieces of at most `size` bytes; return their hashes."""
    folder.mkdir(parents=True)
    pieces = _Pieces(folder, size)
    with tarfile.open(fileobj=pieces, mode="w|") as archive:
        for path in sorted(path for path in source.iterdir() if path.is_file()):
            archive.add(path, path.name)
    hashes = pieces.finish()
    (folder / INDEX).write_text(json.dumps(hashes))
    return hashes


class _Joined:
    """The pieces as one file."""

    def __init__(self, paths: list[Path]) -> None:
        self._files = [path.open("rb") for path in paths]

    def read(self, count: int) -> bytes:
        data = b""
        while len(data) < count and self._files:
            more = self._files[0].read(count - len(data))
            if not more:
                self._files.pop(0).close()
            data += more
        return data


def join(folder: Path, target: Path) -> list[str]:
    """Write the files of the pieces into `target`; return their names. Exits if a piece is missing
    or damaged, and writes nothing then."""
    hashes = json.loads((folder / INDEX).read_text())
    paths = [folder / f"{number:03}" for number in range(len(hashes))]
    wrong = [
        path.name
        for path, expected in zip(paths, hashes, strict=True)
        if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != expected
    ]
    if wrong:
        sys.exit(f"missing or damaged pieces of {folder}: {', '.join(wrong)}")
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=_Joined(paths), mode="r|") as archive:
        archive.extractall(target, filter="data")
    return sorted(path.name for path in target.iterdir())


def fetch(folder: Path, requirements: list[str], python: str) -> None:
    """Download wheels, without what they need, for another machine's Python."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp", "--dest", str(folder)]
    command += [part for platform in PLATFORMS for part in ("--platform", platform)]
    subprocess.run([*command, *requirements], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("do", choices=("fetch", "split", "join"))
    parser.add_argument("source", type=Path, help="fetch: where to")
    parser.add_argument("more", nargs="+", help="split, join: where to; fetch: NAME==VERSION …")
    parser.add_argument("--mb", type=int, default=60)
    parser.add_argument("--python", default="3.12")
    arguments = parser.parse_args()
    if arguments.do == "fetch":
        fetch(arguments.source, arguments.more, arguments.python)
    elif arguments.do == "split":
        print(len(split(arguments.source, Path(arguments.more[0]), arguments.mb << 20)), "pieces")
    else:
        print(*join(arguments.source, Path(arguments.more[0])), sep="\n")


if __name__ == "__main__":
    main()
