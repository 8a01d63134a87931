#!/usr/bin/env bash
# Make the Python environments on this host: launch/install.sh [--hosted]
# Hosts that share the project's folder may all run it: the first one installs, and the others wait for its lock, which
# ends with it however it ends, and then find that nothing is left to do. INSTALL_TIMEOUT_S (3600) is the deadline of all
# of this; a host that is late ends with status 124. FLEET_PACKAGE=folder: FleetTaskEnv goes there (env.fleet.package).
set -euo pipefail
cd "$(dirname "$0")/.."
arguments=("$@")
export EPISODES=episode  # the environment of episodes
if [ "${1:-}" = --hosted ]; then
  EPISODES=hosted
elif command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus 2>/dev/null | grep -q .; then
  arguments=(--gpu)
fi
deadline=${INSTALL_TIMEOUT_S:-3600}

# shellcheck disable=SC2329 # the inner shell does
# Its package name is that of another package, hence the folder (docs/run/environments.md).
install_fleet() {
  local folder=${FLEET_PACKAGE/#\~/$HOME} pip=.venv/$EPISODES/bin/pip
  exec 8>.venv/.fleet-lock
  flock 8
  [ ! -d "$folder" ] || return 0
  "$pip" install -qq -e '.[fleet]' 'mcp>=1.24,<2' -c "requirements/$EPISODES.lock"
  rm -rf "$folder.unfinished"
  "$pip" install -qq --no-deps --target "$folder.unfinished" \
    git+https://github.com/fleet-ai/OpenEnv@009c1ed90ffee3575785eb169b8254f4c682e09a
  mv "$folder.unfinished" "$folder"
}
export -f install_fleet
more=:
[ -z "${FLEET_PACKAGE:-}" ] || more=install_fleet
status=0
# shellcheck disable=SC2016 # for the inner shell
timeout --kill-after=30 "$deadline" bash -euc './setup.sh "${@:2}" && "$1"' install "$more" "${arguments[@]}" || status=$?
[ "$status" -ne 124 ] || echo "error: $(hostname) was not set up within $deadline s (INSTALL_TIMEOUT_S)." >&2
exit "$status"
