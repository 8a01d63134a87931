"""`mfleet convert verify` as a script."""

import sys

from megatron_fleet.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "verify", *sys.argv[1:]]))
