"""Models by hub id and in buckets: downloaded once, compared with what the source states, and one sentence for whatever
goes wrong."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gcs_server import GCS_BUCKET, gcs_server
from hub_server import COMMIT, TOKEN, found_by_hub_client
from s3_server import BUCKET, s3_server
from waiting import HANG_S

pytest.importorskip("huggingface_hub")

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.config.remote_model import BucketModel, HubModel, cache_folder, remote_model
from megatron_fleet.config.sections.trainer import ModelConfig
from megatron_fleet.storage.open import open_folder
from megatron_fleet.weights.fetch import cache
from megatron_fleet.weights.fetch.cache import fetch
from megatron_fleet.weights.fetch.hub import damaged_files

TINY = Path(__file__).parents[3] / "assets" / "tiny"
PINNED = f"fleet/tiny@{COMMIT}"


@pytest.fixture
def hub(tmp_path):
    with found_by_hub_client(TINY, tmp_path / "hf") as server:
        server.files |= {"README.md": b"about", "pytorch_model.bin": b"another format"}
        yield server


def folder() -> Path:
    found = remote_model(PINNED)
    assert found is not None
    return found.folder(os.environ)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen3-8B", HubModel("Qwen/Qwen3-8B")),
        ("Qwen/Qwen3-8B@v1.0", HubModel("Qwen/Qwen3-8B", "v1.0")),
        ("a/b@refs/pr/3", HubModel("a/b", "refs/pr/3")),
        ("s3://bucket/a b/c", BucketModel("s3://bucket/a b/c")),
        ("gs://bucket/a/@0123456789abcdef", BucketModel("gs://bucket/a", "0123456789abcdef")),
        ("s3://bucket@0123456789abcdef", BucketModel("s3://bucket", "0123456789abcdef")),
        *((text, None) for text in ("tiny", "/a/b", "./a/b", "~/a", "a/b/c", "http://h:8/m", "a/b@", "")),
    ],
)
def test_the_form_of_a_name(text, expected):
    assert remote_model(text) == expected


def test_the_cache_is_where_huggingface_hub_has_it(monkeypatch):
    program = "from huggingface_hub import constants; print(constants.HF_HUB_CACHE)"
    for variables in (
        {},
        {"HF_HOME": "/a"},
        {"XDG_CACHE_HOME": "/b"},
        {"HF_HUB_CACHE": "~/c"},
        {"HUGGINGFACE_HUB_CACHE": "/d"},
    ):
        environ = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=HANG_S
        )
        assert str(cache_folder(environ)) == done.stdout.strip(), variables


def test_it_is_downloaded_once_and_only_what_is_needed(hub):
    assert fetch("fleet/tiny") == PINNED
    assert sorted(hub.downloads()) == sorted(path.name for path in TINY.iterdir())
    for path in TINY.iterdir():
        assert (folder() / path.name).read_bytes() == path.read_bytes()
    hub.asked.clear()
    assert fetch("fleet/tiny@v1") == PINNED
    assert hub.downloads() == []
    hub.asked.clear()
    assert fetch(PINNED) == PINNED
    assert hub.asked == []  # a commit never changes: the other hosts and ranks ask nobody


def test_a_dry_run_leaves_the_weights(hub):
    assert fetch("fleet/tiny", weights=False) == PINNED
    assert "model.safetensors" not in hub.downloads() and (folder() / "config.json").is_file()
    fetch(PINNED)
    assert hub.downloads().count("model.safetensors") == 1 and (folder() / "model.safetensors").is_file()


def test_a_run_is_planned_with_what_describes_the_model_and_named_after_it(hub, capsys, monkeypatch, tmp_path):
    from megatron_fleet import cli
    from megatron_fleet.checkpoint.store import run_url

    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--dry-run", "experiment=quickstart", "model.path=fleet/tiny"]) == 0
    assert f"path: {PINNED}" in capsys.readouterr().out
    assert "tokenizer.json" in hub.downloads() and "model.safetensors" not in hub.downloads()
    assert run_url("s3://bucket", "project", PINNED, "run") == "s3://bucket/project/tiny/run"


@pytest.fixture
def dry_run(hub, monkeypatch, tmp_path, capsys):
    """A dry run of a model on the hub whose weights are not here: its exit status, and what it printed to stderr."""
    from megatron_fleet import cli

    monkeypatch.chdir(tmp_path)

    def run():
        status = cli.main(["train", "--dry-run", "experiment=quickstart", "model.path=fleet/tiny"])
        assert not (folder() / "model.safetensors").exists()
        return status, capsys.readouterr().err

    return run


def test_a_dry_run_reads_the_headers_of_weights_that_are_not_here(hub, dry_run):
    whole = hub.files["model.safetensors"]
    assert dry_run() == (0, "")
    assert "model.safetensors" not in hub.downloads()
    assert {name for name, _ in hub.parts} == {"model.safetensors"}
    assert sum(size for _, size in hub.parts) < len(whole) / 4
    assert b'"model.norm.weight"' in whole
    hub.files["model.safetensors"] = whole.replace(b'"model.norm.weight"', b'"model.wrong.weigh"')
    status, said = dry_run()
    assert status == 2 and f"{PINNED}" in said and "model.norm.weight" in said


def test_a_dry_run_does_not_download_weights_for_their_headers(hub, dry_run, caplog):
    """From a mirror that gives whole files only, or without permission to ask."""
    hub.ranges = False
    assert dry_run()[0] == 0
    assert "does not support requests for a part of a file. Only config.json and the index" in caplog.text


def test_a_dry_run_without_the_hub_checks_what_is_here(hub, dry_run, caplog, monkeypatch):
    fetch("fleet/tiny", weights=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.asked.clear()
    assert dry_run()[0] == 0
    assert hub.asked == [] and "HF_HUB_OFFLINE is set, so the headers" in caplog.text


def test_folders_are_left_alone(hub, tmp_path, monkeypatch):
    assert fetch(str(TINY)) == str(TINY)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet" / "tiny").mkdir(parents=True)
    assert load(["experiment=quickstart", "model.path=fleet/tiny"]).model.path == str(tmp_path / "fleet" / "tiny")
    config = load(["experiment=quickstart", f"model.path=other/tiny@{COMMIT}"])
    assert config.model.path == f"other/tiny@{COMMIT}"
    assert config.model.folder == str(tmp_path / "hf" / "hub" / "models--other--tiny" / "snapshots" / COMMIT)
    assert hub.asked == []


def test_a_damaged_download_is_fetched_again_and_one_that_stays_so_refused(hub):
    hub.damaged["model.safetensors"] = 1
    fetch("fleet/tiny")
    assert hub.downloads().count("model.safetensors") == 2
    assert (folder() / "model.safetensors").read_bytes() == (TINY / "model.safetensors").read_bytes()
    shutil.rmtree(folder().parents[1])
    hub.damaged["model.safetensors"] = 9
    with pytest.raises(UserError, match=r"model\.safetensors in .* differs from the hash that the hub states"):
        fetch("fleet/tiny")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_changes_later_is_noticed(hub, name):
    fetch("fleet/tiny")
    assert damaged_files(folder()) == (5, [])
    path = (folder() / name).resolve()
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1] + b"~")
    assert damaged_files(folder()) == (5, [name])
    fetch(PINNED)
    assert damaged_files(folder()) == (5, []) and hub.downloads().count(name) == 2


def test_hashes_are_known_without_the_tree_of_a_newer_client(hub):
    fetch("fleet/tiny")
    shutil.rmtree(folder().parents[1] / "trees")
    assert damaged_files(folder()) == (5, [])


def test_offline(hub, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"is not in .* and HF_HUB_OFFLINE forbids downloading it; unset that"):
        fetch("fleet/tiny")
    assert hub.asked == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    fetch("fleet/tiny")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.asked.clear()
    assert fetch("fleet/tiny") == PINNED and hub.asked == []


def refused(match: str, model: str = "fleet/tiny") -> None:
    with pytest.raises(UserError, match=match) as caught:
        fetch(model)
    assert "\n" not in str(caught.value) and TOKEN not in str(caught.value)


def test_an_unknown_model_or_revision(hub):
    refused(
        "is not a folder here, and http://127.*has no such model, or it is private; correct the name", "fleet/other"
    )
    refused("the hub has no such revision", "fleet/tiny@v2")


def test_no_access(hub, monkeypatch):
    hub.gated = True
    refused(r"its owner must grant access to it; ask for it at http://.*/fleet/tiny, and set HF_TOKEN")
    hub.gated, hub.private = False, True
    refused("or it is private")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert fetch("fleet/tiny") == PINNED


def test_a_hub_that_is_ill_or_not_there(hub, monkeypatch):
    hub.status = 418
    refused("answers 418; try again later")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    refused("does not answer .* check the network, set HF_ENDPOINT to a mirror")


def test_no_room_and_no_folder(hub, monkeypatch, tmp_path):
    monkeypatch.setattr(cache, "ROOM", 1 << 60)
    refused(r"needs 0\.0 GB in .*, where .* GB are free; free some space, or set HF_HOME to a larger disk")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    refused("cannot be written to")


def test_a_model_without_weights_that_can_be_read(hub):
    del hub.files["model.safetensors"]
    refused(r"there is no \*\.safetensors file; name a model with such weights")


@pytest.mark.slow
def test_processes_of_one_host_take_turns(hub):
    """Three at once: one downloads."""
    program = "from megatron_fleet.weights.fetch.cache import fetch; print(fetch('fleet/tiny'))"
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [process.communicate(timeout=HANG_S) for process in processes]
    assert [out.strip() for out, _ in said] == [PINNED] * 3, said
    assert sorted(hub.downloads()) == sorted(path.name for path in TINY.iterdir())


@pytest.fixture(params=["s3", "gs"])
def bucket(request, tmp_path, monkeypatch):
    """A model's folder in a store."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with s3_server() if request.param == "s3" else gcs_server() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        folder = open_folder(f"{request.param}://{BUCKET if request.param == 's3' else GCS_BUCKET}/models/tiny")
        for path in TINY.iterdir():
            folder.write(path.name, path.read_bytes())
        folder.write("logs/train.log", b"not of the model")
        yield folder


