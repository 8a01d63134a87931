"""Models in an object store."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping

from megatron_fleet.config.errors import UserError
from megatron_fleet.config.remote_model import CONTENT_DIGITS, BucketModel
from megatron_fleet.storage.local import LocalFolder
from megatron_fleet.storage.open import open_folder
from megatron_fleet.storage.progress import ProgressLine
from megatron_fleet.storage.transfer import Copy, transfer
from megatron_fleet.weights.fetch.listing import Listing, has_weights, is_needed


def look_up(model: BucketModel) -> Listing:
    """Ask the store for a model's files. Their names, sizes and versions identify its content.

    Raises:
        UserError: the store refuses or does not answer, it has no model there, or the content is not the one that
            ``model`` names.
    """
    folder = open_folder(model.address)
    versions = {name: version for name, version in folder.versions().items() if is_needed(name)}
    sizes = {name: size for name, size in folder.sizes().items() if name in versions}
    if "config.json" not in sizes or not has_weights(sizes):
        missing = "*.safetensors" if "config.json" in sizes else "config.json"
        raise UserError(
            f"model.path={model.address}: there is no {missing}; name a complete Hugging Face model folder."
        )
    content = json.dumps([[name, size, versions[name]] for name, size in sorted(sizes.items())])
    revision = hashlib.sha256(content.encode()).hexdigest()[:CONTENT_DIGITS]
    if model.pinned and model.revision != revision:
        raise UserError(
            f"model.path={model}: the files at this address have been replaced since; restore them, or leave out "
            f"@{model.revision} to take the new ones."
        )
    return Listing(model.at(revision), sizes)


def download(model: BucketModel, sizes: Mapping[str, int]) -> None:
    """Download the files that are not here, with a progress line. Raises UserError."""
    here = model.folder(os.environ)
    missing = [Copy(name, name, size) for name, size in sizes.items() if not (here / name).is_file()]
    with ProgressLine() as progress:
        progress.start(model.address, sum(copy.size for copy in missing))
        transfer(open_folder(model.address), LocalFolder(here), missing, advance=progress.advance)
