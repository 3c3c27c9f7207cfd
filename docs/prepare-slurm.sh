#!/bin/sh
# Prepare shards with a Slurm array: `sbatch prepare-slurm.sh` in the project's folder. All tasks of
# the array form one group of `torchrun`, so Slurm must be able to start them at the same time.
# Submit it again after a failure: finished shards are kept. See "Prepare on a cluster" in
# docs/howto.md.
#SBATCH --job-name=sfumato-prepare
#SBATCH --array=0-3
#SBATCH --cpus-per-task=8
#SBATCH --mem=16G
#SBATCH --time=08:00:00
set -eu
: "${SFUMATO_STATE:?must be a folder on a file system that all hosts share}"

# The first task writes the name of its host for the others.
umask 077
mkdir -p "$SFUMATO_STATE/launches"
first="$SFUMATO_STATE/launches/$SLURM_ARRAY_JOB_ID"
if [ "$SLURM_ARRAY_TASK_ID" = "$SLURM_ARRAY_TASK_MIN" ]; then
    hostname > "$first.tmp"
    mv "$first.tmp" "$first"
    trap 'rm -f "$first"' EXIT
fi
until [ -s "$first" ]; do sleep 1; done

torchrun --nnodes="$SLURM_ARRAY_TASK_COUNT" --nproc-per-node="$SLURM_CPUS_PER_TASK" --rdzv-backend=c10d \
    --rdzv-id="$SLURM_ARRAY_JOB_ID" --rdzv-endpoint="$(cat "$first"):$((20000 + SLURM_ARRAY_JOB_ID % 10000))" \
    -m stages.cli prepare sensitive
