#!/usr/bin/env bash
# Make the two Python environments of this project, .venv/engine and .venv/episode (see requirements/*.txt for why two).
# Usage: ./setup.sh [--dev]     --dev adds what the tests and checks need.
# Run it as often as you like: nothing happens when nothing changed, and an interrupted run is taken up again.
set -euo pipefail
cd "$(dirname "$0")"

NEED_DISK_GB=8
NEED_MEMORY_GB=6

say() { printf 'setup: %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

dev=no
case "${1:-}" in
  '') ;;
  --dev) dev=yes ;;
  *) die "unknown argument $1; usage: ./setup.sh [--dev]" ;;
esac

# A candidate counts only when it runs: a pyenv shim answers to the name of a version that is not installed.
find_python() {
  local name path
  for name in python3.11 python3.12 python3 python; do
    while read -r path; do
      if "$path" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1; then
        printf '%s\n' "$path"
        return
      fi
    done < <(type -aP "$name")
  done
  return 1
}

check_machine() {
  [ "$(uname -s)" = Linux ] || die "this project runs on Linux; $(uname -s) has no vLLM CPU build."
  local free_kb total_kb
  free_kb=$(df -Pk . | awk 'NR == 2 {print $4}')
  total_kb=$(awk '/^MemTotal:/ {print $2}' /proc/meminfo)
  [ "$free_kb" -ge $((NEED_DISK_GB << 20)) ] ||
    die "$PWD has $((free_kb >> 20)) GB of free disk; the environments need ${NEED_DISK_GB} GB."
  [ "$total_kb" -ge $((NEED_MEMORY_GB << 20)) ] ||
    die "this machine has $((total_kb >> 20)) GB of memory; a run needs ${NEED_MEMORY_GB} GB."
}

# fingerprint ENVIRONMENT: changes when anything that decides its contents does.
fingerprint() {
  { "$python" -VV; cat setup.sh pyproject.toml requirements/{dev.txt,torchvision_apart.py,"$1"*}; pwd; } | sha256sum | cut -d' ' -f1
}

# open_environment ENVIRONMENT: an empty or a sound one in .venv/ENVIRONMENT.
open_environment() {
  local dir=.venv/$1 wanted
  wanted=$("$python" -c 'import sys; print(*sys.version_info[:2])')
  if [ -e "$dir" ]; then
    if [ "$("$dir/bin/python" -c 'import pip, sys; print(*sys.version_info[:2])' 2>/dev/null)" != "$wanted" ] ||
      { [ -e "$dir/.unfinished" ] && ! "$dir/bin/python" requirements/verify.py; }; then
      say "$dir is damaged or of another Python; making it anew"
      rm -rf "$dir"
    fi
  fi
  [ -e "$dir" ] || "$python" -m venv "$dir"
  : >"$dir/.unfinished"
}

pip_in() {
  local environment=$1
  shift
  ".venv/$environment/bin/python" -m pip --disable-pip-version-check install -qq "$@"
}

install_engine() {
  local torch
  torch=$(grep '^torch==' requirements/engine-cpu-nodeps.txt)
  # PyPI holds no CPU build of torch. A mirror or a wheel folder may; else PyTorch's own index has it.
  pip_in engine --no-deps "$torch" 2>/dev/null ||
    pip_in engine --no-deps --index-url https://download.pytorch.org/whl/cpu "$torch"
  pip_in engine -r requirements/engine-cpu.txt -c requirements/engine.lock
  pip_in engine --no-deps -r requirements/engine-cpu-nodeps.txt
}

install_episode() {
  pip_in episode -r requirements/episode.txt -c requirements/episode.lock
}

# environment NAME MODULE…: bring one environment up to date; the modules must import in the end.
environment() {
  local name=$1 dir=.venv/$1 stamp
  shift
  stamp=$(fingerprint "$name")
  if [ "$(cat "$dir/.stamp" 2>/dev/null)" != "$stamp" ]; then
    check_machine
    say "$name environment: installing into $dir (a few minutes the first time)"
    open_environment "$name"
    rm -f "$dir/.stamp" "$dir/.stamp-dev"
    "install_$name"
    pip_in "$name" --no-deps --no-build-isolation -e .
    "$dir/bin/python" requirements/verify.py "$@" || die "the $name environment is incomplete; run ./setup.sh again."
    rm -f "$dir/.unfinished"
    printf '%s\n' "$stamp" >"$dir/.stamp"
  fi
  if [ "$dev" = yes ] && [ ! -e "$dir/.stamp-dev" ]; then
    say "$name environment: adding what the tests need"
    local more=()
    [ ! -e "requirements/$name-dev.txt" ] || more=(-r "requirements/$name-dev.txt")
    pip_in "$name" -r requirements/dev.txt "${more[@]}" -c "requirements/$name.lock"
    [ "$name" != engine ] || "$dir/bin/python" requirements/torchvision_apart.py
    : >"$dir/.stamp-dev"
  fi
}

command -v lscpu >/dev/null || die "lscpu is missing (vLLM asks it for the CPU's layout); install util-linux."
python=$(find_python) ||
  die "no Python 3.11 or 3.12 (with its venv module) was found; install python3.11 and python3.11-venv, or use pyenv."
mkdir -p .venv
exec 9>.venv/.lock
flock -n 9 || { say "waiting for another setup of this folder"; flock 9; }
environment engine torch megatron.core ray transformers hydra pydantic
environment episode openenv ray tokenizers fastapi
