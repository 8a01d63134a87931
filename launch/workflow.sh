#!/usr/bin/env bash
# Submit what .github/workflows/train.yml was asked for, from its inputs in the environment: launch/workflow.sh [--dry-run]
# Nothing here is evaluated by a shell or written into a command line unchecked.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/inputs.sh

require TASK_NAME '[a-z0-9_]+' "an experiment of configs/experiment"
require MODEL '[A-Za-z0-9_.-]+(/[A-Za-z0-9_.-]+)?(@[A-Za-z0-9_.-]+)?' "the id of a model on the hub"
require MODALITY 'tool_use|computer_use|browser_use' "tool_use, computer_use or browser_use"
require ENV_KEY '[A-Za-z0-9_.-]+(,[A-Za-z0-9_.-]+)*' "a list of environments with commas"
require MAX_TASKS '[1-9][0-9]{0,6}' "a number of tasks"
require STEPS '[1-9][0-9]{0,6}' "a number of steps"
require CLOUD 'any|slurm|runpod|lambda|vast|nebius|primeintellect|kubernetes|gcp|aws' "a cloud of configs/cluster/skypilot.yaml"
require DATA_VERSION 'v[0-9.]+' "a version of the data, as v6"
require RUN_ID '[A-Za-z0-9][A-Za-z0-9._-]{0,119}' "the id of a run"
require STORE 's3://[A-Za-z0-9./_-]+' "an address s3://bucket/prefix"
given TASK_NAME MODALITY CLOUD
check_store_and_data
[ -f "configs/experiment/$TASK_NAME.yaml" ] || { echo "error: there is no experiment $TASK_NAME." >&2; exit 2; }

overrides=(
  cluster=skypilot "experiment=$TASK_NAME" "data.modality=$MODALITY"
  "checkpoint.store.url=$STORE"
  checkpoint.export.last=false "env.fleet.package=~/fleet-openenv"
)
case $MODALITY in
  tool_use) overrides+=(logging.wandb.project=fleet-task-grpo) ;;
  *) overrides+=(logging.wandb.project=fleet-browser-use-grpo) ;;
esac
[ -z "${DATA_VERSION:-}" ] ||
  overrides+=("data.tasks=s3://fleet-internal-datasets/$DATA_VERSION/openenv/all_$MODALITY.json")
[ -z "${MODEL:-}" ] || overrides+=("model.path=$MODEL")
[ -z "${ENV_KEY:-}" ] || overrides+=("data.environments=[$ENV_KEY]")
[ -z "${MAX_TASKS:-}" ] || overrides+=("data.max_tasks=$MAX_TASKS")
[ -z "${STEPS:-}" ] || overrides+=("run.steps=$STEPS" run.epochs=null)
[ "$CLOUD" = any ] || overrides+=("launch.skypilot.infra=[$CLOUD]")
[ -z "${RUN_ID:-}" ] || overrides+=("run.id=$RUN_ID" run.resume=must)
[ -z "${SLACK_CHANNEL:-}" ] || overrides+=("logging.slack.channel=$SLACK_CHANNEL")
unset_empty_secrets
"${MFLEET:-.venv/engine/bin/mfleet}" launch "${1:---detach}" "${overrides[@]}"
