"""What a run would start and write, in words: the text of ``mfleet train --dry-run``."""

from __future__ import annotations

from megatron_fleet.config.schema import Config


def as_yaml(config: Config) -> str:
    """The resolved configuration as YAML, every key spelt out."""
    import yaml

    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def describe(config: Config) -> str:
    """Resolved configuration, processes and outputs of a run."""
    blocks = [as_yaml(config).rstrip(), _section("processes", processes(config)), _section("outputs", outputs(config))]
    return "\n\n".join(blocks)


def processes(config: Config) -> list[str]:
    """One line per kind of process, with its number."""
    p, r = config.parallel, config.rollout
    server = "the embedded fleet, on 127.0.0.1" if config.env.kind == "embedded" else f"not started: {config.env.url}"
    return [
        f"ranks: {p.world_size} (tensor {p.tensor} × pipeline {p.pipeline} × context {p.context} × data {p.data}), "
        f"{config.policy.threads} CPU threads each",
        "Ray: 1 local cluster, or the one at RAY_ADDRESS",
        f"engines: {r.engine.replicas} (vLLM, tensor parallel {r.engine.tensor_parallel} each)",
        f"episode workers: {r.workers} (up to {r.episodes_in_flight} episodes in flight together)",
        f"environment server: {server}",
    ]


def outputs(config: Config) -> list[str]:
    """The files a run leaves in its folder."""
    c = config
    rows = [
        ("config.json", "this configuration, for `mfleet train --resolved`", True),
        ("metrics.jsonl", "one line per step and evaluation (docs/metrics.md)", True),
        ("memory.json", "who held how much memory at most, in each phase", True),
        ("summary.json", "first and last evaluation, best step, totals", True),
        ("curve.png", "the learning curve", c.logging.plot),
        ("tensorboard/", "the same metrics as TensorBoard events", c.logging.tensorboard),
        ("trajectories/", "every conversation with its reward", True),
        ("dumped_evals/", "evaluations in Fleet's layout (docs/evaluation.md)", True),
        ("checkpoints/", f"the newest {c.checkpoint.keep}", True),
        ("dumps/", "updates that went wrong, for `mfleet debug replay`", c.policy.safety.max_dumps > 0),
        ("hf/", "the trained model as a Hugging Face folder", c.checkpoint.export_hf),
        ("logs/", "what engines, environment server and ranks above 0 say", True),
    ]
    return [c.run.out] + [f"  {name:<14} {meaning}" for name, meaning, written in rows if written]


def _section(title: str, rows: list[str]) -> str:
    return "\n".join([f"# {title}", *(f"#   {row}" for row in rows)])
