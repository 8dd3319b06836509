#!/bin/bash
# Checks that a cluster continues a run after a node has died: it submits pretrain.sbatch twice, kills a node in the middle
# of the second run, waits until SLURM has requeued and finished it, and compares the two last checkpoints bit for bit.
#   NODES=2 GPUS=8 KILL='COMMAND' examples/launch/check_requeue.sh DIRECTORY [options of pretrain.py]
# DIRECTORY is on a file system that all nodes share. KILL is a command that kills a node or a process of the job $JOB; by
# default every process of the job is killed. It ends with 0 if the checkpoints are equal.
set -euo pipefail

out=$1
shift
submit() {
  name=$1
  shift
  sbatch --parsable --nodes="${NODES:-2}" --gpus-per-node="${GPUS:-8}" --job-name="check-$name" \
    --output="$out/$name.log" examples/launch/pretrain.sbatch --out "$out/$name" "$@"
}
steps_of() {
  local file="$out/$1/metrics.jsonl"
  if [ -f "$file" ]; then grep -c '"loss"' "$file" || true; else echo 0; fi
}
is_in_queue() {
  squeue --noheader --jobs="$1" 2>/dev/null | grep -q .
}
wait_for() {
  while is_in_queue "$1"; do sleep 1; done
}

mkdir -p "$out"
wait_for "$(submit untouched "$@")"
total=$(steps_of untouched)
echo "untouched: $total steps"

export JOB
JOB=$(submit killed "$@")
while (($(steps_of killed) < total / 2)) && is_in_queue "$JOB"; do sleep 0.2; done
begin=$(date +%s)
echo "killed after step $(steps_of killed)"
eval "${KILL:-scancel --signal=KILL \$JOB.0}"
until grep -q "resumed after step" "$out/killed.log" || ! is_in_queue "$JOB"; do sleep 0.5; done
grep "resumed after step" "$out/killed.log"
echo "$(($(date +%s) - begin)) s from the kill until it was restored"
wait_for "$JOB"

python - "$out" <<'PYTHON'
import sys
from maxlib import checkpoint

untouched, killed = (checkpoint.read_records(f"{sys.argv[1]}/{name}/checkpoints") for name in ("untouched", "killed"))
assert untouched.meta["step"] == killed.meta["step"], (untouched.meta["step"], killed.meta["step"])
assert untouched.items == killed.items, "the two checkpoints differ"
print(f"step {killed.meta['step']}: {sum(map(len, killed.items.values()))} arrays are equal bit for bit")
PYTHON
