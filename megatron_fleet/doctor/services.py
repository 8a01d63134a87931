"""Probes of the services that a run uses: each is asked for something that changes nothing there."""

from __future__ import annotations

import time
from collections.abc import Iterator

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.schema import Config
from megatron_fleet.config.secrets import wandb_key
from megatron_fleet.config.sections.hosted import HOSTED
from megatron_fleet.doctor.probe import Probe, ProbeContext, Result

ANSWER_S = 10.0
"""Time for a server to answer."""
STORE_S = 60.0
"""The store's client tries again several times."""
CLOCK_S = 30.0
"""Difference of clocks with which signed keys may be refused."""
FLEET_URL = "https://orchestrator.fleetai.com"
"""Address that fleet-python uses when FLEET_BASE_URL is not set."""


def stores(config: Config) -> dict[str, str]:
    """Return the addresses in object stores that a run writes to, by key."""
    named = {
        "checkpoint.store.url": config.checkpoint.store.url,
        "eval.upload": config.eval.upload,
        "logging.trajectories.upload": config.logging.trajectories.upload,
        "rollout.engine.weights_url": config.rollout.engine.weights_url,
    }
    return {key: url for key, url in named.items() if url is not None and "://" in url}


def object_store(here: ProbeContext) -> Result:
    """Write an empty file to each address and remove it."""
    from megatron_fleet.storage.open import check_writable

    assert here.config is not None
    addresses = stores(here.config)
    for key, url in addresses.items():
        try:
            check_writable(url)
        except UserError as error:
            raise UserError(f"{key}: {error}") from None
    return Result("ok", f"can write to {', '.join(addresses.values())}")


def wandb(here: ProbeContext) -> Result:
    """Ask W&B whether it knows the key."""
    from megatron_fleet.telemetry.trackers import check_wandb

    assert here.config is not None
    check_wandb(here.config.logging.wandb, here.config.data)
    where = "WANDB_API_KEY" if wandb_key(here.config.data.modality) else "a netrc file, whose key was not tried"
    return Result("ok", where)


def mlflow(here: ProbeContext) -> Result:
    """Ask whether the MLflow server is there."""
    from megatron_fleet.telemetry.trackers import check_mlflow

    assert here.config is not None
    check_mlflow(here.config.logging.mlflow)
    return Result("ok", f"{here.config.logging.mlflow.uri} answers")


def slack(here: ProbeContext) -> Result:
    """Ask Slack whose token it is, and for its scopes."""
    from megatron_fleet.telemetry.slack import check_slack

    assert here.config is not None
    check_slack(here.config.logging.slack, here.environ)
    return Result("ok", f"may post to {here.config.logging.slack.channel}")


def fleet(here: ProbeContext) -> Result:
    """Ask Fleet for the account of the key, and how many instances it may have."""
    import httpx

    from megatron_fleet.envs.fleet_package import check_key

    check_key()
    url = (here.environ.get("FLEET_BASE_URL") or FLEET_URL).rstrip("/")
    headers = {"Authorization": f"Bearer {here.environ['FLEET_API_KEY']}"}
    try:
        answer = httpx.get(f"{url}/v1/account", headers=headers, timeout=ANSWER_S)
        account = answer.json() if answer.status_code == httpx.codes.OK else {}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        kind = type(error).__name__
        raise UserError(f"{url} does not answer ({kind}); check FLEET_BASE_URL and the network.") from None
    if answer.status_code in (401, 403):
        raise UserError(f"{url} rejects the key ({answer.status_code}); correct FLEET_API_KEY.")
    if answer.status_code != httpx.codes.OK:
        raise UserError(f"{url} answers {answer.status_code}; try again later.")
    limit, used = account.get("instance_limit"), account.get("instance_count")
    seen = f"{account.get('team_name', 'a team')}, {used} of {limit} instances in use"
    wanted = 0 if here.config is None else here.config.episodes
    if isinstance(limit, int) and isinstance(used, int) and limit - used < wanted:
        fix = "lower rollout.episodes_in_flight, or ask Fleet for more instances"
        return Result("warning", f"{seen}, and the run needs {wanted} at once", fix)
    return Result("ok", seen)


