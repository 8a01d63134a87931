"""Megatron-Core on the host at hand. Importing this package makes ``megatron.core`` importable and usable there."""

from megatron_fleet.platform.megatron.adapt import install

install()
