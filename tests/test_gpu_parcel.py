"""tools/gpu_parcel.py and tools/slim_wheel.py: libraries and wheels made by hand, a tiny project and its packages."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from test_offline_bundle import BACKEND, HERE, SYSTEM, add_wheel, commit, locked, use_links
from test_offline_bundle import source_archive as archive_of
from waiting import HANG_S

ROOT = Path(__file__).parents[1]
PTX, CUBIN = 1, 2
MIB = 1 << 20


def tools_module(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def slim() -> ModuleType:
    return tools_module("slim_wheel")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return tools_module("gpu_parcel")


Code = tuple[int, int, bytes]
"""Kind, architecture and payload of an entry."""


def fat_binary(entries: Sequence[Code], name: bytes = b"") -> bytes:
    """As nvcc writes it; ``name`` makes the entries' headers longer."""
    body = b""
    for kind, arch, payload in entries:
        header = struct.pack("<HHIQIIHHI", kind, 0x101, 64 + len(name), len(payload), 0, 0, 7, 1, arch)
        body += header.ljust(64, b"\x11") + name + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def elf(named: dict[str, bytes]) -> bytes:
    """A 64-bit ELF file with these sections, and one without bytes."""
    names = b"\0" + b"".join(f"{name}\0".encode() for name in [*named, ".bss", ".shstrtab"])
    content, rows = b"\x7fELF\x02\x01".ljust(64, b"\0"), [bytes(64)]
    for name, data in {**named, ".bss": None, ".shstrtab": names}.items():
        size, kind = (1 << 40, 8) if data is None else (len(data), 1)
        at = names.index(f"\0{name}\0".encode()) + 1
        rows.append(struct.pack("<IIQQQQ", at, kind, 0, 0, len(content), size).ljust(64, b"\0"))
        content += data or b""
    made = bytearray(content + b"".join(rows))
    struct.pack_into("<Q", made, 0x28, len(content))
    struct.pack_into("<HHH", made, 0x3A, 64, len(rows), len(rows) - 1)
    return bytes(made)


def test_only_what_one_gpu_uses_is_kept(slim):
    old, hopper, other, text = (
        b"for Ampere".ljust(24),
        b"for Hopper".ljust(64),
        b"another one".ljust(16),
        b"PTX".ljust(32),
    )
    several = [
        (CUBIN, 80, old),
        (CUBIN, 90, hopper),
        (PTX, 90, text),
        (CUBIN, 90, other),
        (CUBIN, 100, b"Blackwell".ljust(40)),
    ]
    compiled_there = [(PTX, 80, b"older".ljust(24)), (CUBIN, 80, old), (PTX, 89, text), (PTX, 100, b"newer".ljust(24))]
    section = (
        fat_binary(several) + bytes(24) + fat_binary(compiled_there, b"a name  ") + fat_binary([(CUBIN, 120, old)])
    )
    parts = {
        ".text": b"host code 80",
        ".nv_fatbin": section,
        ".symtab": b"symbols ",
        ".strtab": b"names   ",
        ".data": b"data",
    }
    library = bytearray(elf(parts))
    done = slim.reduce_library(library, 90)

    def blank(payload: bytes) -> bytes:
        return bytes(len(payload))

    several = [(kind, arch, code if code in (hopper, other) else blank(code)) for kind, arch, code in several]
    compiled_there = [(kind, arch, code if code == text else blank(code)) for kind, arch, code in compiled_there]
    kept = (
        fat_binary(several)
        + bytes(24)
        + fat_binary(compiled_there, b"a name  ")
        + fat_binary([(CUBIN, 120, blank(old))])
    )
    expected = parts | {".nv_fatbin": kept, ".symtab": bytes(8), ".strtab": bytes(8)}
    assert library == elf(expected)
    assert (done.usable, done.after) == (2, 64 + 16 + 32)
    assert done.before == sum(len(code) for _, _, code in several + compiled_there) + len(old)


@pytest.mark.parametrize(
    "section",
    [
        b"something".ljust(32),
        fat_binary([(CUBIN, 90, b"code".ljust(16))])[:-8],  # continues behind the section's end
        struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 72) + bytes(72),  # an entry without a header
    ],
)
def test_an_unknown_layout_is_refused(slim, section):
    library = bytearray(elf({".nv_fatbin": section}))
    with pytest.raises(ValueError, match=r"layout before byte \d+ of \.nv_fatbin"):
        slim.reduce_library(library, 90)


def test_only_elf_files_are_reduced(slim):
    with pytest.raises(ValueError, match="not a 64-bit"):
        slim.reduce_library(bytearray(b"GROUP ( libc.so.6 )"), 90)


