"""Versions on disk and S3: whole or not there, the last two kept, nothing of others touched."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")

from local_sender import FolderWeights, LocalSender  # noqa: E402
from safetensors.torch import load, load_file  # noqa: E402
from weight_fixtures import random_tensors, tiny_config, write_folder  # noqa: E402

from megatron_fleet.config.errors import UserError  # noqa: E402
from megatron_fleet.storage.open import open_folder  # noqa: E402
from megatron_fleet.weight_sync.disk.manifest import MANIFEST, read_manifest  # noqa: E402
from megatron_fleet.weight_sync.registry import make_transport  # noqa: E402


class Engines:
    """Remember what was there when they were asked to load it."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.loaded: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []

    async def open_transport(self, init_info) -> None:
        self.calls.append("open")

    async def begin_update(self) -> None:
        self.calls.append("begin")

    async def load(self, message) -> None:
        self.calls.append("load")
        folder = open_folder(message["path"])
        self.paths.append(message["path"])
        files = read_manifest(folder)
        contents = [load(folder.read(file.file)) for file in files]
        assert [sorted(content) for content in contents] == [sorted(file.names) for file in files]
        self.loaded = {name: tensor for content in contents for name, tensor in content.items()}

    async def finish_update(self, version, message) -> None:
        assert message == {"path": self.paths[-1]}


@pytest.fixture
def sender(tmp_path):
    config = tiny_config()
    return LocalSender(FolderWeights(write_folder(tmp_path / "hf", config, random_tensors(config))))


@pytest.fixture(params=["local", "s3"])
def url(request, tmp_path):
    if request.param == "local":
        return str(tmp_path / "versions")
    return f"{request.getfixturevalue('s3_url')}/{tmp_path.name}"


async def test_the_last_two_versions_are_kept_whole(url, sender, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_fleet.weight_sync.buckets.BUCKET_BYTES", 1)
    foreign = open_folder(url)
    foreign.write("notes.txt", b"mine")
    foreign.write("weights-00000001-0badcafe/00000.safetensors", b"of a run that was killed")
    engines, transport = Engines(), make_transport("disk", {"url": url})
    for version in (1, 2, 2, 3):
        await transport.sync(sender, engines, version)
    transport.close()
    expected = load_file(tmp_path / "hf" / "model.safetensors")
    assert set(engines.loaded) == set(expected)
    assert all(torch.equal(engines.loaded[name], tensor) for name, tensor in expected.items())
    assert len(set(engines.paths)) == 4
    assert {name.split("/")[0] for name in foreign.sizes()} == {
        "notes.txt", *(path.rpartition("/")[2] for path in engines.paths[-2:])
    }  # fmt: skip
    left = await _later(url, sender)
    assert engines.paths[-1].rpartition("/")[2] not in left, "a new controller keeps its own versions only"


async def _later(url, sender):
    await make_transport("disk", {"url": url}).sync(sender, Engines(), 4)
    return {name.split("/")[0] for name in open_folder(url).sizes()}


async def test_engines_sample_while_the_trainer_writes_and_see_nothing_of_a_version_that_failed(url, sender):
    engines, transport = Engines(), make_transport("disk", {"url": url})

    def fail():
        raise OSError("no space left on device")

    sender._source.before_write = fail
    with pytest.raises(OSError, match="no space left"):
        await transport.sync(sender, engines, 1)
    assert engines.calls == []
    assert not [name for name in open_folder(url).sizes() if name.endswith(MANIFEST)]
    sender._source.before_write = None
    await transport.sync(sender, engines, 1)
    assert engines.calls == ["open", "begin", "load"]


def test_a_folder_without_a_whole_manifest_is_no_version(tmp_path):
    (tmp_path / MANIFEST).write_text(json.dumps({"version": 1, "files": [{"file": "a"}]}))
    with pytest.raises(UserError, match=r"manifest.json: no manifest of weights .*sync the weights again"):
        read_manifest(open_folder(tmp_path))
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(UserError, match="no such file"):
        read_manifest(open_folder(tmp_path))


async def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path, sender):
    (tmp_path / "file").touch()
    engines = Engines()
    with pytest.raises(UserError, match=r"file/versions.* cannot be created .*check the disk"):
        await make_transport("disk", {"url": str(tmp_path / "file" / "versions")}).sync(sender, engines, 1)
    assert engines.calls == []
