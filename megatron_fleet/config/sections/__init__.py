"""Configuration sections, one module per subject; ``config.schema`` joins them into the tree."""
