"""Print which rank this process is, as JSON on one line: what tests start with srun and torchrun."""

import json
import os
import sys
from dataclasses import asdict

from megatron_fleet.cluster.rank_identity import rank_identity
from megatron_fleet.config.errors import UserError

try:
    said = asdict(rank_identity(os.environ))
except UserError as error:
    said = {"refused": str(error)}
# One write: several processes share the pipe.
sys.stdout.write(json.dumps(said) + "\n")
