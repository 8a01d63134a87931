"""Megatron-Core on this host. Importing this package makes ``megatron.core`` importable and usable."""

import os
import warnings

from megatron_fleet.platform.megatron.adapt import install

# Not actionable for users: Megatron names missing optional packages, PyTorch what Megatron should rename.
_NOISY = r"megatron\.core|torch\.distributed|megatron_fleet\.platform\.megatron\.adapt"
warnings.filterwarnings("ignore", category=UserWarning, module=_NOISY)
warnings.filterwarnings("ignore", category=FutureWarning, module=_NOISY)

# Read when Transformer Engine is imported. By default its FP8 block scales are powers of two; those of checkpoints and
# engines are arbitrary float32.
os.environ.setdefault("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
# Read when flash-linear-attention is imported. On Hopper GPUs it would compile TileLang kernels in each rank's first
# backward pass, with whatever nvcc it finds; Triton's kernels, right since 3.7.1, are there already.
os.environ.setdefault("FLA_TILELANG", "0")

install()
