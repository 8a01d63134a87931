"""Sections of the configuration: types, defaults and rules, one module per subject; ``config.schema`` joins them."""
