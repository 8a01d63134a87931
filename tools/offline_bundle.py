"""Make a bundle of all packages that an installation needs, for machines without a network.

Usage: python tools/offline_bundle.py make --target cpu|gpu --out FOLDER [OPTION…], see --help

Needs git, and a Python of the bundle's version with pip: the pip that runs evaluates the markers of requirements, for
the machine that it runs on. Where packages come from is decided by pip's own configuration.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import netrc
import os
import platform
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from html.parser import HTMLParser
from http.client import HTTPException
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit
from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_fleet.config.errors import UserError, say, say_lines  # noqa: E402
from megatron_fleet.storage.progress import ProgressLine  # noqa: E402

PYTHONS = {"cpu": ("3.11", "3.12"), "gpu": ("3.12",)}
"""Versions that setup.sh takes, by target."""
GLIBC_MINOR = 31
"""2.31, the C library that engine-gpu.lock is made for."""
ROOM_GB = {"cpu": 3, "gpu": 11}
"""Disk for the downloads and the parts."""
BATCH = 20
"""Packages of a lock file that one call of pip downloads; an interruption costs no more."""
MAX_PARTS = 1000
BLOCK = 1 << 20
UNREADABLE = (OSError, HTTPException, ValueError)
"""What reading a URL raises; ValueError where it is none."""
TORCH_CPU_INDEX = ["--index-url", "https://download.pytorch.org/whl/cpu"]
"""As in setup.sh: where torch's CPU builds are if the configured index has none."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to make and where. ``pip``: the command of the pip for the bundle's Python."""

    root: Path
    out: Path
    target: str
    python: str
    platform: str
    part_size: int
    pip: tuple[str, ...]

    @property
    def work(self) -> Path:
        """Folder of what an interrupted call leaves for the next."""
        return self.out / "unfinished"

    @property
    def packages(self) -> Path:
        return self.work / "packages"

    def requirements(self, name: str) -> Path:
        return self.root / "requirements" / name


@dataclass(frozen=True, slots=True)
class Pin:
    """An entry of a lock file: ``text`` as pip reads it, and the SHA-256 hashes that it allows."""

    name: str
    version: str
    hashes: frozenset[str]
    text: str


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line for the project in ``root`` and return the exit status, as `mfleet` does."""
    try:
        make(_job(arguments, root))
    except UserError as error:
        say(f"error: {error}", sys.stderr)
        return 2
    except KeyboardInterrupt:
        say("interrupted; the same command continues from here", sys.stderr)
        return 130
    return 0


def _job(arguments: Sequence[str] | None, root: Path) -> Job:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("make", help="download everything and write the parts")
    command.add_argument(
        "--target", choices=tuple(PYTHONS), required=True, help="as ./setup.sh, or as ./setup.sh --gpu"
    )
    command.add_argument("--out", type=Path, required=True, help="folder for the parts")
    command.add_argument("--python", help="version of Python there (default: this one's; 3.12 for GPUs)")
    command.add_argument(
        "--platform",
        default=f"manylinux_2_{GLIBC_MINOR}_{platform.machine()}",
        help="its wheel tag (default: %(default)s)",
    )
    command.add_argument("--part-size", default="1GB", help="largest part (default: %(default)s)")
    given = parser.parse_args(arguments)
    python = given.python or ("3.12" if given.target == "gpu" else "{}.{}".format(*sys.version_info))
    if python not in PYTHONS[given.target]:
        known = " or ".join(PYTHONS[given.target])
        raise UserError(f"--python {python}: --target {given.target} is installed with Python {known}.")
    platform_tags(given.platform)
    return Job(
        root, given.out.absolute(), given.target, python, given.platform, nbytes(given.part_size), find_pip(python)
    )


