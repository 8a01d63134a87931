"""The arguments that Megatron-LM keeps in a checkpoint."""

from megatron_fleet.models.megatron_config import megatron_arguments


def checkpoint_arguments(model, old=False):
    """The namespace of Megatron-LM that gives these arguments; ``old``: as before 0.16.1."""
    arguments = megatron_arguments(model)
    args = arguments.config | arguments.attributes | arguments.gpt
    args["untie_embeddings_and_output_weights"] = not args.pop("share_embeddings_and_output_weights")
    args["num_experts"] = args.pop("num_moe_experts", None)
    args["use_rope_scaling"] = args.pop("rope_scaling", False)
    args["swiglu"] = args.pop("gated_linear_unit")
    args["group_query_attention"] = not model.latent
    args |= {"vocab_size": model.vocab, "max_position_embeddings": model.context, "mtp_num_layers": model.mtp or None}
    args["apply_layernorm_1p"] = args.pop("layernorm_zero_centered_gamma")
    args |= {"seq_length": 77, "rotary_interleaved": False, "window_size": None}
    if old:
        args["norm_epsilon"] = args.pop("layernorm_epsilon")
    return args
