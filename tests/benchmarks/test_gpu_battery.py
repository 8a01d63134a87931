"""The battery's parts run in processes of their own, and whatever one does, its file says so and the next one runs."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import tarfile
import time
from types import SimpleNamespace

import psutil
import pytest


@pytest.fixture
def run():
    import run

    return run


def made(name, **more):
    import battery_doubles
    from battery.registry import Part

    return Part(name, battery_doubles.__name__, f"a part that is {name}", 60, (), {}, {}, **more)


@pytest.fixture
def battery(run, tmp_path, monkeypatch):
    """Make a `Battery` of a machine without GPUs, in ``tmp_path``."""
    from battery.hardware import Machine

    monkeypatch.setattr(run, "probe", lambda device: Machine("cpu"))
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def make(*options):
        args = run.parser().parse_args(["--device", "cpu", "--out", str(tmp_path / "out"), *options])
        args.scratch = scratch
        return run.Battery(args, Machine("cpu"))

    return make


def runs(battery, name):
    return len((battery.out / "files" / f"{name}.runs").read_text())


def stored(battery, name):
    return json.loads((battery.out / f"{name}.json").read_text())


def test_without_a_gpu_every_part_is_skipped_with_its_reason(run, tmp_path, monkeypatch, capsys):
    from battery.hardware import Machine
    from battery.registry import PARTS

    monkeypatch.setattr(run, "probe", lambda device: Machine("cpu"))
    assert run.main(["--out", str(tmp_path)]) == 0
    found = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "cpu").glob("*.json")}
    assert found.keys() == {part.name for part in PARTS}
    assert {result["status"] for result in found.values()} == {"skipped"}
    assert found["layers"]["reason"] == "needs a GPU, and torch finds none here"
    assert found["ranks"]["reason"] == "needs 2 GPUs, and torch finds none here"
    assert "needs a GPU" in capsys.readouterr().out


H100 = {"gpus": 1, "gpu_gib": 79.0, "host_gib": 125.0}


@pytest.mark.parametrize(
    ("name", "lacking", "reason"),
    [
        ("layers", {}, None),
        ("sync", {}, None),
        ("loop", {}, None),
        ("ranks", {}, "needs 2 GPUs, and torch finds 1 here"),
        ("sync", {"packages": ("vllm", "megatron_fleet")}, "vllm and megatron_fleet are not installed"),
        ("layers", {"packages": ("megatron-core",)}, "megatron-core is not installed"),
        ("loop", {"episode_problem": "it is missing"}, "it is missing"),
        ("layers", {"gpu_gib": 40.0}, "needs 70 GiB of GPU memory, and there are 40"),
        ("offload", {"host_gib": 16.0}, "needs 40 GiB of host memory, and there are 16"),
        ("checkpoint", {"disk": 3.0}, "needs 25 GiB of free disk, and there are 3"),
    ],
)
def test_what_a_machine_lacks(name, lacking, reason):
    from battery.hardware import PACKAGES, Machine
    from battery.registry import BY_NAME

    disk, without = lacking.pop("disk", 60.0), lacking.pop("packages", ())
    packages = {package: "1" for package in PACKAGES if package not in without and package != "transformer-engine"}
    machine = Machine("NVIDIA H100 80GB HBM3", packages=packages, **{**H100, **lacking})
    assert machine.slug == "nvidia-h100-80gb-hbm3"
    assert BY_NAME[name].problem(machine, "cuda", "full", disk) == reason


def test_each_ending_is_recorded_and_the_next_part_runs(battery):
    mine = battery("--archive", str(battery().out / "all.tar.gz"))
    results = mine.run([made(name) for name in ("crashes", "raises", "unavailable", "good")])
    assert {name: result.status for name, result in results.items()} == {
        "crashes": "failed",
        "raises": "failed",
        "unavailable": "skipped",
        "good": "done",
    }
    assert results["crashes"].reason == "its process ended by signal SIGABRT"
    assert "about to crash" in results["crashes"].error.splitlines()
    assert results["raises"].reason == "ValueError: first line"
    assert "second line" in results["raises"].error
    assert results["unavailable"].reason == "nothing of the sort is here"
    assert results["good"].tables == {"rows": [{"a": 1, "b": None}]}
    for name, result in results.items():
        assert stored(mine, name) == dataclasses.asdict(result) and result.figures["one"] == 1
    assert list(mine._args.scratch.iterdir()) == []
    with tarfile.open(mine.out / "all.tar.gz") as archive:
        assert "out/cpu/good.json" in archive.getnames()


def test_a_variant_that_fails_is_a_problem_of_its_part_alone(battery):
    (result,) = battery().run([made("varied")]).values()
    assert [row["name"] for row in result.tables["rows"]] == ["measures", "measures again"]
    assert result.left_out == {"lacks": "it is not installed"}
    assert result.problems == {
        "fails": "ZeroDivisionError: by nothing",
        "dies": "its process ended with status 7; see the log",
    }
    assert result.status == "failed" and result.figures["measures_again"] == 1


class Clock:
    """The time of `battery.supervise`, which a test can move."""

    def __init__(self):
        self.passed = 0.0

    def monotonic(self):
        return time.monotonic() + self.passed

    def skip(self):
        self.passed += 1e6


@pytest.fixture
def clock(monkeypatch):
    from battery import supervise

    clock = Clock()
    own = {name: getattr(time, name) for name in ("sleep", "strftime", "gmtime")}
    monkeypatch.setattr(supervise, "time", SimpleNamespace(monotonic=clock.monotonic, **own))
    return clock


def is_running(pid):
    """A zombie, which its new parent has not asked about, has ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def when_hanging(monkeypatch, action):
    from battery import show

    def tick(self, result):
        if result is not None and result.doing == "hanging":
            action()

    monkeypatch.setattr(show.Progress, "tick", tick)


