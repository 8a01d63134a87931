#!/usr/bin/env bash
# Make the two Python environments of this project, .venv/engine and .venv/episode (see requirements/*.txt for why two).
# Usage: ./setup.sh [--dev | --gpu [--without-driver] | --hosted] [--bundle DIR]
#   --hosted          one other environment instead, .venv/hosted, for runs at a hosted service: no torch, no vLLM
#   --dev             add what the tests and checks need
#   --gpu             an engine environment for NVIDIA GPUs, always made from nothing; it stays one in later calls
#   --without-driver  on a machine without GPUs, such as where an image is made: what needs one is not checked
#   --bundle DIR      install from an unpacked bundle of tools/offline_bundle.py, without a network
# Run it as often as you like: nothing happens when nothing changed, and an interrupted run is taken up again.
set -euo pipefail
cd "$(dirname "$0")"

NEED_DISK_GB=8
NEED_MEMORY_GB=6
HOSTED_NEED_DISK_GB=2
HOSTED_NEED_MEMORY_GB=2
GPU_NEED_DISK_GB=20
GPU_NEED_MEMORY_GB=16
GPU_NEED_DRIVER=580 # of CUDA 13
GPU_NEED_GLIBC=2.31 # of the wheels in engine-gpu.lock
WAIT_S=3600 # for another host, or process, that installs into this folder

say() { printf 'setup: %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }
usage() { die "$1; usage: ./setup.sh [--dev | --gpu [--without-driver] | --hosted] [--bundle DIR]"; }

dev=no gpu=no hosted=no driver=yes bundle=
while [ $# -gt 0 ]; do
  case $1 in
    --dev) dev=yes ;;
    --gpu) gpu=yes ;;
    --hosted) hosted=yes ;;
    --without-driver) driver=no ;;
    --bundle)
      [ $# -gt 1 ] || usage "--bundle needs a folder"
      bundle=$2
      shift
      ;;
    *) usage "unknown argument $1" ;;
  esac
  shift
done
[ "$driver" = yes ] || [ "$gpu" = yes ] || usage "--without-driver is for --gpu"
[ "$hosted" = no ] || [ "$dev$gpu$bundle" = nono ] || usage "--hosted goes with no other option"
[ "$hosted" = yes ] || [ ! -e .venv/engine/.gpu ] || gpu=yes
[ "$gpu" = no ] || [ "$dev" = no ] ||
  die "the checks of --dev run with CPU builds, in a checkout of their own; .venv/engine/bin/python -m pytest -m gpu runs the tests for GPUs."
if [ -n "$bundle" ]; then
  [ -d "$bundle/packages" ] || die "--bundle $bundle: there is no folder packages in it; unpack the bundle with its unpack.sh."
  bundle=$(cd "$bundle" && pwd)
  case $bundle in *[[:space:]]*) die "--bundle $bundle: pip takes no folder with a space in its name." ;; esac
  [ -f "$bundle/SHA256SUMS" ] || die "--bundle $bundle: it is not unpacked to its end; run unpack.sh again."
  bundle_says() { awk -F'"' -v key="$1" '$2 == key {print $4}' "$bundle/manifest.json"; }
  target=cpu
  [ "$gpu" = no ] || target=gpu
  [ "$(bundle_says target)" = "$target" ] || die "--bundle $bundle: it is not for $target; make one with --target $target."
  (cd "$bundle" && sha256sum --quiet --check SHA256SUMS >&2) ||
    die "--bundle $bundle: the files named above are missing or damaged; run unpack.sh again."
  export PIP_NO_INDEX=1 PIP_FIND_LINKS=$bundle/packages
fi

versions=(3.11 3.12) versions_said='3.11 or 3.12'
[ "$gpu" = no ] || versions=(3.12) versions_said=3.12
[ -z "$bundle" ] || versions=("$(bundle_says python)") versions_said=$(bundle_says python)

# A candidate counts only when it runs: a pyenv shim answers to the name of a version that is not installed.
find_python() {
  local name path
  for name in "${versions[@]/#/python}" python3 python; do
    while read -r path; do
      if "$path" -c 'import ensurepip, sys, venv; sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv)' "${versions[@]}" \
        >/dev/null 2>&1; then
        printf '%s\n' "$path"
        return
      fi
    done < <(type -aP "$name")
  done
  return 1
}