def environment_server(here: ProbeContext) -> Result:
    """Ask the environment server whether it is well."""
    from megatron_fleet.envs.registry import no_answer

    assert here.config is not None and here.config.env.url is not None
    reason = no_answer(here.config.env.url, ANSWER_S)
    if reason:
        raise UserError(f"env.url={reason}; start the server, or correct the address.")
    return Result("ok", f"{here.config.env.url} answers")


def tinker(here: ProbeContext) -> Result:
    """Ask the hosted trainer's service for its models, with the key, and compare its clock with this machine's."""
    from megatron_fleet.hosted.address import address
    from megatron_fleet.hosted.prices import find_prices
    from megatron_fleet.hosted.service import ServedModel, check_service, clock_difference_s

    assert here.config is not None
    hosted = here.config.hosted
    wanted = ServedModel(hosted.model(here.config.model.path), here.config.rollout.max_context)
    began = time.monotonic()
    served = check_service(wanted, address(hosted, here.environ), ANSWER_S)
    seen = [
        f"{wanted.name}, {served.max_context_length or 'any number of'} tokens, in {time.monotonic() - began:.1f} s"
    ]
    try:
        p = find_prices(hosted, wanted.name or "")
        seen.append(f"${p.prefill:g} (cached ${p.cached_prefill:g}), ${p.sample:g} and ${p.train:g} for a million")
    except LookupError as error:
        if hosted.budget_usd is not None:
            return Result("failed", f"{'; '.join(seen)}; its prices are not known: {error}", "set hosted.prices")
        seen.append("prices not known, so costs are not counted")
    apart = clock_difference_s(address(hosted, here.environ), ANSWER_S)
    if abs(apart) > CLOCK_S:
        ahead = f"its clock is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} this machine's"
        return Result("warning", f"{'; '.join(seen)}; {ahead}", "synchronise this machine's clock (NTP)")
    return Result("ok", "; ".join(seen))


def _configs(here: ProbeContext) -> Iterator[Config]:
    if here.config is not None:
        yield here.config


def _with_store(here: ProbeContext) -> bool:
    return any(stores(config) for config in _configs(here))


def _with_wandb(here: ProbeContext) -> bool:
    return any(c.logging.wandb.project is not None and c.logging.wandb.mode == "online" for c in _configs(here))


def _with_mlflow(here: ProbeContext) -> bool:
    return any(config.logging.mlflow.uri is not None for config in _configs(here))


def _with_slack(here: ProbeContext) -> bool:
    return any(config.logging.slack.channel is not None for config in _configs(here))


def _with_fleet(here: ProbeContext) -> bool:
    return any(config.env.about.hosted for config in _configs(here))


def _with_hosted(here: ProbeContext) -> bool:
    return any(config.policy.trainer == HOSTED for config in _configs(here))


def _with_server(here: ProbeContext) -> bool:
    return any(config.env.url is not None for config in _configs(here))


PROBES = (
    Probe("object store", object_store, _with_store, "runs that write to s3:// or gs:// addresses", deadline_s=STORE_S),
    Probe("W&B", wandb, _with_wandb, "runs with logging.wandb.project"),
    Probe("MLflow", mlflow, _with_mlflow, "runs with logging.mlflow.uri"),
    Probe("Slack", slack, _with_slack, "runs with logging.slack.channel"),
    Probe("Fleet", fleet, _with_fleet, "runs with env.kind=fleet"),
    Probe("Tinker", tinker, _with_hosted, "runs with trainer=hosted", deadline_s=3 * ANSWER_S),
    Probe("environment server", environment_server, _with_server, "runs with env.url"),
)
