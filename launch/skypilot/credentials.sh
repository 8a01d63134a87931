#!/usr/bin/env bash
# Write the files in which SkyPilot looks for credentials, from environment variables: launch/skypilot/credentials.sh
# A variable that is not set is passed over. AWS needs no file, its variables are enough.
set -euo pipefail
umask 077

# write FILE: its standard input, below the home folder.
write() {
  mkdir -p "$(dirname "$HOME/$1")"
  cat >"$HOME/$1"
}
[ -z "${LAMBDA_API_KEY:-}" ] || write .lambda_cloud/lambda_keys <<<"api_key = $LAMBDA_API_KEY"
[ -z "${RUNPOD_API_KEY:-}" ] || write .runpod/config.toml <<<"[default]
api_key = \"$RUNPOD_API_KEY\""
[ -z "${VAST_API_KEY:-}" ] || write .config/vastai/vast_api_key <<<"$VAST_API_KEY"
[ -z "${PRIME_INTELLECT_API_KEY:-}" ] || write .prime/config.json <<<"{\"api_key\": \"$PRIME_INTELLECT_API_KEY\"}"
[ -z "${NEBIUS_CREDENTIALS_JSON:-}" ] || write .nebius/credentials.json <<<"$NEBIUS_CREDENTIALS_JSON"
[ -z "${NEBIUS_TENANT_ID:-}" ] || write .nebius/NEBIUS_TENANT_ID.txt <<<"$NEBIUS_TENANT_ID"
[ -z "${SLURM_CONFIG:-}" ] || write .slurm/config <<<"$SLURM_CONFIG"
[ -z "${KUBECONFIG_CONTENT:-}" ] || write .kube/config <<<"$KUBECONFIG_CONTENT"
if [ -n "${GCP_CREDENTIALS_JSON:-}" ]; then
  write .config/gcloud/application_default_credentials.json <<<"$GCP_CREDENTIALS_JSON"
fi
