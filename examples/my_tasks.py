"""Tasks of your own: `python my_tasks.py my_tasks.json` writes a task file for the embedded fleet (see README.md)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megatron_fleet.envs.embedded.tickets import Tickets

VERIFIER = '''
CUSTOMER = {customer!r}
OPEN = "SELECT id FROM tickets WHERE status = 'open' AND customer = ?"


def verify(env, final_answer=None) -> float:
    """1 if the answer is the number of open tickets and none was changed, else 0."""
    before = env.db("seed").query(OPEN, [CUSTOMER])
    after = env.db("current").query(OPEN, [CUSTOMER])
    right = str(final_answer or "").strip(" .") == str(len(before))
    return float(right and before == after)
'''


def make(number: int) -> dict[str, object]:
    """Return one row: what the policy is asked, in which environment with which data, and how it is scored."""
    data_key = f"mine-{number}"  # the embedded fleet makes a help desk from it, always the same one
    customer = Tickets(data_key, {}).residents[1 + number % 4]
    return {
        "task_key": f"count-{number:03}",
        "env_key": "tickets",
        "data_key": data_key,
        "prompt": f"How many open tickets does {customer} have? Answer with the number.",
        "env_variables": {"CURRENT_DATE": "2026-03-08", "LOGGED_IN_USER": "Rosa"},
        "verifier_code": VERIFIER.format(customer=customer),
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps([make(number) for number in range(60)], indent=1))
