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
command=

end() {
    [ -n "$command" ] || exit 143 # not started yet
    kill -TERM "$command"
}
trap end TERM
trap 'requeue=yes; end' USR1
"$@" &
command=$!
while :; do # a signal that is trapped ends wait, the command goes on
    wait "$command"
    kill -0 "$command" 2>/dev/null || break
done
wait "$command" # its own status, also where a signal ended the wait before
status=$?
if [ -n "$requeue" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$most_restarts" ]; then
    echo "time is up: job $SLURM_JOB_ID goes back to the queue"
    scontrol requeue "$SLURM_JOB_ID"
    sleep 60
fi
exit "$status"
