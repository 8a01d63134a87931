# shellcheck shell=bash
# Checks of a workflow's inputs, which are variables of the environment; for workflow.sh and tinker.sh.

# require NAME PATTERN WHAT: the value of the variable has this form, or is empty.
require() {
  local value=${!1:-}
  [ -z "$value" ] || [[ $value =~ ^($2)$ ]] || { echo "error: $1='$value' is not $3." >&2; exit 2; }
}

# given NAME…: none of these variables is empty.
given() {
  local name
  for name in "$@"; do
    [ -n "${!name:-}" ] || { echo "error: $name is empty; give a value." >&2; exit 2; }
  done
}

# check_store_and_data: checkpoints have a store, and the tasks of the modality a file.
check_store_and_data() {
  if [ -z "${STORE:-}" ]; then
    echo "error: STORE is empty; set the variable CHECKPOINT_STORE of the repository to s3://bucket/prefix." >&2
    exit 2
  fi
  if [ -z "${DATA_VERSION:-}" ] && [ "$MODALITY" != tool_use ]; then
    echo "error: DATA_VERSION is empty, and the experiments name files of tool_use; give a version for $MODALITY." >&2
    exit 2
  fi
}

# unset_empty_secrets: a secret that the repository does not have is an empty variable here; remove those.
unset_empty_secrets() {
  local name
  for name in "${!FLEET_@}" "${!SLACK_@}" "${!WANDB_@}" "${!AWS_@}" "${!TINKER_@}"; do
    [ -n "${!name}" ] || unset "$name"
  done
}
