"""Chat template rendering in a separate process.

A template is a program that comes with a model. Jinja's sandbox protects Python's objects, but a short template can
loop forever or exhaust memory, so the process limits both. Run as a script, this reads a JSON object from stdin and
prints one.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

CPU_S = 5
MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 10_000_000


def render(template: str, variables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Render ``template`` as transformers' ``apply_chat_template`` does, once for each set of variables.

    Raises:
        ValueError: rendering failed; the message has the template's error or the exceeded limit.
    """
    from megatron_fleet.config.secrets import without_secrets  # the child needs none of them

    asked = json.dumps({"template": template, "variables": list(variables)}).encode()
    command, environ = [sys.executable, "-I", __file__], without_secrets(os.environ)
    child = subprocess.run(command, input=asked, capture_output=True, env=environ, check=False)
    if child.returncode < 0:
        raise ValueError(f"it takes more than {CPU_S} s of CPU time or {MEMORY_BYTES >> 20} MiB of memory")
    if child.returncode > 0:
        raise RuntimeError(f"the process that renders chat templates failed: {child.stderr.decode(errors='replace')}")
    answer = json.loads(child.stdout)
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["texts"]


def main() -> None:
    """Serve one ``render`` request."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import SandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``, by which templates of other trainers mark the model's own text: renders its body."""

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    Generation.tags = {"generation"}
    asked = json.load(sys.stdin)
    environment = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = datetime(2025, 1, 1).strftime
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        compiled = environment.from_string(asked["template"])
        texts = [compiled.render(**variables) for variables in asked["variables"]]
        if sum(map(len, texts)) > MAX_CHARACTERS:
            raise ValueError(f"it writes more than {MAX_CHARACTERS} characters")
        answer = json.dumps({"texts": texts})
    except Exception as error:  # a template is arbitrary code and may raise anything
        answer = json.dumps({"error": f"{type(error).__name__}: {str(error)[:1000]}"})
    print(answer)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise ValueError(message)


if __name__ == "__main__":
    main()
