"""Quantities in sentences."""

import pytest

from megatron_fleet.config.units import count, size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (24e6, "24.0 MB"),
        (999e6, "999 MB"),
        (1.5e9, "1.5 GB"),
        (2e15, "2000 TB"),
    ],
)
def test_sizes_have_a_unit_in_which_they_are_not_zero(nbytes, text):
    assert size(nbytes) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0 steps"), (1, "1 step"), (14080, "14,080 steps")])
def test_a_number_agrees_with_its_noun(number, text):
    assert count(number, "step") == text
