"""`mfleet convert inspect` as a script."""

import sys

from megatron_fleet.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "inspect", *sys.argv[1:]]))
