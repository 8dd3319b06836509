#!/bin/bash
# Checks that a cluster continues runs: it submits pretrain.sbatch once untouched and then once for each case of $CASES, and
# compares the last checkpoints bit for bit. It ends with 0 if all cases are right.
#   NODES=2 GPUS=8 examples/launch/check_requeue.sh DIRECTORY [options of pretrain.py]
# DIRECTORY is on a file system that all nodes share. The cases:
#   killed   a node dies in the middle: KILL='COMMAND' kills a node or a process of the job $JOB; by default every process
#            of the job is killed
#   limit    the time limit of LIMIT minutes (2), shorter than the run, is reached; SIGTERM comes a minute before
#   array    two runs of an array, of one node each, one of which is killed
#   drained  DRAIN=NODE is drained and the job goes back into the queue: it continues on the nodes that are left (needs the
#            rights of an operator; with fewer devices sums are added in another order, so only the steps are compared)
set -euo pipefail

out=$1
shift
options=("$@")
CASES=${CASES:-killed limit array}
kill_processes='scancel --signal=KILL $JOB.0'

submit() { # name, then options of sbatch; the run's directory is $out/NAME
  local name=$1
  shift
  OUT="$out/$name" sbatch --parsable --gpus-per-node="${GPUS:-8}" --job-name="check-$name" --output="$out/$name.log" \
    "$@" examples/launch/pretrain.sbatch "${options[@]}"
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
wait_for_half() { # name, job
  while (($(steps_of "$1") < total / 2)) && is_in_queue "$2"; do sleep 0.2; done
}
wait_until_resumed() { # name, job, sessions; prints the seconds
  local begin
  begin=$(date +%s)
  until (($(grep -c "resumed after step" "$out/$1.log") >= $3)) || ! is_in_queue "$2"; do sleep 0.5; done
  grep "resumed after step" "$out/$1.log" | tail -n 1
  echo "$1: $(($(date +%s) - begin)) s until it was restored"
}
compare() { # name, what must be equal: arrays or steps
  python - "$out" "$1" "$2" <<'PYTHON'
import sys
from maxlib import checkpoint

out, name, what = sys.argv[1:]
untouched, other = (checkpoint.read_records(f"{out}/{run}/checkpoints") for run in ("untouched", name))
assert untouched.meta["step"] == other.meta["step"], (name, untouched.meta["step"], other.meta["step"])
assert untouched.data == other.data, f"{name}: the two places in the data differ"
if what == "arrays":
    assert untouched.items == other.items, f"{name}: the two checkpoints differ"
    print(f"{name}: step {other.meta['step']}, {sum(map(len, other.items.values()))} arrays are equal bit for bit")
else:
    print(f"{name}: step {other.meta['step']} was reached with the same data")
PYTHON
}

killed() {
  export JOB
  JOB=$(submit killed --nodes="${NODES:-2}")
  wait_for_half killed "$JOB"
  echo "killed after step $(steps_of killed)"
  eval "${KILL:-$kill_processes}"
  wait_until_resumed killed "$JOB" 1
  wait_for "$JOB"
  compare killed arrays
}
limit() {
  local job
  job=$(submit limit --nodes="${NODES:-2}" --time="${LIMIT:-2}" --signal=TERM@60)
  wait_for "$job"
  grep "stopped on request" "$out/limit.log" || { echo "limit: the run ended before its time limit"; exit 1; }
  compare limit arrays
}
array() {
  local job
  job=$(submit array --nodes=1 --array=1-2)
  while [ ! -f "$out/array-1/metrics.jsonl" ] && is_in_queue "$job"; do sleep 0.2; done
  scancel --signal=KILL "${job}_1.0"
  wait_for "$job"
  grep -q "back into the queue" "$out/array.log"
  compare array-1 steps
  compare array-2 steps
}
drained() {
  local job
  job=$(submit drained --nodes=1-"${NODES:-2}")
  wait_for_half drained "$job"
  echo "drained after step $(steps_of drained)"
  scontrol update nodename="$DRAIN" state=drain reason=check
  scontrol requeue "$job"
  wait_until_resumed drained "$job" 1
  wait_for "$job"
  scontrol update nodename="$DRAIN" state=resume
  compare drained steps
}

mkdir -p "$out"
wait_for "$(submit untouched --nodes="${NODES:-2}")"
total=$(steps_of untouched)
echo "untouched: $total steps"
for case in $CASES; do "$case"; done