@pytest.mark.slow
@pytest.mark.in_turn(number=0, of=4)
def test_what_nvcc_writes_is_understood(slim, tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on this machine")
    source, made = tmp_path / "kernel.cu", tmp_path / "kernel.so"
    source.write_text("__global__ void twice(float *x) { x[threadIdx.x] *= 2; }\n")
    targets = [f"-gencode=arch=compute_90,code={code}" for code in ("sm_90", "compute_90")]
    targets.append("-gencode=arch=compute_80,code=sm_80")
    build = ["nvcc", "-shared", "-cudart=none", "-Xcompiler=-fPIC", *targets, "-o", made, source]
    done = subprocess.run(build, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    library = bytearray(made.read_bytes())
    (section,) = (one for one in slim.sections(library) if one.name == ".nv_fatbin")
    (entries,) = (found for found in slim.fat_binaries(library, section) if len(found) > 1)
    assert {(entry.kind, entry.arch) for entry in entries} == {(CUBIN, 80), (CUBIN, 90), (PTX, 90)}
    before = bytes(library)
    slim.reduce_library(library, 90)
    for entry in entries:
        code = slice(entry.offset, entry.offset + entry.size)
        same = (entry.kind, entry.arch) == (CUBIN, 90)
        assert library[code] == (before[code] if same else bytes(entry.size))


def wheel_with(folder: Path, name: str, members: dict[str, bytes]) -> Path:
    """A wheel whose RECORD knows no hashes."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    folder.mkdir(exist_ok=True)
    add_wheel(folder, name)
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        for member, content in members.items():
            info = zipfile.ZipInfo(member)
            info.external_attr = (stat.S_IFREG | 0o755) << 16
            archive.writestr(info, content)
    return path


CODE = fat_binary([(CUBIN, 80, b"x" * 5000), (CUBIN, 90, b"y" * 5000)])


def test_a_wheel_packed_anew_is_one_that_pip_installs(slim, tmp_path):
    members = {"pack/kernels.so": elf({".nv_fatbin": CODE}), "pack/a,b.txt": b"text", "pack/unused/header.h": b"unused"}
    published = wheel_with(tmp_path / "published", "pack", members)
    wheel = tmp_path / "pack-1.0-1sm90-py3-none-any.whl"
    done = slim.repack(published, wheel, ["*/unused/*"], 90)
    assert (done.before, done.after, done.usable, done.files) == (10000, 5000, 1, 1)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        rows = list(csv.reader(archive.read("pack-1.0.dist-info/RECORD").decode().splitlines()))
        for name, hashed, size in rows[:-1]:
            content = archive.read(name)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            assert (hashed, int(size)) == (f"sha256={digest}", len(content))
    assert [name for name, _, _ in rows] == names and rows[-1][1:] == ["", ""]
    assert "pack/unused/header.h" not in names and {"pack/a,b.txt", "pack/kernels.so"} < set(names)
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", site, wheel]
    subprocess.run(pip, check=True, timeout=HANG_S)
    assert os.access(site / "pack" / "kernels.so", os.X_OK)
    (installed,) = metadata.distributions(path=[str(site)])
    assert installed.version == "1.0" and (site / "pack" / "__init__.py").is_file()


def test_a_wheel_without_code_for_the_gpu_is_refused(slim, tmp_path):
    published = wheel_with(tmp_path / "published", "pack", {"pack/kernels.so": elf({".nv_fatbin": CODE})})
    with pytest.raises(ValueError, match="no library has device code for sm_120"):
        slim.repack(published, tmp_path / "pack.whl", [], 120)


PYPROJECT = """
[project]
name = "tiny"
version = "0.3"
[project.scripts]
tiny-run = "tiny.cli:main"
[project.entry-points."vllm.general_plugins"]
tiny = "tiny.plugin:register"
"""


@pytest.fixture
def project(tmp_path, monkeypatch, tool) -> Path:
    """A project whose trainer needs ``first``, which needs others."""
    links, made = tmp_path / "links", tmp_path / "project"
    links.mkdir()
    (made / "requirements").mkdir(parents=True)
    use_links(monkeypatch, made)
    lock = add_wheel(links, "first", requires="needed>=1\nRequires-Dist: there<2\nRequires-Dist: huge") + add_wheel(
        links, "needed", requires="first; extra == 'more'\nRequires-Dist: gone; python_version < '3'"
    )
    kernels = wheel_with(links, "kernels", {"kernels/library.so": elf({".nv_fatbin": CODE})})
    lock += locked("kernels", "1.0", kernels.read_bytes())
    (made / "requirements" / "engine-gpu.lock").write_text(lock + add_wheel(links, "tooling"))
    (made / "requirements" / "engine-gpu-source.lock").write_text(locked("built", "1.0", archive_of("built")))
    (links / "built-1.0.tar.gz").write_bytes(archive_of("built"))
    (made / "pyproject.toml").write_text(PYPROJECT)
    (made / "data").write_bytes(os.urandom(2 * MIB))
    (made / ".gitignore").write_text("/ignored\n")
    (made / "ignored").write_bytes(bytes(MIB))
    commit(made)
    monkeypatch.setattr(tool, "PYTHONS", {"gpu": (HERE,)})
    monkeypatch.setattr(tool, "TRAINER", ("first",))
    monkeypatch.setattr(tool, "ADDITIONS", {"vllm": ("kernels",), "transformer-engine": ("built",)})
    monkeypatch.setattr(tool, "LEFT_OUT", {"huge"})
    monkeypatch.setattr(tool, "FILES_LEFT_OUT", {"kernels": ("kernels/data",)})
    monkeypatch.setattr(tool, "BUILD_TOOLS", ("tooling",))
    return made


def run(tool: ModuleType, project: Path, *more: str) -> int:
    have = project.parent / "have.txt"
    have.write_text("Package Version\n------- -------\nThere   3.0\n")
    options = ["--have", str(have), "--cache", str(project.parent / "cache"), *more]
    status: int = tool.main([str(project / "parcels"), *options], project)
    return status


@pytest.mark.slow
@pytest.mark.in_turn(number=1, of=4)
def test_a_parcel_has_what_the_machine_lacks_and_says_so(tool, project, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(tool, "SITE", str(tmp_path / "site"))
    monkeypatch.setattr(tool, "WHEELS", str(tmp_path / "wheels"))
    assert run(tool, project, "--with", "vllm") == 0
    parcel = project / "parcels" / "1"
    wheels = {path.name: path.stat().st_size for path in parcel.glob("*.whl")}
    shown = capfd.readouterr().out
    assert (parcel / "MANIFEST.txt").read_text() == shown
    table = re.findall(r"^ +(\d+\.\d\d)  (\S+ \S+)(?: +(.*))?$", shown, re.MULTILINE)
    assert {name for _, name, _ in table} == {"the work", "first 1.0", "needed 1.0", "kernels 1.0", "tiny 0.3"}
    assert ("device code 0.0 to 0.0 MiB; 1 files left out" in {note for _, _, note in table}) and len(wheels) == 4
    tree = sum(
        path.stat().st_size for path in [*project.glob("requirements/*"), *project.glob("[!i]*")] if path.is_file()
    )
    assert f"{(tree + sum(wheels.values())) / MIB:.2f} of 64 MiB" in shown.splitlines()[0]
    assert f"\n{tree / MIB:8.2f}  the work tree\n" in shown
    assert "first asks for there<2; the machine has 3.0." in shown and "although metadata names them: huge." in shown
    # In the tree, a parcel of before is no part of the tree.
    assert run(tool, project, "--with", "vllm") == 0 and capfd.readouterr().out == shown
    command = shown.splitlines()[-1].replace("python3", sys.executable)
    subprocess.run(["sh", "-c", f"{command} && {sys.executable} -c 'import first, kernels'"], cwd=project, check=True)
    installed = {one.name: one for one in metadata.distributions(path=[str(tmp_path / "site")])}
    assert set(installed) == {"first", "needed", "kernels", "tiny"}
    points = {(point.group, point.name, point.value) for point in installed["tiny"].entry_points}
    expected = {
        ("console_scripts", "tiny-run", "tiny.cli:main"),
        ("vllm.general_plugins", "tiny", "tiny.plugin:register"),
    }
    assert points == expected and not (tmp_path / "site" / "tiny").exists()


@pytest.mark.slow
@pytest.mark.in_turn(number=2, of=4)
def test_too_large_a_parcel_is_refused_and_two_are_made(tool, project, capfd):
    for letter in "ab":
        (project.parent / "links" / letter).mkdir()
    tree = 2 + 0.01
    lock = project / "requirements" / "engine-gpu.lock"
    links = project.parent / "links"
    for name in ("kernels", "needed"):
        made = wheel_with(links, name, {f"{name}/large": os.urandom(MIB)})
        lines = [line for line in re.split(r"(?m)^(?=\w)", lock.read_text()) if not line.startswith(name)]
        lock.write_text("".join(lines) + locked(name, "1.0", made.read_bytes()))
    assert run(tool, project, "--with", "vllm", "--limit-mib", f"{tree + 1.5}") == 2
    said = capfd.readouterr().err.splitlines()[-1]
    assert re.search(r"--limit-mib 3.51 is too small for one parcel with the work tree, 2\.0 MiB, and ", said)
    assert re.search(r"(kernels|needed) 1\.0, (kernels|needed) 1\.0, first 0\.0, tiny 0\.0 MiB", said)
    assert not (project / "parcels").exists()
    assert run(tool, project, "--with", "vllm", "--limit-mib", f"{tree + 1.5}", "--parcels", "2") == 0
    one, two = ({path.name for path in (project / "parcels" / number).iterdir()} for number in "12")
    assert any(name.startswith("kernels") for name in one ^ two) and not (one & two) - {"MANIFEST.txt"}
    # Those of an earlier call make place.
    assert run(tool, project) == 0
    assert sorted(path.name for path in (project / "parcels").iterdir()) == ["1"]


@pytest.mark.slow
@pytest.mark.in_turn(number=3, of=4)
def test_what_has_no_wheel_is_built_once_for_the_pytorch_of_the_machine(tool, project, tmp_path, monkeypatch, capfd):
    backend = "import os, pathlib\n" + BACKEND.replace(
        "    info =", f"    pathlib.Path({str(tmp_path / 'built')!r}).write_text(os.environ['CPATH'])\n    info ="
    )
    monkeypatch.setitem(
        sys.modules["test_offline_bundle"].SOURCES, "built", {"pyproject.toml": SYSTEM, "backend.py": backend}
    )
    source = archive_of("built")
    (project.parent / "links" / "built-1.0.tar.gz").write_bytes(source)
    (project / "requirements" / "engine-gpu-source.lock").write_text(locked("built", "1.0", source))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert run(tool, project, "--with", "transformer-engine") == 2
    assert f"CUDA_HOME: {tmp_path / 'cuda'} has no headers of CUDA" in capfd.readouterr().err
    (tmp_path / "cuda" / "include" / "crt").mkdir(parents=True)
    (tmp_path / "cuda" / "include" / "crt" / "host_config.h").touch()
    assert run(tool, project, "--with", "transformer-engine") == 0
    assert str(tmp_path / "cuda" / "include") in (tmp_path / "built").read_text()
    assert "built 1.0" in capfd.readouterr().out
    (tmp_path / "built").unlink()
    assert run(tool, project, "--with", "transformer-engine") == 0
    assert not (tmp_path / "built").exists()


@pytest.mark.slow
@pytest.mark.in_turn(number=0, of=4)
def test_only_the_locked_file_is_carried(tool, project, capfd):
    assert run(tool, project) == 0
    lock = project / "requirements" / "engine-gpu.lock"
    text = add_wheel(project.parent / "links", "first")
    assert run(tool, project) == 0  # what the cache has is as locked; the index has another
    lock.write_text(re.sub(r"(?s)^first.*?\n(?=\w)", text, lock.read_text()))
    assert run(tool, project) == 0
    sha = hashlib.sha256((project / "parcels" / "1" / "first-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    assert sha in text
    add_wheel(project.parent / "links", "first")
    shutil.rmtree(project.parent / "cache")
    assert run(tool, project) == 2
    assert "pip download failed for first 1.0" in capfd.readouterr().err


def test_lists_of_packages(tool):
    listed = "Package    Version\n---------- -------\nPyYAML     6.0.3\nnumba==0.68.1\n\ntyping_extensions\n"
    assert tool.read_packages(listed, "file") == {"pyyaml": "6.0.3", "numba": "0.68.1", "typing-extensions": ""}
    with pytest.raises(tool.UserError, match="--have file, line 2: expected NAME==VERSION or NAME, there is -e git"):
        tool.read_packages("numba\n-e git+file://x", "file")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--python", "no-such-python"], "--python no-such-python: No such file"),
        (["--have", "no-such-file"], "--have no-such-file: "),
    ],
)
def test_bad_options_are_refused(tool, tmp_path, monkeypatch, capfd, options, said):
    monkeypatch.setattr(tool, "PYTHONS", {"gpu": (HERE,)})
    assert tool.main([str(tmp_path), *options]) == 2
    assert said in capfd.readouterr().err


def test_the_python_must_be_the_locked_ones(tool, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tool, "PYTHONS", {"gpu": ("3.99",)})
    assert tool.main([str(tmp_path)]) == 2
    assert f"is Python {HERE}; engine-gpu.lock is made for 3.99" in capfd.readouterr().err


def test_every_name_is_one_of_the_lock_files(tool):
    locks = ("engine-gpu.lock", "engine-gpu-source.lock")
    known = {pin.name for lock in locks for pin in tool.read_lock(ROOT / "requirements" / lock)}
    named = {*tool.TRAINER, *tool.LEFT_OUT, *tool.FILES_LEFT_OUT, *tool.BUILD_TOOLS}
    named |= {name for names in tool.ADDITIONS.values() for name in names}
    assert named - known == set()


def test_the_parcel_has_what_the_battery_needs(tool):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks" / "gpu")
        parts = importlib.import_module("battery.registry").PARTS
    without_engines = [part for part in parts if "vllm" not in part.packages]
    assert len(without_engines) > 5
    assert {name for part in without_engines for name in part.packages} <= {"torch", *tool.TRAINER}
