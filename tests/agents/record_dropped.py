"""Writes ``dropped_digests.json``: conversations in which the models' own templates leave earlier thinking out.

Usage, from a folder that holds the templates under the names of ``record_templates``:

    python tests/agents/record_dropped.py FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from record_templates import TEMPLATES, entry
from talks import PLAIN, Talks

from megatron_fleet.models.chat.detection import FORMATS
from megatron_fleet.models.chat.format import Spoken
from megatron_fleet.models.chat.template_check import Dialogue, Round, render_template

DIGESTS = Path(__file__).with_name("dropped_digests.json")
COUNT, SEED = 40, 6


def talks() -> Iterator[Dialogue]:
    """They end with the first turn without a call, and a question: before it no template keeps what was thought."""
    asked = Round(Spoken("I think again", "What now?"), ("Go on.",))
    for talk in Talks(SEED, PLAIN).conversations(COUNT, thinking=True):
        yield replace(talk, rounds=(*talk.rounds, asked))


def main(folder: Path) -> None:
    recorded = []
    for name, (family, origin) in TEMPLATES.items():
        source = (folder / name).read_bytes()
        if True not in FORMATS[family].thinking:
            continue
        chat = FORMATS[family].make(True, source.decode())
        theirs = render_template(source.decode(), chat, list(talks()))
        recorded.append(entry(name, origin, source, theirs) | {"family": family})
    DIGESTS.write_text(json.dumps({"templates": recorded}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
