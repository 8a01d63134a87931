#!/usr/bin/env bash
# Make the Python environments on this host: launch/install.sh
# Hosts that share the project's folder may all run it: the first one installs, and the others wait for its lock, which
# ends with it however it ends, and then find that nothing is left to do. INSTALL_TIMEOUT_S (3600) is the deadline of all
# of this; a host that is late ends with status 124.
set -euo pipefail
cd "$(dirname "$0")/.."
arguments=()
if command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus 2>/dev/null | grep -q .; then
  arguments=(--gpu)
fi
status=0
timeout --kill-after=30 "${INSTALL_TIMEOUT_S:-3600}" ./setup.sh "${arguments[@]}" || status=$?
[ "$status" -ne 124 ] || echo "error: $(hostname) was not set up within ${INSTALL_TIMEOUT_S:-3600} s (INSTALL_TIMEOUT_S)." >&2
exit "$status"