def nbytes(text: str) -> int:
    """Return a size such as ``700MB`` or ``1.5GB`` in bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(KB|MB|GB)", text)
    if match is None or not float(match[1]):
        raise UserError(f"--part-size {text}: expected a size such as 700MB or 1GB.")
    return int(float(match[1]) * {"KB": 1e3, "MB": 1e6, "GB": 1e9}[match[2]])


def platform_tags(tag: str) -> list[str]:
    """Return the tags of all wheels that run where ``manylinux_2_N_ARCH`` does (PEP 600), best first."""
    match = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", tag)
    if match is None:
        raise UserError(f"--platform {tag}: expected a tag such as manylinux_2_31_x86_64 (glibc 2.31 or newer).")
    if match[2] != platform.machine():
        raise UserError(
            f"--platform {tag}: this machine is {platform.machine()}, for which pip would evaluate the markers of "
            f"requirements; make the bundle on {match[2]}."
        )
    names = []
    for minor in range(int(match[1]), 4, -1):
        names.append(f"manylinux_2_{minor}")
        names += {17: ["manylinux2014"], 12: ["manylinux2010"], 5: ["manylinux1"]}.get(minor, [])
    return [f"{name}_{match[2]}" for name in [*names, "linux"]]


def find_pip(python: str) -> tuple[str, ...]:
    """Return the command of a pip for that version of Python: this Python's, or that of one in PATH."""
    here = "{}.{}".format(*sys.version_info)
    for candidate in [sys.executable] * (here == python) + [f"python{python}"]:
        with suppress(OSError):
            if subprocess.run([candidate, "-m", "pip", "--version"], capture_output=True).returncode == 0:
                return candidate, "-m", "pip", "--disable-pip-version-check"
    raise UserError(f"--python {python}: no python{python} with pip in PATH; make it on a machine that has one.")