def test_a_model_in_a_bucket_is_downloaded_once(bucket, monkeypatch, capsys):
    pinned = fetch(bucket.url)
    assert re.fullmatch(re.escape(bucket.url) + "@[0-9a-f]{16}", pinned)
    folder = Path(ModelConfig(path=pinned).folder)
    assert folder == Path(ModelConfig(path=bucket.url).folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        p.name: p.read_bytes() for p in TINY.iterdir()
    }
    assert f"{bucket.url}: " in capsys.readouterr().err  # the progress line
    with monkeypatch.context() as patch:
        patch.setattr("megatron_fleet.weights.fetch.object_store.transfer", None)  # nothing is left to be copied
        assert fetch(f"{bucket.url}/") == pinned
        patch.setattr("megatron_fleet.weights.fetch.object_store.open_folder", None)
        assert fetch(pinned) == pinned  # the other hosts and ranks ask nobody
    changed = folder / "config.json"
    changed.write_bytes(changed.read_bytes()[:-1] + b" ")
    assert fetch(pinned) == pinned and changed.read_bytes() == (TINY / "config.json").read_bytes()


def test_a_model_that_is_replaced_in_its_bucket_is_another_one(bucket):
    pinned = fetch(bucket.url, weights=False)
    before = Path(ModelConfig(path=pinned).folder)
    assert not (before / "model.safetensors").exists()
    bucket.write("config.json", (TINY / "config.json").read_bytes() + b"\n")
    refused(f"{re.escape(pinned)}: the files at this address have been replaced since; restore them", pinned)
    after = Path(ModelConfig(path=fetch(bucket.url)).folder)
    assert after != before and (after / "model.safetensors").is_file()
    assert (before / "config.json").read_bytes() == (TINY / "config.json").read_bytes()
    bucket.delete("model.safetensors")
    refused(r"there is no \*\.safetensors; name a complete Hugging Face model folder", bucket.url)
    refused(r"there is no config\.json; name a complete", f"{bucket.url}/nothing")


def test_a_run_is_planned_with_a_model_in_a_bucket(bucket, capsys, monkeypatch, tmp_path):
    from megatron_fleet import cli
    from megatron_fleet.checkpoint.store import run_url

    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--dry-run", "experiment=quickstart", f"model.path={bucket.url}"]) == 0
    pinned = fetch(bucket.url, weights=False)
    assert f"path: {pinned}" in capsys.readouterr().out
    assert run_url("s3://bucket", "project", pinned, "run") == "s3://bucket/project/tiny/run"
    assert cli.main(["model", "fetch", bucket.url]) == 0
    assert f"train with model.path={pinned}" in capsys.readouterr().out
