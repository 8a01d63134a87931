#!/usr/bin/env bash
# Train at the hosted service what .github/workflows/train_tinker.yml was asked for, from its inputs in the environment:
# launch/tinker.sh [--dry-run]. Nothing here is evaluated by a shell or written into a command line unchecked.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/inputs.sh

require MODEL_NAME '[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+(@[A-Za-z0-9_.-]+)?' "the id of a model on the hub"
require MAX_STEPS '[1-9][0-9]{0,6}' "a number of steps"
require BATCH_SIZE '[1-9][0-9]{0,4}' "a number of prompts"
require N_SAMPLES_PER_PROMPT '[1-9][0-9]{0,4}' "a number of samples"
require MODALITY 'tool_use|computer_use|browser_use' "tool_use, computer_use or browser_use"
require ENV_KEY '[A-Za-z0-9_.-]+(,[A-Za-z0-9_.-]+)*' "a list of environments with commas"
require MAX_TASKS '[1-9][0-9]{0,6}' "a number of tasks"
require DATA_VERSION 'v[0-9.]+' "a version of the data, as v6"
require BUDGET_USD '[0-9]{1,6}(\.[0-9]{1,2})?' "a number of US dollars"
require TIME_LIMIT_S '[1-9][0-9]{0,6}' "a number of seconds"
require RUN_ID '[A-Za-z0-9][A-Za-z0-9._-]{0,119}' "the id of a run"
require STORE 's3://[A-Za-z0-9./_-]+' "an address s3://bucket/prefix"
given MODEL_NAME MAX_STEPS BATCH_SIZE N_SAMPLES_PER_PROMPT MODALITY
check_store_and_data

overrides=(
  experiment=tinker_qwen3_8b_fleet "model.path=$MODEL_NAME" "run.steps=$MAX_STEPS"
  "rollout.prompts_per_step=$BATCH_SIZE" "rollout.samples_per_prompt=$N_SAMPLES_PER_PROMPT"
  "data.modality=$MODALITY" "checkpoint.store.url=$STORE" "env.fleet.package=~/fleet-openenv"
)
[ -z "${DATA_VERSION:-}" ] ||
  overrides+=("data.tasks=s3://fleet-internal-datasets/$DATA_VERSION/openenv/all_$MODALITY.json")
[ -z "${ENV_KEY:-}" ] || overrides+=("data.environments=[$ENV_KEY]")
[ -z "${MAX_TASKS:-}" ] || overrides+=("data.max_tasks=$MAX_TASKS")
[ -z "${BUDGET_USD:-}" ] || overrides+=("hosted.budget_usd=$BUDGET_USD")
[ -z "${TIME_LIMIT_S:-}" ] || overrides+=("run.time_limit_s=$TIME_LIMIT_S")
[ -z "${RUN_ID:-}" ] || overrides+=("run.id=$RUN_ID" run.resume=must)
[ -z "${SLACK_CHANNEL:-}" ] || overrides+=("logging.slack.channel=$SLACK_CHANNEL")
unset_empty_secrets
exec "${MFLEET:-.venv/hosted/bin/mfleet}" train "$@" "${overrides[@]}"
