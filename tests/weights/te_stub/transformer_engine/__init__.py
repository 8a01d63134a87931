"""Transformer Engine's modules as Megatron-Core sees them when it builds a model: names and shapes, no compute.

Written after Transformer Engine 2.x. What matters for a checkpoint, and is therefore here: which module owns which
parameter, and that linears, attention *and norms* (there they are fusible operations) answer ``get_extra_state``, with
an empty byte tensor as long as no FP8 recipe has run. What is not here raises ImportError or AttributeError, so that a
Megatron release that needs more of it says so.
"""

from transformer_engine import common, pytorch

__all__ = ["common", "pytorch"]
__version__ = "2.14.0"
