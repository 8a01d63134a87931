#!/usr/bin/env bash
# Train with ranks that torchrun starts, on one host or on several.
#   launch/torchrun/train.sh experiment=quickstart parallel.data=2
#   NODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MFLEET_TOKEN=secret launch/torchrun/train.sh …
#     the same on the other host, with NODE_RANK=1; the first one runs the controller, and ends when the run does.
# RANKS_PER_NODE (default: the number that the configuration asks for, divided by NODES).
# CONTROLLER_PORT and MASTER_PORT: of the first of several hosts; one host alone takes free ports.
set -euo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
bin=${MFLEET_BIN:-$here/.venv/engine/bin}
nodes=${NODES:-1} node_rank=${NODE_RANK:-0}
if [ -z "${MFLEET_TOKEN:-}" ]; then
  [ "$nodes" -eq 1 ] || { echo "error: MFLEET_TOKEN is not set; set the same secret on all $nodes hosts." >&2; exit 2; }
  MFLEET_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
fi
export MFLEET_TOKEN
if [ "$nodes" -eq 1 ]; then
  MFLEET_CONTROLLER=127.0.0.1:0 meet=(--standalone)
else
  MFLEET_CONTROLLER=$MASTER_ADDR:${CONTROLLER_PORT:-29600}
  # A static rendezvous keeps the order of ranks equal to the order of hosts; c10d ignores the host's rank.
  meet=(--node-rank="$node_rank" --rdzv-backend=static --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}")
fi
export MFLEET_CONTROLLER

ranks_per_node=${RANKS_PER_NODE:-}
if [ -z "$ranks_per_node" ]; then
  # Experts, virtual stages and uneven ends lie within these ranks.
  world=$("$bin/mfleet" config "$@" |
    awk '/^parallel:/ {on = 1; next} /^[a-z]/ {on = 0} on && /^ *(tensor|pipeline|context|data):/ {n = (n ? n : 1) * $2}
         END {print n}')
  ranks_per_node=$((world / nodes))
fi

# again COMMAND…: run it, and again as long as the controller listens.
again() {
  while :; do
    "$@" || true
    (: <>"/dev/tcp/${MFLEET_CONTROLLER%:*}/${MFLEET_CONTROLLER##*:}") 2>/dev/null || return 0
    sleep 1
  done
}

start_host() {
  # Engines run on all hosts: each of several runs a node, for Ray.
  [ "$nodes" -eq 1 ] || again "$bin/mfleet" node &
  # Ranks end together when one of them dies.
  again "$bin/torchrun" --nnodes="$nodes" --nproc-per-node="$ranks_per_node" "$@" --no-python "$bin/mfleet" rank
  wait
}

if [ "$node_rank" -ne 0 ]; then
  start_host "${meet[@]}"
  exit
fi
listening=$(mktemp)
joined=$((nodes > 1 ? nodes : 0))
MFLEET_CONTROLLER_FILE=$listening "$bin/mfleet" train "$@" cluster.ranks=external cluster.nodes="$joined" &
controller=$!
trap 'kill -TERM "$controller" 2>/dev/null' TERM
trap : INT
until [ -s "$listening" ] || ! kill -0 "$controller" 2>/dev/null; do sleep 0.1; done
MFLEET_CONTROLLER=$(cat "$listening")
rm -f "$listening"
ranks=
if [ -n "$MFLEET_CONTROLLER" ]; then
  # A session of its own: Ctrl-C is for the controller, which ends the ranks in order.
  export -f again start_host
  export bin nodes ranks_per_node MFLEET_CONTROLLER
  setsid bash -c 'start_host "$@"' - "${meet[@]}" &
  ranks=$!
fi
while kill -0 "$controller" 2>/dev/null; do
  # A signal ends `wait` early.
  wait "$controller" || true
done
wait "$controller" && status=0 || status=$?
if [ -n "$ranks" ]; then
  # After a bad end they may still wait for the controller.
  [ "$status" -eq 0 ] || kill -TERM -- "-$ranks" 2>/dev/null || true
  wait "$ranks" || true
fi
exit "$status"
