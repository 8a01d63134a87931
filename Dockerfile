# syntax=docker/dockerfile:1
# The environments of ./setup.sh --gpu. Engines compile kernels with the toolkit among the packages; that of the image is
# the same, for your own extensions, and has the stand-in for the driver with which the last layer imports vLLM.
#   docker build --tag megatron_fleet .
#   docker run --rm -it --gpus all --ipc host --ulimit memlock=-1 -v "$PWD/runs:/megatron_fleet/runs" megatron_fleet \
#     mfleet train …
# The tag is the version of cuda-toolkit in requirements/engine-gpu.lock, from which cuDNN and NCCL come, with headers.
FROM nvidia/cuda:13.0.3-devel-ubuntu24.04

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# Only the driver's: the libraries of CUDA are those in the environment, not those of this image.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64
ENV PIP_CACHE_DIR=/var/cache/pip

# hadolint ignore=DL3008
RUN apt-get update && \
    DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      g++ python3.12 python3.12-dev python3.12-venv util-linux && \
    rm -rf /var/lib/apt/lists/*

WORKDIR /megatron_fleet
# What decides the contents of the environments comes first: a change of other files does not make them anew.
COPY setup.sh pyproject.toml README.md ./
COPY requirements requirements
RUN --mount=type=cache,target=/var/cache/pip \
    mkdir megatron_fleet && touch megatron_fleet/__init__.py && ./setup.sh --gpu --without-driver

COPY . .
ENV PATH=/megatron_fleet/.venv/engine/bin:$PATH
# Needs no driver.
RUN ./setup.sh && \
    .venv/engine/bin/python requirements/smoke_gpu.py --driver no && \
    .venv/episode/bin/python requirements/verify.py openenv megatron_fleet.rollout.worker
CMD ["mfleet", "--help"]