check_machine() {
  local need_disk=$NEED_DISK_GB need_memory=$NEED_MEMORY_GB free_kb total_kb
  [ "$(uname -s)" = Linux ] || die "this project runs on Linux; $(uname -s) has no vLLM CPU build."
  if [ "$gpu" = yes ]; then
    need_disk=$GPU_NEED_DISK_GB need_memory=$GPU_NEED_MEMORY_GB
  elif [ "$hosted" = yes ]; then
    need_disk=$HOSTED_NEED_DISK_GB need_memory=$HOSTED_NEED_MEMORY_GB
  fi
  free_kb=$(df -Pk . | awk 'NR == 2 {print $4}')
  total_kb=$(awk '/^MemTotal:/ {print $2}' /proc/meminfo)
  [ "$free_kb" -ge $((need_disk << 20)) ] ||
    die "$PWD has $((free_kb >> 20)) GB of free disk; the environments need ${need_disk} GB."
  [ "$total_kb" -ge $((need_memory << 20)) ] ||
    die "this machine has $((total_kb >> 20)) GB of memory; a run needs ${need_memory} GB."
}

# What the GPU environment and the extension of Transformer Engine that is compiled in it need beside Python.
check_gpu_machine() {
  local libc headers version
  [ "$(uname -m)" = x86_64 ] || die "requirements/engine-gpu.lock is for x86_64, not $(uname -m); see requirements/lock.sh."
  libc=$(getconf GNU_LIBC_VERSION 2>/dev/null) || libc='glibc 0'
  printf '%s\n' "$GPU_NEED_GLIBC" "${libc##* }" | sort -CV ||
    die "this system's C library is older than glibc $GPU_NEED_GLIBC (it is '$libc'), which the packages need; use Ubuntu 20.04, Debian 11, RHEL 9 or newer."
  command -v g++ >/dev/null || die "g++ is missing (Transformer Engine's extension and Triton's kernels are compiled here); install g++."
  # Not through a pipe: with pipefail, a compiler that ends before it has read everything would count as too old.
  g++ -E -x c++ - <<<$'#if __GNUC__ < 9\n#error\n#endif' >/dev/null 2>&1 ||
    die "g++ $(g++ -dumpversion) is too old for torch's headers; install g++ 9 or newer."
  headers=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
  [ -e "$headers/Python.h" ] || die "$headers/Python.h is missing (extensions are compiled with it); install python3.12-dev."
  [ "$driver" = yes ] || return 0
  command -v nvidia-smi >/dev/null ||
    die "nvidia-smi is missing: this machine has no NVIDIA driver; install driver $GPU_NEED_DRIVER or newer, or add --without-driver where an image is made."
  version=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>&1 | awk 'NR == 1') || true
  case $version in
    [0-9]*.*) ;;
    *) die "nvidia-smi names no driver but says '$version'; mend the driver, or add --without-driver where an image is made." ;;
  esac
  [ "${version%%.*}" -ge "$GPU_NEED_DRIVER" ] ||
    die "the NVIDIA driver is $version; CUDA 13 needs $GPU_NEED_DRIVER or newer."
}

# fingerprint ENVIRONMENT: changes when anything that decides its contents does.
fingerprint() {
  local files
  case $1-$gpu in
    engine-yes) files=(requirements/engine-gpu*) ;;
    engine-no) files=(requirements/{engine-cpu*,engine-dev.txt,engine-torchvision.txt,engine.lock}) ;;
    *) files=(requirements/"$1"*) ;;
  esac
  { "$python" -VV; cat setup.sh pyproject.toml requirements/{dev.txt,torchvision_apart.py} "${files[@]}"; pwd; } |
    sha256sum | cut -d' ' -f1
}

