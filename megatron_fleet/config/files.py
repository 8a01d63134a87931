"""Read files written by users or other programs. An unusable file raises a UserError that names the file, the problem
and the remedy."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from megatron_fleet.config.errors import UserError

MAX_BYTES = 4 << 30
MAX_DEPTH = 200
"""Maximum nesting of objects and lists, far below the interpreter's recursion limit."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def user_path(text: str) -> Path:
    """Return the path a user wrote, with ``~`` expanded. Raises UserError for the home of an unknown user."""
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise UserError(f"{text}: there is no home folder of {expanded.split('/', 1)[0]}; write the path without ~.")
    return Path(expanded)


def environment_name(env_key: str) -> str:
    """Return an environment key as a component of metric and file names; ``/`` would add a level in both."""
    return re.sub(r"[^\w\-. :]", "_", env_key)


def read_file(path: Path, remedy: str = "correct the path") -> bytes:
    """Read a whole file.

    Args:
        remedy: what the user can do, for the message.

    Raises:
        UserError: it cannot be read, is not a regular file (reading a pipe would block, a device has no end) or is
            larger than ``MAX_BYTES``.
    """
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UserError(f"{path} is not a regular file; {remedy}.")
            if found.st_size > MAX_BYTES:
                raise UserError(f"{path} has {found.st_size} bytes, at most {MAX_BYTES} are read; {remedy}.")
            return file.read()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {remedy}.") from None
    except ValueError:
        raise UserError(f"{path} cannot be the name of a file (a NUL or half of a surrogate pair); {remedy}.") from None


def parse_json(data: bytes, where: str, remedy: str = "correct the file") -> Any:
    """Parse a JSON text.

    Raises:
        UserError: it is not UTF-8 or not JSON, is nested more than ``MAX_DEPTH`` deep, or contains an unpaired
            surrogate, which could not be encoded again.
    """
    try:
        value = json.loads(data.decode())  # given bytes, json accepts unpaired surrogates
        if depth_exceeds(value, MAX_DEPTH):
            raise RecursionError
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: line {error.lineno}, column {error.colno}: not JSON ({error.msg}); {remedy}."
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: byte {error.start}: not UTF-8 text; {remedy}.") from None
    except UnicodeEncodeError:
        raise UserError(f"{where}: a text holds half of a surrogate pair; {remedy}.") from None
    except RecursionError:
        raise UserError(f"{where}: its JSON is nested more than {MAX_DEPTH} levels deep; {remedy}.") from None
    except ValueError as error:  # an integer with more digits than Python converts
        raise UserError(f"{where}: not usable JSON ({error}); {remedy}.") from None
    return value


def read_object(path: Path, remedy: str = "correct the file") -> dict[str, Any]:
    """Read a JSON object from a file. Raises UserError as `read_file` and `parse_json` do, and for any other value."""
    value = parse_json(read_file(path, remedy), str(path), remedy)
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a {type(value).__name__}, expected a JSON object; {remedy}.")
    return value


def parse_yaml(data: bytes, where: str, remedy: str = "correct the file") -> Any:
    """Parse a YAML text. Raises UserError if it is not UTF-8 or not YAML, is nested too deep, or has aliases, with
    which a small file could expand without bound."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("it has an alias (*name)")
            return super().compose_node(parent, index)

    try:
        value = yaml.load(data.decode(), Loader)
        if depth_exceeds(value, MAX_DEPTH):
            raise RecursionError
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: byte {error.start}: not UTF-8 text; {remedy}.") from None
    # ValueError: an invalid date, too many digits. The others: a value that does not fit its tag.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise UserError(f"{where}: not usable YAML ({' '.join(str(error).split())}); {remedy}.") from None
    except RecursionError:
        raise UserError(f"{where}: its YAML is nested too deep; {remedy}.") from None
    return value


def depth_exceeds(value: Any, limit: int) -> bool:
    """Return whether a JSON value nests objects and lists more than ``limit`` deep. Does not recurse."""
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
