#!/usr/bin/env bash
# Profile and train three times, each time from the policy that the time before trained:
#     bash examples/rounds.sh [RECIPE [SEED]]
# The results are in data, round2 and round3. After a kill the same command continues.
set -euo pipefail
recipe=${1:-sgpo} seed=${2:-0} last=data
winnow run
for root in round2 round3; do
    winnow run --data $root --force policy --set "policy.source=$last/runs/$recipe/$seed/train/policy"
    last=$root
done
