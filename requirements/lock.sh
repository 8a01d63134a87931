#!/usr/bin/env bash
# Make engine-gpu.lock and engine-gpu-source.lock anew from engine-gpu.txt and engine-gpu-source.txt: Python 3.12, x86-64,
# glibc 2.31 or newer, every file with its hashes. Usage: requirements/lock.sh
# It needs uv (pip install uv) and the package index. Versions are those of engine.lock, which the tests run with, and
# else those locked before, wherever the .txt files allow them.
set -euo pipefail
cd "$(dirname "$0")"

# compile OUTPUT ARGUMENT…
compile() {
  local output=$1
  shift
  uv pip compile --no-config --quiet --custom-compile-command requirements/lock.sh --python-version 3.12 \
    --python-platform x86_64-manylinux_2_31 --generate-hashes --no-annotate --output-file "$output" "$@"
}

touch engine-gpu.lock
preferred=$(sed -n 's/^\([A-Za-z0-9_.-]*==[^ +]*\).*/\1/p' engine.lock engine-gpu.lock |
  awk -F== '{gsub(/[_.]/, "-", $1); $1 = tolower($1)} !seen[$1]++ {print $1 "==" $2}')
printf '%s\n' "$preferred" >engine-gpu.lock
mapfile -t sources < <(sed -n 's/^\([a-z0-9-]*\)==.*/\1/p' engine-gpu-source.txt)
# Wheels only, so that one more package without them is noticed here.
compile engine-gpu.lock --only-binary :all: "${sources[@]/#/--no-binary=}" "${sources[@]/#/--no-emit-package=}" \
  engine-gpu.txt engine-gpu-source.txt
compile engine-gpu-source.lock --no-deps engine-gpu-source.txt
