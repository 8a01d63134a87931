"""Checkpoints on hosts that do not see the controller's folder: what a rank sends, and what it fetches and loads."""

from __future__ import annotations

import threading
from hashlib import sha256

import pytest

from megatron_fleet.config.errors import UserError
from megatron_fleet.trainer import state_files

SIZES = {"__0_0.distcp": 5, "__1_0.distcp": 6, "__10_0.distcp": 7, ".metadata": 8, "common.pt": 9}


def test_a_rank_sends_its_shard_and_the_first_one_what_describes_the_whole():
    assert state_files.own_files(0, SIZES) == {"__0_0.distcp": 5, ".metadata": 8, "common.pt": 9}
    assert state_files.own_files(1, SIZES) == {"__1_0.distcp": 6}
    assert state_files.own_files(10, SIZES) == {"__10_0.distcp": 7} and state_files.own_files(2, SIZES) == {}


@pytest.fixture
def saved(tmp_path):
    """A folder of a checkpoint and the entries of its manifest."""
    folder, files = tmp_path / "saved", {}
    folder.mkdir()
    for name, size in SIZES.items():
        content = name.encode() * size
        (folder / name).write_bytes(content)
        files[name] = {"bytes": len(content), "sha256": sha256(content).hexdigest()}
    return folder, files


def test_only_whole_files_are_sent(saved, tmp_path):
    folder, files = saved
    sizes = {name: entry["bytes"] for name, entry in files.items()} | {"__0_0.distcp": 1, "__2_0.distcp": 4}
    sent = state_files.send(folder, str(tmp_path / "store"), sizes, None, threading.Event())
    assert sorted(sent) == sorted(files.keys() - {"__0_0.distcp"})
    for name in sent:
        assert (tmp_path / "store" / name).read_bytes() == (folder / name).read_bytes()
    assert not (tmp_path / "store" / "__0_0.distcp").exists()


def test_what_is_fetched_lies_beside_the_checkpoint_and_is_fetched_once(saved, tmp_path):
    folder, files = saved
    path = tmp_path / "here" / "step_000003"
    path.parent.mkdir()
    state_files.fetch(str(folder), path, files, threading.Event())
    there = state_files.fetched(path)
    assert there.parent == path.parent and there.name.startswith(".step_000003") and not path.exists()
    assert {file.name: file.read_bytes() for file in there.iterdir() if file.name in files} == {
        name: (folder / name).read_bytes() for name in files
    }
    for file in folder.iterdir():
        file.unlink()
    state_files.fetch(str(folder), path, files, threading.Event())  # it is whole: the store is not asked
    (there / "common.pt").write_bytes(b"x" * files["common.pt"]["bytes"])
    with pytest.raises(UserError):
        state_files.fetch(str(folder), path, files, threading.Event())


def test_a_damaged_checkpoint_is_refused_and_not_left_for_whole(saved, tmp_path):
    folder, files = saved
    path = tmp_path / "step_000003"
    (folder / "common.pt").write_bytes(b"y" * files["common.pt"]["bytes"])
    with pytest.raises(UserError, match="is damaged, or was damaged during the download"):
        state_files.fetch(str(folder), path, files, threading.Event())
    assert not state_files.fetched(path).exists()


def test_clearing_removes_what_is_hidden_and_no_checkpoint(tmp_path):
    for name in (".step_000001.fetched", ".step_000002.partial", "step_000003", ".other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    state_files.clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".other", "step_000003"]


def test_a_rank_that_does_not_see_the_folder_loads_what_it_fetched(tmp_path, monkeypatch):
    pytest.importorskip("megatron_fleet.trainer.megatron")
    import numpy as np
    from policy_fixtures import make_batch, make_config, write_config

    from megatron_fleet.trainer.verbs import RankVerbs

    monkeypatch.setenv("LOCAL_RANK", "0")
    config = make_config(write_config(tmp_path / "model", num_hidden_layers=1))
    data, settings = [make_batch(count=2, longest=30)], config.algorithm.model_dump(mode="json")

    def logprobs(verbs):
        return [values for each in verbs._policy.forward(data) for values in each]

    verbs = RankVerbs(config.model_dump_json(), "random", sees_folder=False)
    try:
        assert verbs.ready()["sees_folder"] is False
        verbs.forward_backward(data, settings, False)
        verbs.optim_step({"lr": 1e-2}, 1e9)
        saved, files = logprobs(verbs), verbs.save_state(str(tmp_path / "store"))
        verbs.forward_backward(data, settings, False)
        verbs.optim_step({"lr": 1e-2}, 1e9)
        assert not all(np.array_equal(a, b) for a, b in zip(saved, logprobs(verbs), strict=True))
        path = tmp_path / "checkpoints" / "step_000001"
        path.parent.mkdir()
        verbs.fetch_state(str(tmp_path / "store"), str(path), files).result()
        assert not path.exists() and state_files.fetched(path).exists()
        verbs.load_state(str(path))
        assert all(np.array_equal(a, b) for a, b in zip(saved, logprobs(verbs), strict=True))

        sizes = {name: entry["bytes"] for name, entry in files.items()}
        where = str(tmp_path / "store"), str(tmp_path / "sent"), sizes
        assert verbs.send_state(*where, ranks=[1], bytes_per_s=None) == []
        assert sorted(verbs.send_state(*where, ranks=[0], bytes_per_s=None).result()) == sorted(files)

        monkeypatch.setenv("LOCAL_RANK", "1")  # another one of this host does it
        assert verbs.fetch_state(str(tmp_path / "store"), str(path), files) is None
        verbs.clear_state(str(path.parent))
        assert list(path.parent.iterdir())
        monkeypatch.setenv("LOCAL_RANK", "0")
        verbs.clear_state(str(path.parent))
        assert list(path.parent.iterdir()) == []
        with pytest.raises(RuntimeError, match="without prepare_weights"):
            verbs.send_weights(1, {}, outbox=None)
    finally:
        verbs.close()
