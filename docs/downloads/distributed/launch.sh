#!/usr/bin/env bash
# Start the job of a lesson on several machines. On each of them, with its own NODE_RANK: 0, 1, ...
#   FIRST=node0 NODES=2 NODE_RANK=0 bash launch.sh job.py
# One process a machine. With RANKS=4 four: some jobs need a certain number, see their first lines.
set -euo pipefail

: "${FIRST:?the address of the machine with NODE_RANK=0}"
: "${NODES:?the number of machines}"
: "${NODE_RANK:?the number of this machine, from 0 on}"

# Gloo must find the network between the machines: name the interface, if it is not the default.
# export GLOO_SOCKET_IFNAME=eth0

exec torchrun \
  --nnodes="$NODES" --node-rank="$NODE_RANK" --nproc-per-node="${RANKS:-1}" --max-restarts=0 \
  --master-addr="$FIRST" --master-port="${PORT:-29400}" "$@"
