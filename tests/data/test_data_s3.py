"""Tasks are read from S3, and prepared folders are written there, as on a disk."""

import json

import pytest

pytest.importorskip("boto3")
pytest.importorskip("pyarrow")

from s3_server import BUCKET, found_by_boto3

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.sections.data import DataConfig
from megatron_fleet.data import source
from megatron_fleet.data.dataset import build, load_tasks
from megatron_fleet.storage.open import open_folder

ROWS = [{"key": f"t{i}", "prompt": "Do it.", "env_id": "github", "verifier_func": "v"} for i in range(60)]


@pytest.fixture(scope="module")
def s3_data():
    """A server with one task file, found by boto3's own chain."""
    with found_by_boto3():
        open_folder(f"s3://{BUCKET}/v4/openenv").write("all_tool_use.json", json.dumps({"tasks": ROWS}).encode())
        yield f"s3://{BUCKET}/v4/openenv"


def test_a_task_file_is_read(s3_data, tmp_path):
    (tmp_path / "t.json").write_text(json.dumps({"tasks": ROWS}))
    assert load_tasks(f"{s3_data}/all_tool_use.json") == load_tasks(tmp_path / "t.json")
    for address, word in (
        (f"{s3_data}/all_computer_use.json", "no such file"),
        (f"s3://{BUCKET}-2/all.json", "bucket"),
        ("ftp://bucket/all.json", "s3://"),
        ("s3://all.json", "no file in a bucket"),
    ):
        with pytest.raises(UserError, match=word):
            load_tasks(address)


def test_a_prepared_folder_is_written_once_and_read(s3_data):
    out = f"s3://{BUCKET}/prepared/v4"
    made = build(DataConfig(tasks=f"{s3_data}/all_tool_use.json", max_eval=5))
    content = (made.split.train, made.split.held_out, made.manifest)
    with pytest.raises(UserError, match=r"split\.json is missing"):
        load_tasks(out)
    assert source.write_prepared(out, *content) and not source.write_prepared(out, *content)
    with pytest.raises(UserError, match="another prepared folder"):
        source.write_prepared(out, made.split.train[1:], made.split.held_out, made.manifest)
    assert load_tasks(out) == made.split.train + made.split.held_out
    follow = build(DataConfig(tasks=f"{s3_data}/all_tool_use.json", split_manifest=f"{out}/split.json")).split
    assert follow.held_out == made.split.held_out and len(follow.held_out) == 5