def make(job: Job) -> None:
    """Write the bundle: ``bundle.000``…, ``FILES``, ``manifest.json``, ``unpack.sh`` and, last, ``SHA256SUMS``."""
    commit = _clean_commit(job.root)
    inputs = {
        "target": job.target,
        "python": job.python,
        "platform": job.platform,
        "requirements": {
            path.name: sha256(path) for path in sorted((job.root / "requirements").iterdir()) if path.is_file()
        },
    }
    for old in [job.out / "SHA256SUMS", *job.out.glob("bundle.[0-9][0-9][0-9]")]:
        old.unlink(missing_ok=True)
    _open_work(job, inputs)
    download(job)
    project = job.work / "project.tar"
    _git(job.root, "archive", "--format=tar", "--prefix=megatron_fleet/", f"--output={project}", commit)
    files, parts = pack(job, [project, *sorted(job.packages.iterdir())])
    manifest = {"commit": commit, **inputs, "files": files, "parts": parts}
    (job.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    index = "".join(f"{file['sha256']} {file['size']} {file['name']}\n" for file in files)
    (job.out / "FILES").write_text(index, encoding="utf-8")
    shutil.copyfile(Path(__file__).with_name("offline_unpack.sh"), job.out / "unpack.sh")
    sums = [f"{part['sha256']}  {part['name']}\n" for part in parts]
    # unpack.sh takes FILES for the end.
    sums += [f"{sha256(job.out / name)}  {name}\n" for name in ("unpack.sh", "manifest.json", "FILES")]
    (job.work / "SHA256SUMS").write_text("".join(sums), encoding="utf-8")
    (job.work / "SHA256SUMS").replace(job.out / "SHA256SUMS")
    shutil.rmtree(job.work)
    say_lines(
        f"{len(files)} files in {len(parts)} parts. Copy {job.out} to the machine; there: sh unpack.sh FOLDER",
        sys.stderr,
    )


def _clean_commit(root: Path) -> str:
    """Return the commit that the bundle will carry. Raises UserError unless the checkout is that commit."""
    if changed := _git(root, "status", "--porcelain", "--untracked-files=no").splitlines():
        raise UserError(f"{changed[0][3:]} has changes that are not committed; the bundle carries the last commit.")
    return _git(root, "rev-parse", "HEAD").strip()


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{root} must be a git checkout, whose commit the bundle carries: {done.stderr.strip()}")
    return done.stdout


def _open_work(job: Job, inputs: Mapping[str, object]) -> None:
    """Make the working folder, or keep one that was made for the same inputs. Raises UserError on too full a disk."""
    wanted = json.dumps(inputs)
    note = job.work / "inputs.json"
    if not note.exists() or note.read_text(encoding="utf-8") != wanted:
        shutil.rmtree(job.work, ignore_errors=True)
    job.packages.mkdir(parents=True, exist_ok=True)
    _check_room(job.out, ROOM_GB[job.target] * 10**9 - sum(path.stat().st_size for path in job.packages.iterdir()))
    note.write_text(wanted, encoding="utf-8")


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(f"--out {folder}: {free / 1e9:.1f} GB of disk are free, {needed / 1e9:.1f} GB are needed.")


def download(job: Job) -> None:
    """Fill ``job.packages``. Steps that an earlier call finished are left out."""
    steps = list(_gpu_steps(job) if job.target == "gpu" else _cpu_steps(job))
    done, staging = job.work / "done", job.work / "staging"
    finished = done.read_text(encoding="utf-8").splitlines() if done.exists() else []
    for number, (name, step) in enumerate(steps, 1):
        if name in finished:
            continue
        say(f"{number} of {len(steps)}: {name}", sys.stderr)
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        if not step(staging):
            raise UserError(f"pip did not get {name}, for the reason above; the same command continues from here.")
        for path in staging.iterdir():
            path.replace(job.packages / path.name)
        with done.open("a", encoding="utf-8") as lines:
            lines.write(f"{name}\n")


Steps = Iterator[tuple[str, Callable[[Path], bool]]]
"""Names of parts of the work, and functions that put files into a folder and return whether pip succeeded."""


def _gpu_steps(job: Job) -> Steps:
    pins = read_lock(job.requirements("engine-gpu.lock"))
    for first in range(0, len(pins), BATCH):
        some = pins[first : first + BATCH]
        yield f"engine-gpu.lock, {first + 1} to {first + len(some)} of {len(pins)}", partial(_get_pinned, job, some)
    for pin in read_lock(job.requirements("engine-gpu-source.lock")):
        yield f"the source of {pin.name}", partial(fetch_source, job, pin)
    yield from _episode_steps(job)


def _cpu_steps(job: Job) -> Steps:
    apart = job.requirements("engine-cpu-nodeps.txt")
    for torch in re.findall(r"^torch==\S+", apart.read_text(encoding="utf-8"), re.MULTILINE):
        yield torch, partial(_get_torch, job, torch)
    yield apart.name, partial(_pip_download, job, ["--no-deps", "-r", apart])
    asked = job.requirements("engine-cpu.txt")
    for pin in read_lock(job.requirements("engine-gpu-source.lock")):
        if re.search(rf"^{pin.name}==", asked.read_text(encoding="utf-8"), re.MULTILINE):
            yield f"a wheel of {pin.name}", partial(_build, job, pin)
    yield asked.name, partial(_pip_download, job, ["-r", asked, "-c", job.requirements("engine.lock")])
    yield from _episode_steps(job)


def _episode_steps(job: Job) -> Steps:
    asked, lock = job.requirements("episode.txt"), job.requirements("episode.lock")
    yield asked.name, partial(_pip_download, job, ["-r", asked, "-c", lock])


def _pip_download(job: Job, arguments: Sequence[str | Path], staging: Path) -> bool:
    tags = [f"--platform={tag}" for tag in platform_tags(job.platform)]
    command: list[str | Path] = [*job.pip, "download", "--only-binary=:all:", *tags, "--find-links", job.packages]
    return subprocess.run([*command, "--dest", staging, *arguments], stdout=sys.stderr).returncode == 0


def _get_pinned(job: Job, pins: list[Pin], staging: Path) -> bool:
    lock = job.work / "batch.txt"
    lock.write_text("\n".join(pin.text for pin in pins) + "\n", encoding="utf-8")
    return _pip_download(job, ["--no-deps", "--require-hashes", "-r", lock], staging)


def _get_torch(job: Job, torch: str, staging: Path) -> bool:
    arguments = ["--no-deps", torch]
    return _pip_download(job, arguments, staging) or _pip_download(job, arguments + TORCH_CPU_INDEX, staging)


def _build(job: Job, pin: Pin, staging: Path) -> bool:
    """Build a wheel, so that no compiler and no build backend are needed where the bundle goes."""
    source = job.work / "source"
    source.mkdir(exist_ok=True)
    fetch_source(job, pin, source)
    build: list[str | Path] = [*job.pip, "wheel", "--no-deps", "--wheel-dir", staging, *source.iterdir()]
    done = subprocess.run(build, stdout=sys.stderr)
    shutil.rmtree(source)
    return done.returncode == 0


def read_lock(path: Path) -> list[Pin]:
    """Return the entries of a lock file with hashes."""
    entries = re.split(r"\n(?=[A-Za-z0-9])", path.read_text(encoding="utf-8"))
    return [
        Pin(match[1], match[2], frozenset(re.findall(r"--hash=sha256:([0-9a-f]{64})", entry)), entry.rstrip())
        for entry in entries
        if (match := re.match(r"([\w.-]+)==([^\s;]+)", entry))
    ]


def fetch_source(job: Job, pin: Pin, folder: Path) -> bool:
    """Download the source archive of a package; return True. Raises UserError.

    pip would run the archive's setup.py before it saves it, and that of transformer-engine-torch imports torch.
    """
    index = PackageIndex(job.pip)
    ending = f"-{pin.version}.tar.gz"
    for url in index.links(pin.name):
        name = unquote(urlsplit(url).path).rsplit("/", 1)[-1]
        if name.endswith(ending) and _normal(name.removesuffix(ending)) == _normal(pin.name):
            try:
                with index.open(url) as response:
                    content = response.read()
            except UNREADABLE as error:
                raise UserError(f"{without_password(url)}: {error}; the same command continues from here.") from error
            if hashlib.sha256(content).hexdigest() not in pin.hashes:
                raise UserError(f"{without_password(url)} has another hash than the lock file gives {pin.name}.")
            (folder / name).write_bytes(content)
            return True
    asked = "".join(f"; {why}" for why in index.failures)
    raise UserError(f"no index that pip is configured with has {pin.name}{ending}{asked}.")


def _normal(name: str) -> str:
    """Return a package's name as indexes spell it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def without_password(url: str) -> str:
    """Return ``url`` less user name and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


class PackageIndex:
    """Reader of the indexes and folders of links that pip is configured with."""

    def __init__(self, pip: tuple[str, ...]) -> None:
        said = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=True).stdout
        self._configured = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
        self._pip = pip
        self.failures: list[str] = []
        context = ssl.create_default_context()
        for bundle in self._option("cert"):
            context.load_verify_locations(bundle)
        proxies = [ProxyHandler(dict.fromkeys(("http", "https"), proxy)) for proxy in self._option("proxy")]
        self._opener = build_opener(HTTPSHandler(context=context), *proxies)

    def _option(self, name: str) -> list[str]:
        """Values of an option of ``pip download``: of the environment, else of its section, else of all commands."""
        for section in (":env:", "download", "global"):
            if value := self._configured.get(f"{section}.{name}"):
                return str(ast.literal_eval(value)).split()
        return []

    def default_index(self) -> str:
        """Return the index that pip asks when none is configured, from its help."""
        shown = subprocess.run(
            [*self._pip, "download", "--help"], capture_output=True, text=True, env=os.environ | {"COLUMNS": "999"}
        )
        match = re.search(r"--index-url\s.*\(default (\S+?)\)", shown.stdout)
        if match is None:
            raise UserError("pip's help does not say which index it asks; set PIP_INDEX_URL.")
        return match[1]

    def links(self, package: str) -> Iterator[str]:
        """Yield the URLs of files: of the folders of links, then those that each index has for ``package``."""
        pages = []
        for place in self._option("find-links"):
            folder = Path(unquote(urlsplit(place).path) if place.startswith("file:") else place).expanduser()
            if folder.is_dir():
                yield from (path.absolute().as_uri() for path in sorted(folder.iterdir()))
            else:
                pages.append(place)
        if self._option("no-index") not in (["true"], ["1"], ["yes"]):
            indexes = (self._option("index-url") or [self.default_index()]) + self._option("extra-index-url")
            pages += [f"{index.rstrip('/')}/{_normal(package)}/" for index in indexes]
        for page in pages:
            yield from self._links_of(page)

    def _links_of(self, page: str) -> Iterator[str]:
        place = f"{page}index.html" if page.startswith("file:") and page.endswith("/") else page
        try:
            with self.open(place) as response:
                parser = _Links()
                parser.feed(response.read().decode(errors="replace"))
        except UNREADABLE as error:
            self.failures.append(f"{without_password(page)}: {error}")
            return
        for reference in parser.found:
            parts = urlsplit(urldefrag(urljoin(page, reference)).url)
            if parts.netloc == urlsplit(without_password(page)).netloc:
                parts = parts._replace(netloc=urlsplit(page).netloc)
            yield urlunsplit(parts)

    def open(self, url: str) -> IO[bytes]:
        """Open a URL with the user and password in it, or those that netrc has for its host. Raises OSError."""
        parts = urlsplit(url)
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        if not user and parts.hostname:
            with suppress(OSError, netrc.NetrcParseError):
                user, _, password = netrc.netrc().authenticators(parts.hostname) or ("", "", "")
        request = Request(without_password(url), headers={"Accept": "text/html, */*;q=0.1"})
        if user:
            token = base64.b64encode(f"{user}:{password}".encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {token}")
        opened: IO[bytes] = self._opener.open(request, timeout=60)
        return opened


class _Links(HTMLParser):
    """References of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


Record = dict[str, str | int]
"""``name``, ``size`` in bytes and ``sha256`` of a file."""


def pack(job: Job, paths: list[Path]) -> tuple[list[Record], list[Record]]:
    """Write the files, one after the other, as parts; return what describes the files and the parts."""
    total = sum(path.stat().st_size for path in paths)
    if total > job.part_size * MAX_PARTS:
        raise UserError(f"--part-size: {total / 1e6:.0f} MB make more than {MAX_PARTS} parts; name a larger size.")
    _check_room(job.out, total)
    files: list[Record] = []
    with ProgressLine() as progress, Parts(job.out, job.part_size) as parts:
        progress.start("writing the parts", total)
        for path in paths:
            digest = hashlib.sha256()
            with path.open("rb") as file:
                while block := file.read(BLOCK):
                    digest.update(block)
                    parts.write(block)
                    progress.advance(len(block))
            name = path.relative_to(job.work).as_posix()
            files.append({"name": name, "size": path.stat().st_size, "sha256": digest.hexdigest()})
    return files, parts.written


class Parts:
    """Writer of one stream of bytes into files of ``size`` bytes, the last of them shorter. A context manager."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size, self._left = folder, size, 0
        self._file: IO[bytes] | None = None
        self._digest = hashlib.sha256()
        self.written: list[Record] = []

    def __enter__(self) -> Parts:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def write(self, data: bytes) -> None:
        """Append bytes, to as many parts as they need."""
        while data:
            if not self._left:
                self._close()
                self._file = (self._folder / f"bundle.{len(self.written):03d}").open("wb")
                self._digest, self._left = hashlib.sha256(), self._size
            assert self._file is not None
            now, data = data[: self._left], data[self._left :]
            self._file.write(now)
            self._digest.update(now)
            self._left -= len(now)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            name = Path(self._file.name).name
            size = self._size - self._left
            self.written.append({"name": name, "size": size, "sha256": self._digest.hexdigest()})
            self._file = None


if __name__ == "__main__":
    sys.exit(main())
