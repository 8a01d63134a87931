"""The variable that every user of W&B knows."""

import pytest

from megatron_fleet.config.load import load


@pytest.mark.parametrize(
    ("variable", "override", "mode"),
    [
        ("offline", (), "offline"),
        ("online", (), "online"),
        (None, (), "online"),
        ("offline", ("logging.wandb.mode=online",), "online"),
    ],
)
def test_the_variable_counts_where_the_key_is_not_set(monkeypatch, variable, override, mode):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if variable is not None:
        monkeypatch.setenv("WANDB_MODE", variable)
    config = load(["experiment=quickstart", "logging.wandb.project=mine", *override])
    assert config.logging.wandb.mode == mode
