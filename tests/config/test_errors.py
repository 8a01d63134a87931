"""Texts from elsewhere that reach a terminal."""

import io
import logging

from megatron_fleet.config.errors import printable, say, say_lines

HOSTILE = "a\x1b[2J\x9b31m\rb\x00\u202ec\ud800\nerror: forged"
ESCAPED = r"a\x1b[2J\x9b31m\rb\x00\u202ec\ud800\nerror: forged"


def test_text_from_elsewhere_is_escaped():
    assert printable(HOSTILE) == ESCAPED
    out = io.StringIO()
    say(f"one {HOSTILE}", out)
    assert out.getvalue() == f"one {ESCAPED}\n", "a name cannot end the line"


def test_only_line_ends_of_a_text_of_several_lines_are_kept():
    out = io.StringIO()
    say_lines("one\n\ntwo \x0b\u2028\x1b[2J\r three", out)
    assert out.getvalue() == "one\n\ntwo \\x0b\\u2028\\x1b[2J\\r three\n"


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
