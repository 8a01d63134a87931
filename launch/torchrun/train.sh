#!/usr/bin/env bash
# Train with ranks that torchrun starts, on one host or on several.
#   launch/torchrun/train.sh experiment=quickstart parallel.data=2
#   NODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MFLEET_TOKEN=secret launch/torchrun/train.sh …
#     the same on the other host, with NODE_RANK=1; the first one runs the controller, and ends when the run does.
# RANKS_PER_NODE (default: the number that the configuration asks for, divided by NODES).
set -euo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
bin=${MFLEET_BIN:-$here/.venv/engine/bin}
nodes=${NODES:-1} node_rank=${NODE_RANK:-0} address=${MASTER_ADDR:-127.0.0.1} port=${CONTROLLER_PORT:-29600}
if [ -z "${MFLEET_TOKEN:-}" ]; then
  [ "$nodes" -eq 1 ] || { echo "error: MFLEET_TOKEN is not set; set the same secret on all $nodes hosts." >&2; exit 2; }
  MFLEET_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
fi
export MFLEET_TOKEN MFLEET_CONTROLLER=$address:$port

ranks_per_node=${RANKS_PER_NODE:-}
if [ -z "$ranks_per_node" ]; then
  # Experts, virtual stages and uneven ends lie within these ranks.
  world=$("$bin/mfleet" config "$@" |
    awk '/^parallel:/ {on = 1; next} /^[a-z]/ {on = 0} on && /^ *(tensor|pipeline|context|data):/ {n = (n ? n : 1) * $2}
         END {print n}')
  ranks_per_node=$((world / nodes))
fi

# Engines run on all hosts: each of several runs a node, for Ray.
run_node() {
  while :; do
    "$bin/mfleet" node || true
    (: <>"/dev/tcp/$address/$port") 2>/dev/null || return 0
    sleep 1
  done
}

# Ranks end together when one of them dies; they are started again as long as the controller wants them.
run_ranks() {
  while :; do
    # --rdzv-backend=static keeps the order of ranks equal to the order of hosts; c10d ignores the host's rank.
    "$bin/torchrun" --nnodes="$nodes" --nproc-per-node="$ranks_per_node" --node-rank="$node_rank" \
      --rdzv-backend=static --master-addr="$address" --master-port="${MASTER_PORT:-29500}" \
      --no-python "$bin/mfleet" rank || true
    (: <>"/dev/tcp/$address/$port") 2>/dev/null || return 0
    sleep 1
  done
}

start_host() {
  [ "$nodes" -eq 1 ] || run_node &
  run_ranks
  wait
}

if [ "$node_rank" -ne 0 ]; then
  start_host
  exit
fi
# A session of its own: Ctrl-C is for the controller, which ends the ranks in order.
export -f run_node run_ranks start_host
export bin nodes node_rank address port ranks_per_node
setsid bash -c start_host &
ranks=$!
joined=$((nodes > 1 ? nodes : 0))
"$bin/mfleet" train cluster.ranks=external cluster.nodes="$joined" "$@" &
controller=$!
trap 'kill -TERM "$controller" 2>/dev/null' TERM
trap : INT
status=0
while kill -0 "$controller" 2>/dev/null; do
  # A signal ends `wait` early.
  wait "$controller" && status=0 || status=$?
done
# After a bad end they may still wait for the controller.
[ "$status" -eq 0 ] || kill -TERM -- "-$ranks" 2>/dev/null || true
wait "$ranks" || true
exit "$status"
