#!/bin/bash
#SBATCH --job-name=kitty
#SBATCH --ntasks=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@90
# One SLURM job that runs a command and survives preemption and the time limit: what is finished stays, and the
# command goes on from there in the next start.
#
#   sbatch --cpus-per-task=8 --mem=32G --gpus=1 --time=240 job.sh \
#       apptainer run --nv kitty.sif kitty run reviewer --profile slurm-single
#
# `kitty submit` fills in the options. The command gets 90 seconds before the time limit to end its jobs.
set -u
most_restarts=20
requeue=

"$@" &
command=$!
trap 'kill -TERM "$command"' TERM
trap 'requeue=yes; kill -TERM "$command"' USR1
status=129
while [ "$status" -gt 128 ] && kill -0 "$command" 2>/dev/null; do # a trapped signal ends wait
    wait "$command"
    status=$?
done
if [ -n "$requeue" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$most_restarts" ]; then
    echo "time is up: job $SLURM_JOB_ID goes back to the queue"
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60
fi
exit "$status"
