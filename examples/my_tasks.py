"""Tasks of your own: `python my_tasks.py my_tasks.json` writes sixty for the embedded help desk."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megatron_fleet.embedded_fleet.tickets import Tickets

VERIFIER = '''
RIGHT = {agent!r}


def verify(env, final_answer=None) -> float:
    """1 if the answer is the agent's name and no ticket was changed, else 0."""
    before, after = (env.db(name).query("SELECT * FROM tickets") for name in ("seed", "current"))
    return float(str(final_answer or "").strip(" .") == RIGHT and before == after)
'''


def make(number: int) -> dict[str, object]:
    """Return one row: what the policy is asked, in which environment with which data, and how it is scored."""
    data_key = f"mine-{number}"  # the embedded fleet makes the tables from it, always the same ones
    assigned = "SELECT customer, subject, agent FROM tickets WHERE status = 'open' AND agent != 'none'"
    customer, subject, agent = Tickets(data_key, {}).db.execute(assigned).fetchone()
    return {
        "task_key": f"agent-{number:03}",
        "env_key": "tickets",
        "data_key": data_key,
        "prompt": f"Which agent has {customer}'s open {subject} ticket? Answer with the name.",
        "env_variables": {"CURRENT_DATE": "2026-03-08", "LOGGED_IN_USER": "Rosa"},
        "verifier_code": VERIFIER.format(agent=agent),
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps([make(number) for number in range(60)], indent=1))
