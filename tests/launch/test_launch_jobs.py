"""`mfleet launch`: what is refused, what is rendered, and what schedulers' commands are told, by stand-ins for them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from namespace_hosts import ROOT

from megatron_fleet import cli
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.sweep import sweep
from megatron_fleet.launch import plan as planning
from megatron_fleet.launch.job import Job, Record, State
from megatron_fleet.launch.kubernetes import Kubernetes, jobset_name
from megatron_fleet.launch.plan import plan
from megatron_fleet.launch.skypilot import NO_SEVERAL_HOSTS, SkyPilot
from megatron_fleet.launch.slurm import Slurm

STORE = "checkpoint.store.url=s3://bucket/prefix"
TWO = ("parallel.data=2", "cluster.nodes=2", "checkpoint.export.last=false")
SECRETS = {
    "WANDB_API_KEY": "planted-wandb-key",
    "AWS_SECRET_ACCESS_KEY": "planted-aws-key",
    "FLEET_API_KEY": "planted-fleet-key",
    "OPENAI_API_KEY": "planted-openai-key",
}
SHELL = {
    "PATH": os.environ["PATH"],
    "HOME": "/nowhere",
    "NCCL_DEBUG": "INFO",
    "MFLEET_TOKEN": "of another run",
    **SECRETS,
}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planning, "commit", lambda: "abc")


def job(*overrides: str, kind: str = "slurm") -> Job:
    return plan([["experiment=quickstart", f"cluster={kind}", *overrides]], SHELL)


def slurm_script(*overrides: str) -> tuple[str, tuple[str, ...]]:
    planned = job(*overrides)
    Slurm().check(planned)
    rendered = Slurm().render(planned)
    return rendered.files["job.sbatch"], rendered.commands[0]


def sky_task(*overrides: str) -> dict:
    planned = job(STORE, *overrides, kind="skypilot")
    SkyPilot().check(planned)
    return yaml.safe_load(SkyPilot().render(planned).files["job.yaml"])


def jobset(*overrides: str) -> dict:
    planned = job("launch.image=registry/mf:1", *overrides, kind="kubernetes")
    Kubernetes().check(planned)
    return yaml.safe_load(Kubernetes().render(planned).files["job.yaml"])


@pytest.mark.parametrize(
    ("launcher", "kind", "overrides", "said"),
    [
        (Slurm(), "slurm", ["cluster.ranks=external"], "the launcher sets it"),
        (SkyPilot(), "skypilot", ["launch.kubernetes.claim=runs"], "the hosts' disks end with the job"),
        (Slurm(), "slurm", ["run.resume=never"], "would discard its earlier training"),
        (Slurm(), "slurm", ["cluster.nodes=2"], "1 ranks .* cannot be divided"),
        (Slurm(), "slurm", ["trainer=hosted", "hosted.base_model=a/b"], "a hosted run uses no GPUs"),
        (Slurm(), "slurm", ["parallel.data=4", "launch.gpus=2"], "would have 4 ranks"),
        (Slurm(), "slurm", ["launch.environment={FLEET_API_KEY: x}"], "one of a secret"),
        (Slurm(), "slurm", ["launch.environment={A-B: x}"], "A-B is not the name of a variable"),
        (Slurm(), "slurm", ["launch.secrets=[MY_KEY]"], "MY_KEY is not set in this shell"),
        (
            Slurm(),
            "slurm",
            ["launch.slurm.rollout_hosts=1", "rollout.engine.colocated=true"],
            "rollout.engine.colocated=false",
        ),
        (Slurm(), "slurm", ["launch.shared_disk=false", STORE], "set one of them"),
        (Slurm(), "slurm", [*TWO[:2], "launch.min_hosts=1", "rollout.engine.replicas=1"], "not a whole number on 1"),
        (SkyPilot(), "skypilot", [], "set checkpoint.store.url"),
        (SkyPilot(), "skypilot", [STORE, *TWO[:2]], "checkpoint.export.last=true"),
        (SkyPilot(), "skypilot", [STORE, "run.resume=5"], "would go back to that step"),
        (SkyPilot(), "skypilot", [STORE, "launch.install=false"], "set launch.image, or launch.install=true"),
        (SkyPilot(), "skypilot", [STORE, "launch.skypilot.spot=[azure]"], "names azure, which"),
        (SkyPilot(), "skypilot", [STORE, *TWO, "launch.skypilot.infra=[vast]"], "none of vast joins"),
        (Kubernetes(), "kubernetes", [STORE], "launch.image must be set"),
        (Kubernetes(), "kubernetes", [STORE, "launch.image=a", "launch.install=true"], "set it to false"),
    ],
)
def test_a_job_that_could_not_work_is_refused(launcher, kind, overrides, said):
    with pytest.raises(UserError, match=said):
        launcher.check(job(*overrides, kind=kind))


def test_what_is_sent_to_other_machines_is_a_commit(monkeypatch):
    monkeypatch.setattr(planning, "commit", lambda: None)
    with pytest.raises(UserError, match="has uncommitted changes"):
        SkyPilot().check(job(STORE, kind="skypilot"))


def test_a_job_gets_the_secrets_that_its_run_uses_and_no_others():
    assert job().secrets == ()
    planned = job(STORE, "logging.wandb.project=p", "launch.secrets=[FLEET_API_KEY]")
    assert planned.secrets == ("AWS_SECRET_ACCESS_KEY", "FLEET_API_KEY", "WANDB_API_KEY")
    assert "OPENAI_API_KEY" not in planned.environ and "MFLEET_TOKEN" not in planned.environ
    assert planned.environ["WANDB_API_KEY"] == SECRETS["WANDB_API_KEY"]


def test_a_provider_with_a_script_for_nccl_gets_no_variables_of_ours():
    assert job().environ["NCCL_DEBUG"] == "INFO"
    assert not [name for name in job("launch.fabric=provider").environ if name.startswith("NCCL_")]
    assert "export NCCL_IB_DISABLE=1" in slurm_script("launch.fabric=ethernet")[0]
    assert "NCCL_" not in slurm_script("launch.fabric=auto")[0]


def test_every_attempt_is_one_at_the_same_run(tmp_path):
    first, second = job(), job()
    assert first.runs[0].id != second.runs[0].id
    assert first.runs[0].overrides[-1] == f"run.id={first.runs[0].id}"
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "run.json").write_text('{"id": "mine_1", "name": "quickstart"}')
    assert job().runs[0].id == "mine_1"
    assert job("run.id=other").runs[0].id == "other"


def test_the_runs_of_a_sweep_have_names_and_folders_of_their_own(tmp_path):
    sets = sweep(["experiment=quickstart", "cluster=slurm", "run.seed=1,2", "algorithm=grpo,rloo", "run.out=here"])
    assert [[text for text in texts if "=" in text][2:4] for texts in sets] == [
        ["run.seed=1", "algorithm=grpo"],
        ["run.seed=1", "algorithm=rloo"],
        ["run.seed=2", "algorithm=grpo"],
        ["run.seed=2", "algorithm=rloo"],
    ]
    planned = plan(sets, SHELL)
    assert [run.out for run in planned.runs] == [tmp_path / "here" / str(index) for index in range(4)]
    assert "run.out=here/3" in planned.runs[3].overrides and "run.name=quickstart_3" in planned.runs[3].overrides
    assert len({run.id for run in planned.runs}) == 4
    script, command = Slurm().render(planned).files["job.sbatch"], Slurm().render(planned).commands[0]
    assert "#SBATCH --array=0-3\n" in script and command.count("--next") == 3


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["run.seed=1"], "no override has several values"),
        (["run.seed=range(1,2000)"], "1999 runs are more"),
        (["policy.optimizer.lr=interval(0,1)"], "names no separate values"),
    ],
)
def test_a_sweep_that_is_none_is_refused(overrides, said):
    with pytest.raises(UserError, match=said):
        sweep(overrides)


def test_a_sweep_of_launching_is_refused():
    with pytest.raises(UserError, match="launched alike"):
        plan(sweep(["experiment=quickstart", "cluster=slurm", "launch.gpus=0,1"]), SHELL)


def test_the_script_has_the_options_of_the_section():
    script, command = slurm_script(
        *TWO, "parallel.tensor=2", "launch.gpus=4", "launch.slurm.partition=hopper", "launch.slurm.time=1-00:00:00"
    )
    options = re.findall(r"^#SBATCH (.*)$", script, re.M)
    assert {"--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=4", "--partition=hopper", "--requeue"} <= set(options)
    assert {"--time=1-00:00:00", "--signal=B:USR1@600", "--exclusive", "--job-name=quickstart"} <= set(options)
    assert len({option.split("=")[0] for option in options}) == len(options)
    assert command[:2] == ("sbatch", "--parsable") and "parallel.tensor=2" in command
    # sbatch heeds no option after the first command.
    assert script.rindex("#SBATCH ") < script.index("\nexport ") < script.index("\nset -euo")


def test_a_second_component_has_its_own_options():
    script, _ = slurm_script(
        "rollout.engine.colocated=false",
        "launch.slurm.rollout_hosts=3",
        "launch.slurm.rollout_options={partition: l4}",
    )
    first, second = script.split("#SBATCH hetjob\n")
    assert "#SBATCH --requeue" in first and "#SBATCH --nodes=1" in first
    assert re.findall(r"^#SBATCH (\S+)", second, re.M)[:2] == ["--nodes=3", "--ntasks-per-node=1"]
    assert "#SBATCH --partition=l4" in second


def test_engines_that_the_hosts_decide_about_are_left_to_fewer_hosts():
    keys = ("parallel.data=4", "cluster.nodes=4", "launch.min_hosts=3", "rollout.engine.replicas=auto", "eval=none")
    script, _ = slurm_script(*keys)
    assert "export MFLEET_WITH_3_HOSTS=parallel.data=3\n" in script


def test_a_job_may_start_with_fewer_hosts_whose_layout_is_valid():
    script, _ = slurm_script(
        "parallel.data=4", "cluster.nodes=4", "launch.min_hosts=3", "rollout.engine.replicas=4", "eval=none"
    )
    # With --ntasks-per-node, Slurm allocates only the minimum of the range.
    assert "#SBATCH --nodes=3-4\n" in script and "#SBATCH --ntasks" not in script
    assert "export MFLEET_RANKS_PER_HOST=1\n" in script
    assert "export MFLEET_WITH_3_HOSTS='parallel.data=3 rollout.engine.replicas=3'" in script


def test_places_are_tried_in_order_with_each_kind_of_gpu():
    task = sky_task(
        "launch.skypilot.infra=[slurm,runpod,gcp]",
        "launch.skypilot.accelerators=[H100,B200]",
        "launch.skypilot.spot=[gcp]",
    )
    tried = task["resources"]["ordered"]
    assert [(one["infra"], one["accelerators"], one.get("use_spot", False)) for one in tried] == [
        ("slurm", "H100:8", False),
        ("slurm", "B200:8", False),
        ("runpod", "H100:8", False),
        ("runpod", "B200:8", False),
        ("gcp", "H100:8", True),
        ("gcp", "B200:8", True),
    ]
    assert "accelerators" not in task["resources"]
    recovery = task["resources"]["job_recovery"]
    assert recovery["recover_on_exit_codes"] == [os.EX_TEMPFAIL] and recovery["max_restarts_on_errors"] == 0


def test_the_gpu_of_the_run_is_asked_for_first():
    one_place = "launch.skypilot.infra=[gcp]"
    for keys, kinds in (
        ((), ["H100", "H200", "B200"]),
        (("cluster.gpu=H200",), ["H200", "H100", "B200"]),
        (("cluster.gpu=A100",), ["A100", "H100", "H200", "B200"]),
        (("cluster.gpu=H200", "launch.skypilot.accelerators=[B200]"), ["B200"]),
    ):
        tried = sky_task(one_place, *keys)["resources"]["ordered"]
        assert [one["accelerators"] for one in tried] == [f"{kind}:8" for kind in kinds]


TOO_LARGE_FOR_H100 = ("parallel.tensor=4", "parallel.data=2", "policy.recompute=none")


def test_gpus_that_the_run_does_not_fit_are_not_asked_for():
    large = ("experiment=qwen3_8b_fleet", *TOO_LARGE_FOR_H100, "checkpoint.export.last=false")
    tried = sky_task(*large, "launch.skypilot.accelerators=[H100,H200,H100-SXM]")["resources"]["ordered"]
    assert {one["accelerators"] for one in tried} == {"H200:8", "H100-SXM:8"}  # of the last nothing is known
    # The shape of a model is known by its name, or nowhere before the job runs.
    assert any(one["accelerators"] == "H100:8" for one in sky_task(*large, "model.path=/m")["resources"]["ordered"])
    with pytest.raises(
        UserError, match=r"accelerators=H100: the run fits into none of them.*H100: memory: phase train"
    ):
        sky_task(*large, "launch.skypilot.accelerators=[H100]")


def test_the_user_is_told_which_gpus_are_not_asked_for_and_why(capsys):
    words = ["experiment=qwen3_8b_fleet", "cluster=skypilot", STORE, "checkpoint.export.last=false"]
    assert cli.main(["launch", "--dry-run", *words, *TOO_LARGE_FOR_H100]) == 0
    told = capsys.readouterr().err
    assert re.search(
        r"^mfleet: H100 is left out of launch.skypilot.accelerators: memory: phase train takes .* GiB", told, re.M
    )
    assert "H200" not in told


def test_places_that_cannot_join_hosts_are_left_out_for_several():
    places = {one["infra"] for one in sky_task(*TWO)["resources"]["ordered"]}
    assert places == {"slurm", "lambda", "nebius", "kubernetes", "gcp", "aws"}
    assert places.isdisjoint(NO_SEVERAL_HOSTS)


def test_arguments_arrive_as_they_were_given(tmp_path):
    odd = 'run.name=it\'s "a" $HOME `x` ; name'
    task = sky_task(odd)
    shown = task["run"].replace('exec "${MFLEET_PROJECT:-.}/launch/host.sh"', "printf '%s\\n'")
    environ = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    done = subprocess.run(
        ["bash", "-c", shown],
        env=environ | task["envs"] | {"PATH": SHELL["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split("\n")[:-2] == ["experiment=quickstart", "cluster=skypilot", STORE, odd]


def test_a_jobset_has_a_pod_for_each_host():
    spec = jobset(STORE, *TWO, "launch.kubernetes.queue=training", "launch.kubernetes.node_selector={gpu: h100}")
    (host,) = spec["spec"]["replicatedJobs"]
    pods = host["template"]["spec"]
    (container,) = pods["template"]["spec"]["containers"]
    assert (pods["parallelism"], pods["completions"]) == (2, 2)
    assert spec["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "training"}
    name = spec["metadata"]["name"]
    assert {"name": "HEAD", "value": f"{name}-host-0-0.{name}"} in container["env"]
    assert container["image"] == "registry/mf:1" and "parallel.data=2" in container["args"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert pods["template"]["spec"]["nodeSelector"] == {"gpu": "h100"}
    kept = jobset("launch.kubernetes.claim=runs", *TWO[:2])["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    assert kept["spec"]["volumes"][1] == {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}


def test_a_restarted_jobset_is_one_that_did_not_end_for_good():
    failing = jobset(STORE)["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"][1]
    assert failing["action"] == "FailJob" and failing["onExitCodes"]["operator"] == "NotIn"
    again = set(failing["onExitCodes"]["values"])
    assert os.EX_TEMPFAIL in again and again.isdisjoint({0, 1, 2})


def test_names_of_jobsets_are_labels():
    long = job("run.id=A_very.long-name_" + "x" * 60 + "_0123abcd", kind="slurm").runs[0]
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", jobset_name(long)) and len(jobset_name(long)) <= 40
    assert jobset_name(long).endswith("0123abcd")


def stand_in(folder: Path, name: str, answer: str) -> None:
    """A program that writes its arguments, environment and standard input to ``folder/calls.jsonl``."""
    program = (
        f"#!{sys.executable}\nimport json, os, sys\n"
        "said = {'argv': sys.argv, 'environ': dict(os.environ), 'stdin': sys.stdin.read()}\n"
        f"open({str(folder / 'calls.jsonl')!r}, 'a').write(json.dumps(said) + '\\n')\n"
        f"print({answer!r})\n"
    )
    (folder / name).write_text(program)
    (folder / name).chmod(0o755)


CASES = {
    "slurm": ("sbatch", "17", [STORE, "launch.gpus=0"]),
    "skypilot": ("sky", "", [STORE]),
    "kubernetes": ("kubectl", "", [STORE, "launch.image=registry/mf:1"]),
}


@pytest.mark.parametrize("kind", CASES)
def test_secrets_reach_the_job_by_no_argument_and_no_file(kind, tmp_path, monkeypatch, capsys):
    program, answer, overrides = CASES[kind]
    programs = tmp_path / "bin"
    programs.mkdir()
    stand_in(programs, program, answer)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    words = ["experiment=quickstart", f"cluster={kind}", "logging.wandb.project=p", *overrides]
    assert cli.main(["launch", "--dry-run", *words]) == 0
    assert not (programs / "calls.jsonl").exists() and not (tmp_path / "runs").exists()
    assert cli.main(["launch", "--detach", *words]) == 0
    calls = [json.loads(line) for line in (programs / "calls.jsonl").read_text().splitlines()]
    seen = capsys.readouterr()
    written = "".join(path.read_text() for path in (tmp_path / "runs").rglob("*") if path.is_file())
    told = seen.out + seen.err + written + shlex.join(word for call in calls for word in call["argv"])
    assert [value for value in SECRETS.values() if value in told] == []
    got = "".join(call["stdin"] + json.dumps(call["environ"]) for call in calls)
    assert {name for name, value in SECRETS.items() if value in got} == {"WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"}
    if kind == "kubernetes":
        assert [value for call in calls for value in SECRETS.values() if value in call["environ"].values()] == []
    else:
        names = {word for call in calls for word in call["argv"]}
        assert kind == "slurm" or {"WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MFLEET_TOKEN"} <= names
    record = json.loads((tmp_path / "runs" / "quickstart" / "launch" / "job.json").read_text())
    assert record["kind"] == kind and record["ids"]


def test_what_a_scheduler_refuses_is_one_sentence(tmp_path, monkeypatch, capsys):
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: x' >&2\nexit 1\n")
    (programs / "sbatch").chmod(0o755)
    words = ["launch", "experiment=quickstart", "cluster=slurm", "launch.gpus=0"]
    monkeypatch.setenv("PATH", str(programs))
    assert cli.main(words) == 2
    assert capsys.readouterr().err == (
        "error: `sbatch --test-only` failed with status 1: sbatch: error: invalid partition specified: x\n"
    )
    (programs / "sbatch").unlink()
    assert cli.main(words) == 2
    assert capsys.readouterr().err == "error: sbatch is not installed here; launch from a machine that has it.\n"
    assert cli.main(["launch", "--cancel", "runs/other"]) == 2
    assert "give the run.out of a run that `mfleet launch` submitted" in capsys.readouterr().err


def test_the_scripts_are_in_the_project():
    assert (ROOT / "launch" / "host.sh").stat().st_mode & 0o100


def test_a_job_is_followed_through_a_restart_of_the_scheduler(tmp_path, monkeypatch, capfd):
    """The second and third calls of squeue fail."""
    squeue = (
        "echo >>asked\n[ $(wc -l <asked) -ne 2 ] && [ $(wc -l <asked) -ne 3 ] || { echo no contact >&2; exit 1; }\n"
    )
    answers = squeue + "[ $(wc -l <asked) -lt 4 ] && echo RUNNING || echo COMPLETED"
    for name, body in (("squeue", answers), ("scontrol", "echo ' ExitCode=0:0'")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("megatron_fleet.launch.slurm.FOLLOW_S", 0.01)
    monkeypatch.setattr("megatron_fleet.launch.job.FOLLOW_S", 0.01)
    record = Record("slurm", "name", ["7"], [str(tmp_path)])
    assert Slurm().follow(record, tmp_path) == State("completed", 0)
    said = capfd.readouterr().err
    assert said.count("retrying: `squeue --noheader` failed with status 1: no contact") == 1
    assert "job 7: running" in said and "job 7: completed" in said
    monkeypatch.setattr("megatron_fleet.launch.job.OUTAGE_S", 0.05)
    (tmp_path / "squeue").write_text("#!/bin/sh\n[ -e once ] && exit 1\n>once; echo RUNNING\n")
    with pytest.raises(UserError, match="failed with status 1"):
        Slurm().follow(record, tmp_path)
