"""The page of models is what the families say."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import models_page


def test_the_page_is_up_to_date():
    assert models_page.page() == models_page.PAGE.read_text("utf-8"), "run: python tools/models_page.py"


def test_every_model_type_has_its_releases():
    assert {model_type for _, model_type, _ in models_page.architectures()} == models_page.RELEASES.keys()
