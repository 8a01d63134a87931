"""The trainer's weights on their way to the engines: one transport per module."""
