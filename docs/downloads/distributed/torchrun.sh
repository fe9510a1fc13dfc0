#!/usr/bin/env bash
# Run on each of NODES machines, with its own NODE_RANK: 0, 1, 2, ...
#   FIRST=node0 NODES=3 NODE_RANK=1 bash torchrun.sh
# Start it again with the same NODE_RANK on a machine that replaces a lost one.
# The torchrun of NODE_RANK 0 hosts the store: take a machine that you trust most for it.
set -euo pipefail

: "${FIRST:?the address of the machine with NODE_RANK=0}"
: "${NODES:?the number of machines}"
: "${NODE_RANK:?the number of this machine, from 0 on}"

# Gloo must find the network between the machines: name the interface, if it is not the default.
# export GLOO_SOCKET_IFNAME=eth0

# One process for each torchrun: a torchrun ends all of its processes when one of them dies.
exec torchrun \
  --nnodes="$NODES" --node-rank="$NODE_RANK" --nproc-per-node=1 --max-restarts=0 \
  --master-addr="$FIRST" --master-port="${PORT:-29400}" \
  "$(dirname "$0")/elastic.py" train "$@"
