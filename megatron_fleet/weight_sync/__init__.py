"""Weight sync from the trainer to the engines: one transport per module."""
