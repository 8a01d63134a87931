"""The command `mfleet doctor`: ask everything, print a table or JSON, and fail when a run could not work."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from megatron_fleet.cluster.inventory import local_inventory
from megatron_fleet.cluster.rank_identity import controller_address
from megatron_fleet.config.errors import printable, say, say_lines
from megatron_fleet.config.schema import Config
from megatron_fleet.doctor import devices, host, many_hosts, model, network, services, versions
from megatron_fleet.doctor.probe import NOT_NEEDED, Finding, Probe, ProbeContext, ask

PROBES: tuple[Probe, ...] = (
    *versions.PROBES,
    *devices.PROBES,
    *host.PROBES,
    *network.PROBES,
    *services.PROBES,
    *model.PROBES,
)
JOIN_S = 600.0
"""Wait for the other hosts without a configuration."""
WIDTH = 150
"""Columns of the table where there is no terminal."""
ORDER = ("failed", "warning", "ok", "skipped")


def main(config: Config | None, environ: Mapping[str, str], quick: bool, as_json: bool) -> int:
    """Ask the probes on this host, or on all that run this command together; returns the exit status.

    Args:
        config: of the run that is to be started; ``None``: this machine alone.
        quick: see `ProbeContext`.

    Raises:
        UserError: this host's devices cannot be listed, or the hosts do not meet.
    """
    count, first = many_hosts.hosts_of(None if config is None else config.cluster, environ)
    if not first:  # one process on each host is enough
        return 0
    (mine,) = local_inventory(environ, alone=count == 1).hosts
    here = ProbeContext(config, environ, mine, quick, met=count > 1)
    if count == 1:
        return report(ask([*PROBES, network.ALONE], here), as_json)
    timeout_s = JOIN_S if config is None else config.cluster.join_timeout_s
    address, _ = controller_address(environ)
    if not network.is_here(address.rsplit(":", 1)[0]):
        failed = asyncio.run(many_hosts.follow(here, PROBES, timeout_s))
        say(f"mfleet doctor: {mine.name} has answered; {failed} failures on all hosts", sys.stderr)
        return 1 if failed else 0
    return report(asyncio.run(many_hosts.Meeting(here, PROBES, count, timeout_s).run()), as_json)


def report(findings: Sequence[Finding], as_json: bool) -> int:
    """Print the findings; returns 1 when one is a failure."""
    failed = [finding for finding in findings if finding.result.status == "failed"]
    if as_json:
        rows = [{"name": f.name, "host": f.host, **asdict(f.result), "seconds": round(f.seconds, 3)} for f in findings]
        print(json.dumps({"failed": len(failed), "findings": rows}, indent=2))
    else:
        say_lines(table(findings))
    return 1 if failed else 0


def table(findings: Sequence[Finding]) -> str:
    """Return the findings as a table, with equal good answers of several hosts in one row, and a line that sums up."""
    from rich.console import Console
    from rich.table import Table

    several = len({finding.host for finding in findings}) > 1
    drawn = Table(box=None, pad_edge=False)
    for column in ("", *(["host"] if several else []), "result", "seen", "what to do"):
        drawn.add_column(column, overflow="fold")
    for finding, hosts in _rows(findings):
        result = finding.result
        cells = [finding.name, *([hosts] if several else []), result.status, result.detail, result.fix]
        drawn.add_row(*map(printable, cells))
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    console = Console(width=width, color_system=None, markup=False, highlight=False, emoji=False)
    with console.capture() as captured:
        console.print(drawn)
    lines = [line.rstrip() for line in captured.get().splitlines()]
    return "\n".join([*lines, "", *_summary(findings)])


def _rows(findings: Iterable[Finding]) -> list[tuple[Finding, str]]:
    """Pairs of a finding and the hosts that it is of; skipped ones are left out."""
    by_name: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.result.status != "skipped":
            by_name.setdefault(finding.name, []).append(finding)
    rows = []
    for named in by_name.values():
        good = [finding for finding in named if finding.result.status == "ok"]
        if good:
            rows.append((good[0], good[0].host if len(good) == 1 else f"{len(good)} hosts"))
        rows += [(finding, finding.host) for finding in named if finding.result.status != "ok"]
    return rows


def _summary(findings: Sequence[Finding]) -> list[str]:
    count = {status: sum(f.result.status == status for f in findings) for status in ORDER}
    lines = []
    skipped = {finding.name: finding.result.detail for finding in findings if finding.result.status == "skipped"}
    if names := [name for name, reason in skipped.items() if reason.startswith(NOT_NEEDED)]:
        lines.append(f"not needed: {', '.join(names)}")
    lines += [f"{name}: {reason}" for name, reason in skipped.items() if not reason.startswith(NOT_NEEDED)]
    verdict = "a run would not work" if count["failed"] else "a run would work"
    return [*lines, f"{count['failed']} failed, {count['warning']} warnings, {count['ok']} ok: {verdict}"]
