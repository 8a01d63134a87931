"""Megatron-Core on the host at hand. Importing this package makes ``megatron.core`` importable and usable there."""

import warnings

from megatron_fleet.platform.megatron.adapt import install

# Nobody here can act on them: Megatron names optional packages that are missing, PyTorch what Megatron should rename.
_NOISY = r"megatron\.core|torch\.distributed|megatron_fleet\.platform\.megatron\.adapt"
warnings.filterwarnings("ignore", category=UserWarning, module=_NOISY)
warnings.filterwarnings("ignore", category=FutureWarning, module=_NOISY)

install()
