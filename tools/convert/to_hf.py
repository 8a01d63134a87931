"""`mfleet convert to-hf` as a script."""

import sys

from megatron_fleet.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "to-hf", *sys.argv[1:]]))
