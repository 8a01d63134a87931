#!/usr/bin/env bash
# Print the ends of the logs of a run that this host has: launch/last_words.sh RUN_OUT
# Their disks may end with the job, its own log does not.
set -euo pipefail
[ -d "$1/logs" ] || exit 0
for log in "$1"/logs/*.log; do
  [ -s "$log" ] || continue
  printf '== %s: %s\n' "$(hostname)" "${log##*/}"
  tail -n 40 "$log"
done
[ ! -s "$1/error.log" ] || { printf '== %s: error.log\n' "$(hostname)"; tail -n 40 "$1/error.log"; }
