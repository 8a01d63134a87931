"""The sections of the configuration, one module a subject; ``config.schema`` joins them to the tree."""
