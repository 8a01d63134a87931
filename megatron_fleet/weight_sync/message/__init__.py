"""Transport ``message``: weights, or the address where they are, in one message of the trainer."""
