"""Make parcels of packages for a GPU machine that has PyTorch with CUDA but no network.

    python tools/gpu_parcel.py OUT --have LIST                          the trainer's half, the battery, the tests
    python tools/gpu_parcel.py OUT --have LIST --with transformer-engine
    python tools/gpu_parcel.py OUT --have LIST --with vllm --parcels 2
    python tools/gpu_parcel.py OUT --have LIST --with transformer-engine --with vllm --parcels 2

A parcel is a folder OUT/N of wheels, no larger than the machine takes at once, with a MANIFEST.txt: what is in it, how
large it is, and the command that installs it there. Versions and hashes are those of requirements/engine-gpu.lock, less
the packages that the machine has: LIST is what `python3 -m pip list --format=freeze` prints there. The Python of
--python has the machine's versions of Python and PyTorch.

Libraries are reduced to the device code of Hopper GPUs, sm_90, and packed more tightly (slim_wheel.py). What has no
wheel, the PyTorch half of Transformer Engine, is compiled here: that takes a C++ compiler, the headers of CUDA
(CUDA_HOME), and an hour on two cores. A repeated command takes finished work from the cache. The files of the work tree
travel with each parcel, so they count, as large as they are.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

import slim_wheel  # noqa: E402
from offline_bundle import GLIBC_MINOR, PYTHONS, Pin, platform_tags, read_lock, sha256  # noqa: E402
from packaging.requirements import Requirement  # noqa: E402
from packaging.utils import canonicalize_name  # noqa: E402

from megatron_fleet.config.errors import UserError, say, say_lines  # noqa: E402

MIB = 1 << 20
ARCH = 90
"""Hopper. Another one also needs other FILES_LEFT_OUT."""
TRAINER = (
    *("megatron-core", "pydantic", "numba", "safetensors", "msgpack", "psutil", "rich", "pyyaml"),
    *("pytest", "hypothesis", "pytest-asyncio", "pytest-timeout"),
)
"""What the trainer's half, the battery's parts without engines, and the tests marked gpu import, beside torch."""
ADDITIONS: Mapping[str, tuple[str, ...]] = {
    "transformer-engine": ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch"),
    "vllm": ("vllm",),
}
LEFT_OUT = {
    # Of another release or build than the machine's; it has its own.
    *("torch", "torchvision", "torchaudio", "triton"),
    # Large, and imported only by features that a run does not use.
    *("flashinfer-python", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "tilelang", "tokenspeed-mla"),
    *("quack-kernels", "humming-kernels", "fastsafetensors", "instanttensor", "mistral-common"),
    *("opencv-python-headless", "torchcodec", "pynvvideocodec", "anthropic", "supervisor"),
}
"""Dependencies that are not carried although metadata names them."""
FILES_LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    # transformer-engine-cu13 brings the same files; of this package only its metadata is asked for.
    "transformer-engine": ("transformer_engine/*",),
    "transformer-engine-cu13": ("*/libnccl_ep.so", "*/nccl_ep/*", "transformer_engine/jax/*"),
    "vllm": (
        "vllm/vllm-rs",
        "*/_vllm_fa2_C*",  # Hopper's attention is _vllm_fa3_C
        *("vllm/third_party/deep_gemm/*", "vllm/_qutlass_C*"),  # ask for a newer torch
        *("vllm/_deepselect_C*", "vllm/third_party/fmha_sm100/*", "vllm/third_party/tml_fa4/*"),  # not for Hopper
    ),
}
"""Patterns of files in wheels that are not carried."""
BUILD_TOOLS = ("ninja", "wheel")
"""Packages that a build asks for beside torch."""
BUILD_JOBS = 2
NAMED = 6
"""Packages that a refusal names."""
SITE, WHEELS = "/tmp/site", "/tmp/wheels"
"""Folders on the machine: of the installed packages, and of the wheels of all parcels that came so far."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to make, of what, and where.

    Attributes:
        names: packages to carry, with what they require.
        machine: name of each package that the machine has → its version, empty where LIST does not say.
        python: version of the ``interpreter``, such as ``3.12``.
        limit: largest parcel, bytes; the work tree counts.
    """

    root: Path
    out: Path
    cache: Path
    names: tuple[str, ...]
    machine: Mapping[str, str]
    interpreter: str
    python: str
    limit: int
    parcels: int


@dataclass(frozen=True, slots=True)
class Item:
    """A wheel of a parcel. ``note``: what was done to it."""

    name: str
    version: str
    path: Path
    note: str = ""

    @property
    def size(self) -> int:
        return self.path.stat().st_size


@dataclass(slots=True)
class Parcel:
    """Wheels that travel together with the work tree of ``tree`` bytes."""

    tree: int
    items: list[Item] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.tree + sum(item.size for item in self.items)


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
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="gpu_parcel.py", description=__doc__, formatter_class=raw)
    parser.add_argument("out", metavar="OUT", type=Path, help="folder of the parcels")
    parser.add_argument(
        "--have", metavar="LIST", type=Path, help="file with the machine's packages (default: those of PYTHON)"
    )
    parser.add_argument(
        "--python", default=sys.executable, help="Python with the machine's PyTorch (default: this one)"
    )
    parser.add_argument(
        "--with", dest="additions", choices=tuple(ADDITIONS), action="append", default=[], help="carry it too"
    )
    parser.add_argument("--limit-mib", type=float, default=64.0, help="largest parcel (default: %(default)g)")
    parser.add_argument("--parcels", type=int, default=1, help="how many there may be (default: %(default)s)")
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_fleet" / "gpu_parcel"
    parser.add_argument("--cache", type=Path, default=default, help="folder of finished work (default: %(default)s)")
    given = parser.parse_args(arguments)
    for option in ("limit_mib", "parcels"):
        if getattr(given, option) <= 0:
            parser.error(f"--{option.replace('_', '-')} {getattr(given, option):g} is not above 0")
    python = _version_of(given.python)
    return Job(
        root=root,
        out=given.out.absolute(),
        cache=given.cache.absolute(),
        names=(*TRAINER, *(name for addition in given.additions for name in ADDITIONS[addition])),
        machine=_packages_of(given.python, given.have),
        interpreter=given.python,
        python=python,
        limit=int(given.limit_mib * MIB),
        parcels=given.parcels,
    )


def _version_of(interpreter: str) -> str:
    """Return the version of a Python with pip that engine-gpu.lock is made for. Raises UserError for any other."""
    program = "import pip, sys; print('{}.{}'.format(*sys.version_info))"
    try:
        done = subprocess.run([interpreter, "-c", program], capture_output=True, text=True)
    except OSError as error:
        raise UserError(f"--python {interpreter}: {error.strerror}; name a Python.") from error
    if done.returncode:
        raise UserError(f"--python {interpreter}: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}")
    version = done.stdout.strip()
    if version not in PYTHONS["gpu"]:
        known = " or ".join(PYTHONS["gpu"])
        raise UserError(f"--python {interpreter} is Python {version}; engine-gpu.lock is made for {known}.")
    return version


def _packages_of(interpreter: str, file: Path | None) -> dict[str, str]:
    """Read the machine's packages from a file, else ask a Python for its own."""
    if file is None:
        command = [interpreter, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    else:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--have {file}: {error}") from error
    return read_packages(text, str(file))


def read_packages(text: str, source: str) -> dict[str, str]:
    """Return name → version, or an empty string, of the lines ``NAME==VERSION``, ``NAME VERSION`` or ``NAME``."""
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.replace("==", " ").split()
        if not words or words[0] == "Package" or not line.strip("- "):
            continue  # the head of pip's table
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", words[0]):
            raise UserError(f"--have {source}, line {number}: expected NAME==VERSION or NAME, there is {line.strip()}")
        found[canonicalize_name(words[0])] = words[1] if len(words) > 1 else ""
    return found


def make(job: Job) -> None:
    """Write the parcels, and print what is in them."""
    items, remarks = collect(job)
    items.append(project_metadata(job))
    parcels = distribute(job, items, tree_size(job.root, job.out))
    for old in job.out.glob("*/MANIFEST.txt"):
        shutil.rmtree(old.parent)
    for number, parcel in enumerate(parcels, 1):
        folder = job.out / str(number)
        folder.mkdir(parents=True)
        for item in parcel.items:
            shutil.copyfile(item.path, folder / item.path.name)
        text = manifest(job, folder, f"Parcel {number} of {len(parcels)}", parcel, remarks)
        (folder / "MANIFEST.txt").write_text(text, encoding="utf-8")
        say_lines(text)


def collect(job: Job) -> tuple[list[Item], list[str]]:
    """Return the wheels that the machine lacks, and remarks about dependencies that it will not have."""
    locks = ("engine-gpu.lock", "engine-gpu-source.lock")
    wheels, sources = ({pin.name: pin for pin in read_lock(job.root / "requirements" / lock)} for lock in locks)
    items: dict[str, Item] = {}
    remarks: dict[str, None] = {}
    left_out: set[str] = set()
    pending = [(name, "") for name in job.names]
    while pending:
        name, asked_by = pending.pop(0)
        if name in items or name in job.machine:
            continue
        if name in LEFT_OUT:
            left_out.add(name)
            continue
        if name not in wheels | sources:
            raise UserError(f"{name}, which {asked_by or 'the trainer'} needs, is not in engine-gpu.lock.")
        published = build(job, sources[name], wheels) if name in sources else fetch(job, wheels[name])
        version = published.name.split("-")[1]
        items[name] = Item(name, version, *reduced(job, published))
        for requirement in requirements(job, published):
            needed = canonicalize_name(requirement.name)
            there = job.machine.get(needed)
            if there and not requirement.specifier.contains(there, prereleases=True):
                remarks[f"{name} asks for {needed}{requirement.specifier}; the machine has {there}."] = None
            pending.append((needed, name))
    if left_out:
        remarks[f"Left out, although metadata names them: {', '.join(sorted(left_out))}."] = None
    return list(items.values()), list(remarks)


def requirements(job: Job, wheel: Path) -> Iterator[Requirement]:
    """Yield what a wheel requires on the machine, without extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        head = archive.read(name).decode().partition("\n\n")[0]
    environment = {"python_version": job.python, "python_full_version": f"{job.python}.0", "extra": ""}
    for text in re.findall(r"^Requires-Dist: *(.*)$", head, re.MULTILINE):
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            yield requirement


def fetch(job: Job, pin: Pin) -> Path:
    """Return a wheel of a lock file, downloaded unless the cache has it."""
    folder = job.cache / "wheels"
    known = _known(folder, pin)
    if known is not None and sha256(known) in pin.hashes:
        return known
    tags = [f"--platform={tag}" for tag in platform_tags(f"manylinux_2_{GLIBC_MINOR}_x86_64")]
    return _keep(run_pip(job, [pin], "download", ["--only-binary=:all:", *tags, "--dest"]), folder)


def build(job: Job, pin: Pin, wheels: Mapping[str, Pin]) -> Path:
    """Return the wheel of a package that has only sources, compiled for the PyTorch of ``job.interpreter``.

    ``wheels``: the lock file's entries, of which `BUILD_TOOLS` are used. What the compiler says goes to the cache, into
    build.log.
    """
    asked = [job.interpreter, "-c", "import torch; print(torch.__version__)"]
    done = subprocess.run(asked, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"--python {job.interpreter} has no PyTorch, for which {pin.name} would be compiled.")
    folder = job.cache / f"built-for-torch-{done.stdout.strip()}"
    known = _known(folder, pin)
    if known is not None:
        return known
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    if not (toolkit / "include" / "crt" / "host_config.h").is_file():
        raise UserError(f"CUDA_HOME: {toolkit} has no headers of CUDA, which {pin.name} is compiled with.")
    tools = job.cache / "build-tools"
    if not tools.is_dir():
        run_pip(job, [wheels[name] for name in BUILD_TOOLS], "install", ["--target"]).replace(tools)
    environment = {
        "PYTHONPATH": str(tools),
        "PATH": f"{tools / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "CUDA_HOME": str(toolkit),
        # Searched after the headers of the packages that PyTorch brings, which are all but these.
        "CPATH": os.pathsep.join(str(toolkit / "include" / name) for name in ("", "cccl")),
        "MAX_JOBS": str(BUILD_JOBS),
        "NVTE_PYTORCH_FORCE_BUILD": "TRUE",
        "NVTE_BUILD_USE_NVIDIA_WHEELS": "1",
    }
    options = ["--verbose", "--no-build-isolation", "--no-cache-dir", "--wheel-dir"]
    log = job.cache / "build.log"
    say(f"compiling {pin.name} {pin.version}, for an hour or so; see {log}", sys.stderr)
    return _keep(run_pip(job, [pin], "wheel", options, environment, log), folder)


def _known(folder: Path, pin: Pin) -> Path | None:
    """Return the wheel of a pin in a folder."""
    named = [path for path in folder.glob(f"*-{pin.version}-*.whl") if _name(path) == canonicalize_name(pin.name)]
    return named[0] if named else None


def _name(wheel: Path) -> str:
    return canonicalize_name(wheel.name.split("-")[0])


def _keep(staging: Path, folder: Path) -> Path:
    """Move the wheel that pip made into a folder of the cache."""
    (made,) = staging.glob("*.whl")
    folder.mkdir(parents=True, exist_ok=True)
    return made.replace(folder / made.name)


def run_pip(
    job: Job,
    pins: Sequence[Pin],
    command: str,
    options: Sequence[str],
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Path:
    """Run pip for entries of a lock file, and return the folder of what it made.

    Args:
        options: the last one takes that folder.
        environment: more variables.
        log: file for what pip says, in place of standard error.
    """
    staging = job.cache / "staging"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    lock = job.cache / "staging.txt"
    lock.write_text("".join(f"{pin.text}\n" for pin in pins), encoding="utf-8")
    pip = [job.interpreter, "-m", "pip", command, "--quiet", "--disable-pip-version-check", "--no-deps"]
    arguments = [*pip, *options, staging, "--require-hashes", "-r", lock]
    with log.open("w", encoding="utf-8") if log else nullcontext(sys.stderr) as output:
        done = subprocess.run(arguments, env=os.environ | (environment or {}), stdout=output, stderr=output)
    if done.returncode:
        names = " and ".join(f"{pin.name} {pin.version}" for pin in pins)
        raise UserError(
            f"pip {command} failed for {names}; see {log or 'above'}. The same command continues from here."
        )
    return staging


def reduced(job: Job, published: Path) -> tuple[Path, str]:
    """Return the wheel to carry in place of a published one, and what was done to it.

    A wheel without libraries, of which no file is left out, is carried as it is.
    """
    left_out = FILES_LEFT_OUT.get(_name(published), ())
    if not left_out and not slim_wheel.has_library(published):
        return published, ""
    recipe = [sha256(published), sha256(Path(slim_wheel.__file__)), str(ARCH), *left_out]
    folder = job.cache / "reduced" / hashlib.sha256("\n".join(recipe).encode()).hexdigest()[:20]
    name, version, *_, python, abi, system = published.name.split("-")
    wheel, note = folder / f"{name}-{version}-1sm{ARCH}-{python}-{abi}-{system}", folder / "note.txt"
    if not note.exists():
        say(f"packing {published.name} anew", sys.stderr)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            done = slim_wheel.repack(published, wheel, left_out, ARCH)
        except ValueError as error:
            raise UserError(f"{published.name}: {error}.") from error
        said = [f"device code {done.before / MIB:.1f} to {done.after / MIB:.1f} MiB"] * bool(done.before)
        said += [f"{done.files} files left out"] * bool(done.files)
        note.write_text("; ".join(said), encoding="utf-8")
    return wheel, note.read_text(encoding="utf-8")


def project_metadata(job: Job) -> Item:
    """Return a wheel of the project's metadata, by which vLLM finds the entry point, without its code."""
    project = tomllib.loads((job.root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    name, version = project["name"], project["version"]
    groups = {"console_scripts": project.get("scripts", {}), **project.get("entry-points", {})}
    points = "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in own.items()) for group, own in groups.items())
    info = f"{name}-{version}.dist-info"
    members = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: gpu_parcel.py\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": points,
    }
    members[f"{info}/RECORD"] = "".join(f"{member},,\n" for member in [*members, f"{info}/RECORD"])
    job.cache.mkdir(parents=True, exist_ok=True)
    path = job.cache / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in members.items():
            archive.writestr(member, text)
    return Item(name, version, path, "metadata; its code is the work tree's")


def tree_size(root: Path, without: Path) -> int:
    """Return the bytes of the files that git knows or would add, less those of a folder. Raises UserError."""
    command = ["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{root} must be a git checkout, whose files travel with the parcel: {done.stderr.strip()}")
    paths = {root / name for name in done.stdout.split("\0") if name}
    return sum(path.stat().st_size for path in paths if path.is_file() and not path.is_relative_to(without))


def distribute(job: Job, items: Sequence[Item], tree: int) -> list[Parcel]:
    """Spread wheels over the smallest number of parcels that they fit into. Raises UserError where they do not fit."""
    largest_first = sorted(items, key=lambda item: -item.size)
    for number in range(1, job.parcels + 1):
        parcels = [Parcel(tree) for _ in range(number)]
        for item in largest_first:
            min(parcels, key=lambda parcel: parcel.size).items.append(item)
        if all(parcel.size <= job.limit for parcel in parcels):
            return parcels
    named = [f"{item.name} {item.size / MIB:.1f}" for item in largest_first[:NAMED]]
    if others := largest_first[NAMED:]:
        named.append(f"{len(others)} others {sum(item.size for item in others) / MIB:.1f}")
    where = "one parcel" if job.parcels == 1 else f"{job.parcels} parcels, each"
    raise UserError(
        f"--limit-mib {job.limit / MIB:g} is too small for {where} with the work tree, {tree / MIB:.1f} MiB, and "
        f"{', '.join(named)} MiB. Raise it or --parcels, or carry less."
    )


def manifest(job: Job, folder: Path, title: str, parcel: Parcel, remarks: Sequence[str]) -> str:
    """Return a parcel's contents as text, with the command that installs it."""
    rows = [(parcel.tree, "the work tree", "")]
    rows += [(item.size, f"{item.name} {item.version}", item.note) for item in parcel.items]
    width = max(len(name) for _, name, _ in rows)
    shown = folder.relative_to(job.root) if folder.is_relative_to(job.root) else folder
    pip = "python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade"
    lines = [
        f"{title}, for Python {job.python} and sm_{ARCH}: {parcel.size / MIB:.2f} of {job.limit / MIB:g} MiB",
        *(f"{size / MIB:8.2f}  {name:{width}}  {note}".rstrip() for size, name, note in rows),
        *remarks,
        "On the machine, in the work tree:",
        f"mkdir -p {WHEELS} && cp {shown}/*.whl {WHEELS} && {pip} --target {SITE} {WHEELS}/*.whl && "
        f"python3 -m compileall -q -j 0 {SITE} megatron_fleet >/dev/null; export PYTHONPATH={SITE}:$PWD",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