# open_environment ENVIRONMENT STAMP: an empty or a sound one in .venv/ENVIRONMENT.
open_environment() {
  local dir=.venv/$1 wanted
  wanted=$("$python" -c 'import sys; print(*sys.version_info[:2])')
  if [ -e "$dir" ]; then
    if [ "$("$dir/bin/python" -c 'import pip, sys; print(*sys.version_info[:2])' 2>/dev/null)" != "$wanted" ] ||
      { [ -e "$dir/.unfinished" ] && ! "$dir/bin/python" requirements/verify.py; }; then
      say "$dir is damaged or of another Python; making it anew"
      rm -rf "$dir"
    elif [ "$1-$gpu" = engine-yes ] && [ "$(cat "$dir/.unfinished" 2>/dev/null)" != "$2" ]; then
      # CUDA builds would be laid over CPU builds: torch==2.13.0 is satisfied by 2.13.0+cpu.
      say "$dir was made for something else; making it anew"
      rm -rf "$dir"
    fi
  fi
  [ -e "$dir" ] || "$python" -m venv "$dir"
  printf '%s\n' "$2" >"$dir/.unfinished"
  [ "$1-$gpu" != engine-yes ] || : >"$dir/.gpu"
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

install_engine_gpu() {
  local memory_gb jobs toolkit
  pip_in engine --require-hashes --no-deps --only-binary :all: -r requirements/engine-gpu.lock
  # The linker's names, without which the compiler among these packages is no toolkit (see rollout/engine_toolkit.py).
  toolkit=$(echo .venv/engine/lib/python3.*/site-packages/nvidia/cu13)
  ln -sfn lib "$toolkit/lib64"
  ln -sf libcudart.so.13 "$toolkit/lib/libcudart.so"
  # A compiler process takes up to 3 GB.
  memory_gb=$(awk '/^MemAvailable:/ {print int($2 / 1048576)}' /proc/meminfo)
  jobs=$(($(nproc) < memory_gb / 3 ? $(nproc) : memory_gb / 3))
  jobs=${MAX_JOBS:-$((jobs > 1 ? jobs : 1))}
  say "engine environment: compiling Transformer Engine's extension, $jobs processes at a time (MAX_JOBS)"
  # CUDA's headers are those of torch's own wheels, whatever toolkit the machine has. Unforced, the package takes a wheel
  # from elsewhere that no hash vouches for.
  PATH="$PWD/.venv/engine/bin:$PATH" MAX_JOBS=$jobs \
    NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE \
    pip_in engine --require-hashes --no-deps --no-build-isolation -r requirements/engine-gpu-source.lock
}

install_episode() {
  pip_in episode -r requirements/episode.txt -c requirements/episode.lock
}

install_hosted() {
  # Compiled files of all packages would be 200 MB; Python makes those that it needs.
  pip_in hosted --no-compile -r requirements/hosted.txt -c requirements/hosted.lock
  pip_in hosted --no-compile --no-deps -r requirements/hosted-nodeps.txt
}

# environment NAME MODULE…: bring one environment up to date; the modules must import in the end.
environment() {
  local name=$1 dir=.venv/$1 install=install_$1 stamp
  shift
  stamp=$(fingerprint "$name")
  if [ "$(cat "$dir/.stamp" 2>/dev/null)" != "$stamp" ]; then
    check_machine
    if [ "$name-$gpu" = engine-yes ]; then
      check_gpu_machine
      install=install_engine_gpu
    fi
    say "$name environment: installing into $dir (a few minutes the first time)"
    open_environment "$name" "$stamp"
    rm -f "$dir/.stamp" "$dir/.stamp-dev"
    "$install"
    pip_in "$name" --no-deps --no-build-isolation -e .
    "$dir/bin/python" requirements/verify.py "$@" || die "the $name environment is incomplete; run ./setup.sh again."
    if [ "$install" = install_engine_gpu ]; then
      "$dir/bin/python" requirements/smoke_gpu.py --driver "$driver" || die "the engine environment does not work on this machine."
    fi
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

[ "$hosted" = yes ] || command -v lscpu >/dev/null || die "lscpu is missing (vLLM asks it for the CPU's layout); install util-linux."
python=$(find_python) ||
  die "no Python $versions_said (with its venv module) was found; install python${versions[0]} and python${versions[0]}-venv, or use pyenv."
mkdir -p .venv
exec 9>.venv/.lock
flock -n 9 || {
  say "waiting for another setup of this folder"
  flock -w "$WAIT_S" 9 || die "another setup of this folder has not ended within $WAIT_S s; check what it is waiting for, and run this again."
}
if [ "$hosted" = yes ]; then
  environment hosted tinker openenv ray tokenizers hydra pydantic
  exit
fi
environment engine torch megatron.core ray transformers hydra pydantic
environment episode openenv ray tokenizers fastapi
