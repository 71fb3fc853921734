#!/bin/bash
# full: 1 chief, 4 worker, 2 ps, strategy parameter_server. Submit with sbatch.
#
# Written by: tfdist render --for slurm

#SBATCH --job-name=full
#SBATCH --output="logs/my %x-%j.log"
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --time=1-12:00:00
#SBATCH --chdir="/home/a b/work"
#SBATCH --partition=gpu
#SBATCH --account=team-a
#SBATCH --qos=high
#SBATCH --constraint=a100&nvlink
#SBATCH --reservation=mine
#SBATCH --exclusive
#SBATCH --mail-type=END
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=8G
#SBATCH hetjob
#SBATCH --partition=gpu
#SBATCH --account=team-a
#SBATCH --qos=high
#SBATCH --constraint=a100&nvlink
#SBATCH --reservation=mine
#SBATCH --exclusive
#SBATCH --nodes=2
#SBATCH --ntasks=4
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --gpus-per-task=1
#SBATCH hetjob
#SBATCH --partition=gpu
#SBATCH --account=team-a
#SBATCH --qos=high
#SBATCH --constraint=a100&nvlink
#SBATCH --reservation=mine
#SBATCH --exclusive
#SBATCH --nodes=1
#SBATCH --ntasks=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --mem=200G

roles=(chief worker worker worker worker ps ps)  # in the order of their numbers
counts=(1 4 2)  # tasks of each component of the job
step_options_0=(--export=ALL --kill-on-bad-exit=0 --wait=0 --nodes=1 --ntasks=1 --cpus-per-task=8 --cpu-bind=none '--comment=a b')
step_options_1=(--export=ALL --kill-on-bad-exit=0 --wait=0 --nodes=2 --ntasks=4 --cpus-per-task=8 --gpus-per-task=1 --cpu-bind=none '--comment=a b')
step_options_2=(--export=ALL --kill-on-bad-exit=0 --wait=0 --nodes=1 --ntasks=2 --cpus-per-task=4 --cpu-bind=none '--comment=a b')
container_options=(--container-image='registry#team/tfdist:1' --container-mounts="$PWD:$PWD",'/data:/data,/home/a b:/b' --container-workdir="$PWD")
export TFDIST_KEEP_ON_TERM='ps worker'
max_restarts=5 stop_seconds=60 save_seconds=300

# Set-up of the config.
module load cuda/12.8
source .venv/bin/activate

export DATA='/data/it'"'"'s $HOME'
program=(python -m trainer.task --config '{"experiment": {"name": "flights", "options": {"buckets": 16384, "embedding_dim": 8}}, "strategy": {"name": null}, "data": {"global_batch_size": 1024}, "training": {"epochs": 2, "learning_rate": 0.001, "seed": 0}, "output": {"directory": "runs/flights-ps"}}')

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
