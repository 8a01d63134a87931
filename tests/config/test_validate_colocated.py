"""Configurations of engines that share the trainer's devices."""

import pytest

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load
from megatron_fleet.config.validate import check


def test_weights_in_fp8_cannot_take_turns():
    fp8 = ["model.dtype=bfloat16", "precision.recipe=fp8_tensorwise", "precision.fp8_param_gather=true"]
    check(load(["experiment=quickstart", *fp8]))
    with pytest.raises(
        UserError, match=r"rollout\.engine\.colocated=true with precision\.fp8_param_gather=true: .* set"
    ):
        check(load(["experiment=quickstart", *fp8, "rollout.engine.colocated=true"]))
