"""Texts from elsewhere that reach a terminal."""

import io
import logging

from megatron_fleet.config.errors import printable, say

HOSTILE = "a\x1b[2J\x9b31m\rb\x00\u202ec\ud800\nerror: forged"
ESCAPED = r"a\x1b[2J\x9b31m\rb\x00\u202ec\ud800\nerror: forged"


def test_text_from_elsewhere_is_escaped():
    assert printable(HOSTILE) == ESCAPED
    out = io.StringIO()
    say(f"one\ntwo {HOSTILE}", out)
    assert out.getvalue().isascii() and all(line.isprintable() for line in out.getvalue().splitlines())


def test_a_log_record_is_one_line_whatever_it_quotes():
    """Of every process that adds no handler of its own."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logging.lastResort.formatter)
    logger = logging.getLogger("test_errors")
    logger.addHandler(handler)
    logger.propagate = False
    logger.warning("image %s", HOSTILE)
    assert out.getvalue() == f"image {ESCAPED}\n"
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("no image")
    first, *traceback = out.getvalue().splitlines()[1:]
    assert first == "no image" and traceback[-1] == "  error: forged"
    assert all(line.startswith("  ") and line.isprintable() for line in traceback)
