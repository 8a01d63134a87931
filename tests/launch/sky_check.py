"""Load task files with SkyPilot itself and have its optimizer choose, without a network: Lambda is the one cloud that
is enabled, with a catalog of its own. Run with a Python that has SkyPilot: sky_check.py FILE…

Prints for each file, as JSON: hosts, names of secrets, places, recovery, and what the optimizer has chosen.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

CATALOGS = {
    "common/accelerators.csv": "AcceleratorName,Clouds\nH100,Lambda\nH200,Lambda\nB200,Lambda\n",
    "common/metadata.csv": "GPU,MemoryGB,Manufacturer\nH100,80,NVIDIA\nH200,141,NVIDIA\nB200,180,NVIDIA\n",
    "lambda/vms.csv": "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice\n"
    "gpu_8x_h100_sxm5,H100,8.0,208,1800,23.92,us-east-1,\"{'Gpus': [{'Name': 'H100', 'Count': 8.0}]}\",\n"
    "cpu_4x_general,,,4,16,0.1,us-east-1,,\n",
}

home = Path(tempfile.mkdtemp())
os.environ |= {"HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
for name, text in CATALOGS.items():
    path = home / ".sky" / "catalogs" / "v8" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)

from sky import clouds  # noqa: E402 # reads HOME
from sky.optimizer import Optimizer  # noqa: E402
from sky.utils import dag_utils  # noqa: E402


def enabled(*_args: object, **_options: object) -> list[object]:
    return [clouds.Lambda()]


def main(files: list[str]) -> None:
    for file in files:
        secrets = [("MFLEET_TOKEN", "x"), ("WANDB_API_KEY", "y")]
        dag = dag_utils.load_chain_dag_from_yaml(file, secret_overrides=secrets)
        (task,) = dag.tasks
        for resources in task.resources:
            resources.validate()
        with (
            mock.patch("sky.check.get_cached_enabled_clouds_or_refresh", enabled),
            mock.patch("sky.global_user_state.get_cached_enabled_clouds", enabled),
        ):
            (chosen,) = Optimizer.optimize(dag, quiet=True).tasks
        tried = [f"{one.cloud}".lower() if one.cloud else None for one in task.resources]
        said = {"hosts": task.num_nodes, "secrets": sorted(task.secrets), "tried": tried}
        said["recovery"] = next(iter(task.resources)).job_recovery
        said["chosen"] = f"{chosen.best_resources.cloud} {chosen.best_resources.instance_type}"
        print(json.dumps(said), flush=True)


main(sys.argv[1:])
