"""Conversion from and to a real S3 server."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess

import pytest

torch = pytest.importorskip("torch")

from convert_helpers import command, files, megatron_tensors, mfleet, write_foreign  # noqa: E402
from waiting import wait_until  # noqa: E402

from megatron_fleet.storage.open import open_folder  # noqa: E402

SMALL_FILES = """
import sys, threading
from megatron_fleet import cli
from megatron_fleet.storage import s3
from megatron_fleet.convert import to_megatron
to_megatron.FILE_BYTES = 100_000
{more}
sys.exit(cli.main(sys.argv[1:]))
"""
STOPPING_AFTER = """
written, write_at, commit = set(), s3.S3Writer.write_at, s3.S3Writer.commit
def held(writer, *arguments):
    if {name!r} in written:
        threading.Event().wait()
    write_at(writer, *arguments)
def noted(writer):
    commit(writer)
    written.add(writer._name.rpartition("/")[2])
s3.S3Writer.write_at, s3.S3Writer.commit = held, noted
"""


@pytest.fixture
def url(s3_running, request, monkeypatch):
    """An S3 address that no other test uses."""
    from s3_server import BUCKET

    for name, value in s3_running.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    return f"s3://{BUCKET}/{request.node.name.replace('[', '-').replace(']', '')}"


def upload(folder, url):
    to = open_folder(url)
    for name, data in files(folder).items():
        to.write(name, data)
    return url


def download(url):
    folder = open_folder(url)
    return {name: folder.read(name) for name in folder.sizes() if name != "conversion.json"}


@pytest.mark.slow
def test_there_and_back(url, made, convert, tmp_path):
    """Quantised weights, whose scales lie on S3 too, and passthrough tensors."""
    family = "kimi_k25"
    source = upload(made(family), f"{url}/hf")
    assert convert("to-megatron", source, f"{url}/mg")[0] == 0
    assert convert("to-megatron", made(family), tmp_path / "mg")[0] == 0
    assert download(f"{url}/mg") == files(tmp_path / "mg")
    assert convert("to-hf", f"{url}/mg", f"{url}/back")[0] == 0
    assert download(f"{url}/back") == files(made(family))
    assert convert("verify", f"{url}/mg", source)[0] == 0
    code, out, _ = convert("inspect", f"{url}/mg", "--json")
    assert code == 0 and json.loads(out)["passthrough"]


def test_a_template_and_a_foreign_checkpoint(url, made, convert, tmp_path):
    root = write_foreign(tmp_path / "run", megatron_tensors(made("qwen3"), False), padding=13)
    checkpoint, template = upload(root, f"{url}/run"), upload(made("qwen3"), f"{url}/hf")
    assert convert("to-hf", f"{checkpoint}/iter_0000100", f"{url}/out", "--template", template)[0] == 0
    assert download(f"{url}/out") == files(made("qwen3"))


def test_finished_and_foreign_places(url, made, convert, refused):
    for _ in range(2):
        assert convert("to-megatron", made("qwen3"), f"{url}/mg")[:2] == (0, f"{url}/mg: complete\n")
    assert refused("to-megatron", made("qwen3_tied"), f"{url}/mg").startswith(f"{url}/mg already exists")
    open_folder(f"{url}/mine").write("notes.txt", b"mine")
    assert "holds notes.txt already" in refused("to-megatron", made("qwen3"), f"{url}/mine")
    assert open_folder(f"{url}/mine").sizes() == {"notes.txt": 4}


def test_a_secret_that_is_wrong(url, made, refused, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    assert "the store denies the access (403)" in refused("to-megatron", made("qwen3"), f"{url}/mg")


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["to-megatron", "to-hf"])
def test_killed_and_resumed(direction, url, made, convert, refused, tmp_path):
    source = made("qwen3_moe")
    if direction == "to-hf":
        assert convert("to-megatron", source, tmp_path / "mg")[0] == 0
        source = tmp_path / "mg"
    small = SMALL_FILES.format(more="")
    assert mfleet(direction, source, tmp_path / "whole", program=small).returncode == 0
    first = {"to-megatron": "release/__0_0.distcp", "to-hf": "model-00001-of-00003.safetensors"}[direction]
    stopping = SMALL_FILES.format(more=STOPPING_AFTER.format(name=first.rpartition("/")[2]))
    process = subprocess.Popen(command(direction, source, f"{url}/out", program=stopping), stderr=subprocess.DEVNULL)
    folder = open_folder(f"{url}/out")
    wait_until(lambda: first in folder.sizes(), lambda: process.poll() is None)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = folder.sizes()
    assert first in kept and len(kept) < len(files(tmp_path / "whole"))
    for look in ("inspect", "verify"):
        refused(look, f"{url}/out", *([source] if look == "verify" else []))
    if direction == "to-megatron":
        assert "an unfinished conversion of" in refused(direction, source, f"{url}/out", "--layer-keys", "numbered")
    done = mfleet(direction, source, f"{url}/out", program=small)
    assert (done.returncode, done.stdout) == (0, f"{url}/out: complete\n"), done.stderr
    assert download(f"{url}/out") == files(tmp_path / "whole")


def test_a_run_on_s3_finds_its_model(url, made, convert, tmp_path):
    """Two levels above the checkpoint; the model may lie on S3 too, as long as it is the one of the run."""
    import hashlib

    from megatron_fleet.config.remote_model import BucketModel
    from megatron_fleet.weights.fetch import object_store

    model = upload(made("qwen3"), f"{url}/model")
    root = write_foreign(tmp_path / "run", megatron_tensors(made("qwen3"), False))
    step = tmp_path / "mine" / "checkpoints" / "step_000003"
    shutil.copytree(root / "iter_0000100", step)
    listed = {n: {"bytes": len(d), "sha256": hashlib.sha256(d).hexdigest()} for n, d in files(step).items()}
    (step / "manifest.json").write_text(json.dumps({"format": 1, "step": 3, "files": listed}))
    pinned = str(object_store.look_up(BucketModel(model)).model)
    (tmp_path / "mine" / "config.json").write_text(json.dumps({"model": {"path": pinned}}))
    run = upload(tmp_path / "mine", f"{url}/mine")
    assert convert("to-hf", f"{run}/checkpoints/step_000003", tmp_path / "out")[0] == 0
    assert files(tmp_path / "out") == files(made("qwen3"))
    open_folder(model).write("config.json", b"{}")
    status, _, error = convert("to-hf", f"{run}/checkpoints/step_000003", tmp_path / "again")
    assert status == 2 and "--template" in error


@pytest.mark.slow
def test_ranks_load_straight_from_the_store(tmp_path, url):
    pytest.importorskip("megatron_fleet.trainer.megatron")
    from weight_fixtures import megatron_groups, random_tensors, stage_chunks, tiny_config, write_folder

    from megatron_fleet.weights.shards import load_hf

    hf = write_folder(tmp_path / "hf", tiny_config(), random_tensors(tiny_config()), files=3)
    store = open_folder(url)
    for file in hf.iterdir():
        store.write(file.name, file.read_bytes())
    with megatron_groups():
        here, there = (stage_chunks(tiny_config(), (1, 2), 0, 2) for _ in range(2))
        assert load_hf(here, hf) == load_hf(there, url)
    for (name, _, expected), (_, _, found) in zip(here[0].described(), there[0].described(), strict=True):
        assert torch.equal(found, expected), name
