"""Write the model of a run's checkpoint as a Hugging Face folder.

    python tools/convert/megatron_to_hf.py runs/quickstart/checkpoints/step_000035 my_model

In the engine environment, on one process, whatever the layout of the run was. Every file of the checkpoint is checked
against its manifest first; the folder appears whole or not at all.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from contextlib import closing
from pathlib import Path

from megatron_fleet.checkpoint.checkpoints import Checkpoint
from megatron_fleet.config.errors import UserError
from megatron_fleet.config.load import load_resolved
from megatron_fleet.config.schema import Parallel


def convert(checkpoint: Path, out: Path) -> None:
    """Read ``checkpoint`` of a run's folder and write the HF folder ``out``, with the config and tokenizer files of the
    model that the run began with.

    Raises:
        UserError: the checkpoint is damaged, lies in no run's folder, or ``out`` exists.
    """
    if out.exists():
        raise UserError(f"{out}: exists already; name another folder or remove it.")
    found = Checkpoint.open(checkpoint, checksums=True)
    config = load_resolved(found.path.resolve().parents[1] / "config.json")
    config = config.model_copy(update={"parallel": Parallel()})
    from megatron_fleet.policy.megatron.policy import MegatronPolicy

    with closing(MegatronPolicy(config)) as policy:
        policy.load_state(found.path)
        policy.export_hf(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a run's checkpoints/step_…")
    parser.add_argument("out", type=Path, help="folder to make")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # Megatron-Core tells which CUDA packages it does without
    try:
        convert(args.checkpoint, args.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: step {Checkpoint.open(args.checkpoint).step}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
