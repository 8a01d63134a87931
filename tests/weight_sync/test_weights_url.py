"""Where the disk transport writes: `rollout.engine.weights_url`."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("hydra")

from megatron_fleet.config import validate
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.loop.main import weights_url
from megatron_fleet.weight_sync.registry import make_transport

DISK = ("experiment=quickstart", "rollout.engine.transport=disk")


class Both:
    """Trainer and engines that remember the addresses that they are told."""

    def __init__(self) -> None:
        self.sent, self.loaded = [], []

    async def prepare_weights(self, transport, options):
        return {}

    async def send_weights(self, version, options, deliver):
        self.sent.append(options["path"])

    async def load(self, message):
        self.loaded.append(message["path"])

    async def open_transport(self, init_info):
        pass

    async def begin_update(self):
        pass

    async def finish_update(self, version, message):
        pass


async def test_a_bucket_reaches_trainer_and_engines(s3_url, tmp_path):
    config = load([*DISK, f"run.out={tmp_path}", f"rollout.engine.weights_url={s3_url}"])
    validate.check(config)
    transport, both = make_transport("disk", {"url": weights_url(config)}), Both()
    await transport.sync(both, both, 7)
    (path,) = both.sent
    assert path.startswith(f"{s3_url}/weights-00000007-") and both.loaded == [path]


def test_a_folder_is_told_to_all_hosts_as_a_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert weights_url(load([*DISK, "run.out=runs/a"])) == f"{tmp_path}/runs/a/weights"
    config = load([*DISK, "run.out=runs/a", "rollout.engine.weights_url=shared/a"])
    validate.check(config)
    assert weights_url(config) == f"{tmp_path}/shared/a"


@pytest.mark.parametrize(
    ("url", "transport", "words"),
    [
        ("s3://b/p", "auto", "requires rollout.engine.transport=disk, but the transport is auto"),
        ("s3://b/p", "nccl", "requires rollout.engine.transport=disk, but the transport is nccl"),
        ("s3://", "disk", "is not the address of a folder; write a path, s3://… or gs://…"),
        ("http://host/p", "disk", "weights_url=http://host/p is not the address of a folder"),
        ("' '", "disk", "is not the address of a folder"),
        ("'s3://key:secret@b/p'", "disk", "holds an @"),
    ],
)
def test_what_cannot_be_the_folder_is_refused(url, transport, words):
    overrides = [f"rollout.engine.weights_url={url}", f"rollout.engine.transport={transport}"]
    with pytest.raises(UserError, match=words) as refused:
        validate.check(load(["experiment=quickstart", *overrides]))
    assert "secret" not in str(refused.value)


def test_a_transport_of_the_users_own_may_use_it():
    validate.check(load([DISK[0], "rollout.engine.transport=package.module:own", "rollout.engine.weights_url=a"]))
