#!/usr/bin/env bash
# One host of a run, where something else starts this script on every host: SkyPilot, a JobSet, parallel ssh.
#   HOSTS=2 HOST_RANK=0 HEAD=10.0.0.1 MFLEET_TOKEN=secret launch/host.sh experiment=…
# The host of rank 0, whose address is HEAD, runs the controller, and ends with the run's status; each of several runs a
# node, which starts its ranks and engines. The others end with status 0 when the run has ended, whatever it ended with,
# and with 3 when its controller is gone: no host waits for one that is lost.
# CONTROLLER_PORT (29600) must be free on HEAD, all other ports are any free ones. MFLEET_OUT: run.out, whose logs are
# printed after a bad end. MFLEET_DOCTOR=1: `mfleet doctor` goes first, and ends the job where the run would not work.
# ATTEMPT (0): above 0 the run goes on from its newest checkpoint, whatever run.resume says.
set -euo pipefail
project=$(cd "$(dirname "$0")/.." && pwd)
bin=${MFLEET_BIN:-$project/.venv/engine/bin}
hosts=${HOSTS:-1} rank=${HOST_RANK:-0}
# A Ray that runs on this host for somebody else, as SkyPilot's own, is not the run's.
for variable in "${!RAY_@}"; do unset "$variable"; done
if [ "${ATTEMPT:-0}" -gt 0 ]; then set -- "$@" run.resume=auto; fi

if [ "$hosts" -gt 1 ]; then
  [ -n "${MFLEET_TOKEN:-}" ] || { echo "error: MFLEET_TOKEN is not set; set the same secret on all $hosts hosts." >&2; exit 2; }
  export MFLEET_CONTROLLER=$HEAD:${CONTROLLER_PORT:-29600}
fi

if [ -n "${MFLEET_DOCTOR:-}" ]; then
  "$bin/mfleet" doctor "$@" cluster.nodes="$((hosts > 1 ? hosts : 0))" --quick
fi

child='' asked=''
# pass_on SIGNAL…: to the child, from now on.
pass_on() {
  local name
  for name; do
    # shellcheck disable=SC2064 # this name; but whatever child there is then
    trap "asked=$name; [ -z \"\$child\" ] || kill -$name \"\$child\" 2>/dev/null || true" "$name"
  done
}
# run COMMAND…: its status; signals are passed on to it.
run() {
  "$@" &
  child=$!
  while kill -0 "$child" 2>/dev/null; do
    # A signal ends `wait` early.
    wait "$child" || true
  done
  wait "$child" && status=0 || status=$?
  child=''
}

# node: run one, and again when it was killed, as by the kernel for want of memory.
node() {
  while :; do
    run "$bin/mfleet" node
    # 0: the run has ended. 2: it does not want this host. 3: its controller is gone.
    case $status in 0 | 2 | 3) return ;; esac
    [ -z "$asked" ] || return 0
    sleep 1
  done
}

if [ "$rank" -gt 0 ]; then
  # Those who end a job send SIGTERM to all hosts: the controller then saves, which needs the ranks of this one. It ends
  # with the run, or by SIGKILL.
  pass_on INT
  trap : TERM USR1
  node
else
  nodes=0
  pass_on TERM USR1 INT
  if [ "$hosts" -gt 1 ]; then
    nodes=$hosts
    (
      pass_on TERM
      trap : USR1
      node
    ) &
    of_head=$!
  fi
  run "$bin/mfleet" train "$@" cluster.nodes="$nodes"
  if [ "$hosts" -gt 1 ]; then
    kill -TERM "$of_head" 2>/dev/null || true
    wait "$of_head" || true
  fi
fi
if [ "$status" -ne 0 ] && [ -n "${MFLEET_OUT:-}" ]; then
  "$project/launch/last_words.sh" "$MFLEET_OUT"
fi
exit "$status"
