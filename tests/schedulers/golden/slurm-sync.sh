#!/bin/bash
# digits-multiworker: 2 worker, strategy multi_worker. Submit with sbatch.
#
# Written by: tfdist render --for slurm

#SBATCH --job-name=digits-multiworker
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --time=0-01:30:00
#SBATCH --nodes=2
#SBATCH --ntasks=2

roles=(worker worker)  # in the order of their numbers
counts=(2)  # tasks of each component of the job
step_options_0=(--export=ALL --kill-on-bad-exit=0 --wait=0 --nodes=2 --ntasks=2)
container_options=()
export TFDIST_KEEP_ON_TERM=''
max_restarts=3 stop_seconds=60 save_seconds=120

program=(python -m trainer.task --config '{"experiment": {"name": "digits"}, "strategy": {"name": null}, "data": {"global_batch_size": 64}, "training": {"epochs": 12, "learning_rate": 0.002, "seed": 0}, "output": {"directory": "runs/digits-multiworker"}}')
if ! command -v "${program[0]}" >/dev/null; then
  echo "no program ${program[0]} here: see slurm.setup and slurm.command" >&2
  exit 2
fi

# What each task runs before the program: which one it is, and how it ends.
read -r -d '' task <<'END_OF_TASK'
number=$((TFDIST_FIRST_TASK + SLURM_PROCID))
read -ra roles <<<"$TFDIST_ROLES"
read -ra nodes <<<"$TFDIST_NODES"
role=${roles[number]}
index=0
for ((other = 0; other < number; other++)); do
  [[ ${roles[other]} == "$role" ]] && ((index += 1))
done
fail() {
  echo "task $number ($role $index): $1" >&2
  code=2
}
code=0
if [[ ${nodes[number]} != "$SLURMD_NODENAME" ]]; then
  fail "expected on node ${nodes[number]}, runs on $SLURMD_NODENAME"
else
  place="{\"type\": \"$role\", \"index\": $index}"
  export TF_CONFIG="{\"cluster\": $TFDIST_ADDRESSES, \"task\": $place}"
  # A signal is the program's; this shell only hands over how it ended.
  trap : TERM
  if [[ " $TFDIST_KEEP_ON_TERM " == *" $role "* ]]; then
    trap '' TERM
  fi
  "$@" &
  program=$!
  while :; do
    wait "$program"
    code=$?
    kill -0 "$program" 2>/dev/null || break
  done
fi
if ((code != 0)); then
  # The first to fail says how the job has ended; a file can be made only once.
  (set -o noclobber && echo "$code" >"$TFDIST_FIRST_EXIT") 2>/dev/null
fi
exit "$code"
END_OF_TASK

# They are those of the first component; steps get their own below.
unset SLURM_NTASKS_PER_NODE SLURM_CPUS_PER_TASK SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK
unset SLURM_MEM_PER_NODE SLURM_MEM_PER_CPU

# Where each task will run: steps with the same options are laid out alike.
nodes=()
for ((group = 0; group < ${#counts[@]}; group++)); do
  declare -n options=step_options_$group
  ((${#counts[@]} > 1)) && options+=("--het-group=$group")
  places=$(srun "${options[@]}" bash -c 'echo "$SLURM_PROCID $SLURMD_NODENAME"' |
    sort -n | cut -d " " -f 2)
  read -r -d '' -a found <<<"$places"
  if ((${#found[@]} != counts[group])); then
    echo "expected ${counts[group]} tasks in component $group, srun started ${#found[@]}" >&2
    exit 1
  fi
  nodes+=("${found[@]}")
done

# A node's own name where it means something here, else the address that Slurm uses.
declare -A address_of
for node in "${nodes[@]}"; do
  [[ -n ${address_of[$node]:-} ]] && continue
  address=$node
  if ! getent hosts "$node" >/dev/null; then
    told=$(scontrol show node "$node" -o 2>/dev/null | grep -o 'NodeAddr=[^ ]*')
    address=${told#NodeAddr=}
  fi
  address_of[$node]=${address:-$node}
done

# A port of its own for each task, so that nodes may also be one machine.
port=${TFDIST_PORT_BASE:-$((12000 + 64 * (SLURM_JOB_ID % 281)))}
addresses=""
last=""
for number in "${!roles[@]}"; do
  role=${roles[number]}
  [[ $role == evaluator ]] && continue # It meets nobody.
  address="\"${address_of[${nodes[number]}]}:$((port + number))\""
  if [[ $role == "$last" ]]; then
    addresses+=", $address"
  else
    addresses+="${last:+], }\"$role\": [$address"
  fi
  last=$role
done
export TFDIST_ADDRESSES="{$addresses]}"
export TFDIST_ROLES="${roles[*]}" TFDIST_NODES="${nodes[*]}"
export TFDIST_FIRST_EXIT="$PWD/.tfdist-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}.exit"
export PYTHONUNBUFFERED=1
unset TFDIST_CLUSTER CLUSTER_SPEC
rm -f "$TFDIST_FIRST_EXIT"

# The time limit is near: the tasks save and end with 143. SIGTERM of Slurm reaches them as well.
trap 'echo "the time limit is near: saving"; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
trap : TERM

steps=()
first=0
for ((group = 0; group < ${#counts[@]}; group++)); do
  declare -n options=step_options_$group
  TFDIST_FIRST_TASK=$first srun "${options[@]}" "${container_options[@]}" \
    bash -c "$task" task "${program[@]}" &
  steps+=($!)
  ((first += counts[group]))
done

# Until all have ended, or one has failed and the others had time to.
failed_at=""
while kill -0 "${steps[@]}" 2>/dev/null; do
  sleep 1
  if [[ -e $TFDIST_FIRST_EXIT ]]; then
    failed_at=${failed_at:-$SECONDS}
    [[ $(<"$TFDIST_FIRST_EXIT") == 143 ]] && stop_seconds=$save_seconds
    if ((SECONDS >= failed_at + stop_seconds)); then
      echo "a task has failed, and others go on: they are stopped" >&2
      break
    fi
  fi
done
code=0
if [[ -e $TFDIST_FIRST_EXIT ]]; then
  code=$(<"$TFDIST_FIRST_EXIT")
  rm -f "$TFDIST_FIRST_EXIT"
else
  for step in "${steps[@]}"; do
    wait "$step"
    ended=$?
    ((ended > code)) && code=$ended
  done
fi

# Slurm queues again what it has taken the nodes from; what is cancelled stays so.
state=$(scontrol show job "$SLURM_JOB_ID" -o | grep -o -m 1 'JobState=[A-Z]*' | head -n 1)
restarts=${SLURM_RESTART_COUNT:-0}
again=0
((code == 143 || (code != 0 && code != 2 && restarts < max_restarts))) && again=1
if [[ $state == JobState=RUNNING ]] && ((again)); then
  echo "ended with exit code $code: queued again, after $restarts restarts"
  scontrol requeue "$SLURM_JOB_ID" && sleep 60 # Slurm ends this script.
fi
exit "$code"
