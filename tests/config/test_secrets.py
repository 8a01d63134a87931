"""Children get the secrets that they use, and no other."""

from __future__ import annotations

import sys

from megatron_fleet.cluster.launcher import LocalRanks
from megatron_fleet.cluster.nodes import RanksOfHost
from megatron_fleet.config.secrets import secrets, without_secrets

SECRETS = (
    *("WANDB_API_KEY", "WANDB_API_KEY_TOOL_USE", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN"),
    *("FLEET_API_KEY", "SLACK_WEBHOOK_URL", "SLACK_BOT_TOKEN", "HF_TOKEN", "MLFLOW_TRACKING_PASSWORD", "MFLEET_TOKEN"),
    *("OPENAI_API_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "apikey", "my_secret"),
)
HARMLESS = (
    *("PATH", "HOME", "TOKENIZERS_PARALLELISM", "AWS_REGION", "AWS_ENDPOINT_URL", "CUDA_VISIBLE_DEVICES", "KEYBOARD"),
    *("HF_HOME", "MONKEY", "RAY_AUTH_TOKEN", "WANDB_MODE", "PYTHONPATH"),
)


def test_what_looks_like_a_secret_goes_and_all_else_stays():
    assert set(without_secrets(dict.fromkeys(SECRETS + HARMLESS, "x"))) == set(HARMLESS)
    kept = secrets(dict.fromkeys(SECRETS + HARMLESS, "x"), ("AWS_", "FLEET_"))
    assert set(kept) == {"AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "FLEET_API_KEY"}
    assert secrets({"FLEET_API_KEY": "x"}, ()) == {}


async def test_a_rank_gets_the_store_s_secrets_and_its_token_alone(tmp_path, monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, "planted")
    said = "import os; print(sorted(n for n, v in os.environ.items() if v == 'planted'), os.environ['MFLEET_TOKEN'])"
    ranks = LocalRanks(RanksOfHost((0,), 1, 1), tmp_path, [sys.executable, "-c", said])
    await ranks.start("h:1", "the run's")
    await ranks.stop(20)
    assert (tmp_path / "rank_0.log").read_text().split("] ") == [
        "['AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY', 'AWS_SESSION_TOKEN'",
        "the run's\n",
    ]