def test_a_part_that_hangs_is_ended_at_its_limit_with_all_that_it_started(battery, clock, monkeypatch):
    when_hanging(monkeypatch, clock.skip)
    mine = battery()
    results = mine.run([made("hangs"), made("good")])
    hung = results["hangs"]
    assert (hung.status, hung.reason) == ("timeout", "ended at its limit of 3600 s while measuring: hanging")
    assert stored(mine, "hangs")["figures"]["one"] == 1
    assert not is_running(hung.figures["child"])
    assert results["good"].status == "done"
    again = battery().run([made("hangs")])["hangs"]
    assert again.status == "timeout" and runs(mine, "hangs") == 1  # it would hang again


def test_a_part_without_enough_time_is_left_to_the_next_command(battery, clock, monkeypatch):
    when_hanging(monkeypatch, clock.skip)
    mine = battery("--minutes", "45")
    assert mine.run([made("hangs")])["hangs"].status == "interrupted"
    skipped = battery("--minutes", "20").run([made("hangs")])["hangs"]
    assert (skipped.status, skipped.reason) == ("skipped", "too little is left of --minutes 20; run the command again")
    assert stored(mine, "hangs")["figures"]["one"] == 1  # measurements stay
    assert runs(mine, "hangs") == 1
    battery().run([made("hangs")])
    assert runs(mine, "hangs") == 2


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.slow
def test_an_interrupted_battery_goes_on_without_repeating_what_is_done(battery, monkeypatch):
    when_hanging(monkeypatch, interrupt)
    mine = battery()
    with pytest.raises(KeyboardInterrupt):
        mine.run([made("good"), made("hangs"), made("raises")])
    left = stored(mine, "hangs")
    assert left["status"] == "running" and left["figures"]["one"] == 1
    assert not is_running(left["figures"]["child"])
    with pytest.raises(KeyboardInterrupt):
        battery().run([made("good"), made("hangs")])
    assert battery().run([made("good"), made("raises")])["good"].status == "done"
    assert [runs(mine, name) for name in ("good", "hangs", "raises")] == [1, 2, 1]
    battery("--again").run([made("good")])
    assert runs(mine, "good") == 2


def test_a_result_of_other_code_or_another_device_is_no_result(battery):
    from battery.hardware import Machine
    from battery.results import code_version, read

    mine = battery()
    mine.run([made("good")])
    result = read(mine.out / "good.json")
    assert result.is_current(code_version(), Machine("cpu"), "tiny")
    assert not result.is_current("other", Machine("cpu"), "tiny")
    assert not result.is_current(code_version(), Machine("NVIDIA H200"), "tiny")
    assert not result.is_current(code_version(), Machine("cpu"), "full")


def test_a_failed_part_makes_the_exit_status(run, tmp_path, monkeypatch):
    from battery.hardware import Machine

    monkeypatch.setattr(run, "probe", lambda device: Machine("cpu"))
    for name in ("raises", "good"):
        monkeypatch.setitem(run.BY_NAME, name, made(name))
    common = ["--device", "cpu", "--out", str(tmp_path), "--parts"]
    assert run.main([*common, "good"]) == 0
    assert run.main([*common, "good", "raises"]) == 1
    assert run.main([*common, "good", "--list"]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--parts", "nothing"], "there is no part nothing"), (["--minutes", "0"], "--minutes 0 is not above 0")],
)
def test_wrong_options_are_refused(run, options, message, capsys):
    with pytest.raises(SystemExit):
        run.main(options)
    assert message in capsys.readouterr().err


def test_a_python_without_torch_is_one_sentence(run, tmp_path, monkeypatch, capsys):
    from battery import hardware

    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(hardware.sys, "executable", str(broken))
    with pytest.raises(SystemExit):
        run.main(["--list"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"{broken} cannot describe this machine: ModuleNotFoundError: No module named 'torch'")


def test_a_part_sees_the_gpus_that_the_battery_may_use(monkeypatch):
    from battery.hardware import environment

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment("cuda", 2) == {"CUDA_VISIBLE_DEVICES": "0,1", "PYTHONDONTWRITEBYTECODE": ""}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c")
    assert environment("cuda", 1)["CUDA_VISIBLE_DEVICES"] == "GPU-a"
    assert environment("cpu", 1)["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.slow
def test_the_machine_is_described_by_a_process_of_its_own():
    from battery.hardware import probe

    machine = probe("cpu")
    assert (machine.device, machine.gpus, machine.cores) == ("cpu", 0, os.cpu_count())
    assert machine.engine_problem == "there is no GPU"
    assert machine.packages.keys() >= {"torch", "pydantic"} and machine.host_gib > 0


def test_every_module_of_a_part_exists_and_half_an_hour_holds_the_first_five():
    from battery.registry import PARTS

    assert [part.name for part in PARTS if importlib.util.find_spec(part.module) is None] == []
    assert sum(part.minutes for part in PARTS[:5]) <= 28
