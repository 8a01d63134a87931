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

# A new key of either kind may be all that a service needs; those not set are not there.
unset_empty_secrets() {
  local name
  for name in "${!FLEET_@}" "${!SLACK_@}" "${!WANDB_@}" "${!AWS_@}" "${!TINKER_@}"; do
    [ -n "${!name}" ] || unset "$name"
  done
}
