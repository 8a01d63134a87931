"""A mixture that does not fit the tasks is refused before anything starts."""

import pytest

pytest.importorskip("hydra")

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.preflight import checks


@pytest.fixture
def look(tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    return lambda *overrides: checks.check_training(
        load(["experiment=quickstart", f"run.out={tmp_path}/out", *overrides])
    )


def test_a_minimum_that_fits_is_accepted(look):
    look("data.mixture.min_per_env=5")


def test_a_minimum_that_exceeds_a_step_is_refused(look):
    with pytest.raises(UserError, match=r"min_per_env=6 for 3 environments needs 18 prompts.*at most 5"):
        look("data.mixture.min_per_env=6")


def test_shares_of_other_environments_are_refused(look):
    with pytest.raises(UserError, match=r"names github, .* there are booking, ledger, tickets"):
        look("data.mixture.weights=explicit", "data.mixture.shares={github: 1}")
