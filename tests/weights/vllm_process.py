"""A vLLM engine in a process of its own, obeying JSON lines: ["rpc", method, args…] or ["generate", prompts, tokens].

Arguments: HF folder, file descriptor to answer on (stdout belongs to vLLM's log), dtype.
"""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM, SamplingParams

    from megatron_fleet.rollout.engine_actor import CPU_ATTENTION

    engine = LLM(
        sys.argv[1],
        dtype=sys.argv[3],
        enforce_eager=True,
        attention_config=CPU_ATTENTION,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_memory_bytes=32 << 20,
        block_size=32,
        skip_tokenizer_init=True,
        weight_transfer_config={"backend": "fleet_shm"},
    )
    with os.fdopen(int(sys.argv[2]), "w") as answers:
        for line in sys.stdin:
            command, *arguments = json.loads(line)
            answer = None
            if command == "rpc":
                method, *rest = arguments
                engine.collective_rpc(method, args=tuple(rest))
            else:
                prompts, tokens = arguments
                engine.reset_prefix_cache()
                outputs = engine.generate(
                    [{"prompt_token_ids": p} for p in prompts],
                    SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False),
                    use_tqdm=False,
                )
                answer = [list(o.outputs[0].token_ids) for o in outputs]
            print(json.dumps(answer), file=answers, flush=True)
