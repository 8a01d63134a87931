#!/usr/bin/env bash
# Train under torchrun instead of mfleet's own launcher, on one machine or on several.
#   launch/torchrun/train.sh experiment=quickstart parallel.data=2
#   NODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 launch/torchrun/train.sh …      the same on node 1, with NODE_RANK=1
# RANKS_PER_NODE (default: the number that the configuration asks for, divided by NODES).
set -euo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
bin=$here/.venv/engine/bin
nodes=${NODES:-1}
# Experts, virtual stages and uneven ends lie within these ranks.
world=$("$bin/mfleet" config "$@" |
  awk '/^parallel:/ {on = 1; next} /^[a-z]/ {on = 0} on && /^ *(tensor|pipeline|context|data):/ {n = (n ? n : 1) * $2} END {print n}')
ranks=${RANKS_PER_NODE:-$((world / nodes))}
# --rdzv-backend=static keeps the order of ranks equal to the order of nodes; c10d ignores the node's rank.
exec "$bin/torchrun" --nnodes="$nodes" --nproc-per-node="$ranks" --node-rank="${NODE_RANK:-0}" \
  --rdzv-backend=static --master-addr="${MASTER_ADDR:-127.0.0.1}" --master-port="${MASTER_PORT:-29500}" \
  -m megatron_fleet.cli train "$@"
