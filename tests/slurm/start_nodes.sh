#!/usr/bin/env bash
# Starts a controller and two nodes, n1 and n2, and stays until its input ends. For root, in namespaces of mounts and processes
# of its own: what it mounts is seen nowhere else, and when it ends, so does everything it started.
#
#   unshare --mount --pid --fork --mount-proc --kill-child start_nodes.sh FOLDER
#
# FOLDER has slurm.conf; the key of munge, its socket, states and logs go there too.
set -euo pipefail
folder=$1
cd "$folder"
export SLURM_CONF=$folder/slurm.conf

# The address of rank 0 is the name of the first node.
{ cat /etc/hosts && echo "127.0.0.1 n1 n2"; } >hosts
mount --bind hosts /etc/hosts

mkdir -p state spool.n1 spool.n2
for number in 0 1; do mknod "gpu$number" c 1 3; done # what /dev/null is
(umask 077 && head --bytes=1024 /dev/urandom >munge.key)
chown "$(id -u):$(id -g)" .
munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munge.pid" \
  --log-file="$folder/munge.log" --seed-file="$folder/munge.seed" 2>munge.errors
slurmctld
for node in n1 n2; do slurmd -N "$node"; done
cat >/dev/null
