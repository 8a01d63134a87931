"""Pages say what the code says: those made from it, and the names that the others mention."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md", *(p.relative_to(ROOT).as_posix() for p in sorted((ROOT / "docs").rglob("*.md")))],
)
def test_pages_name_what_exists(page):
    pytest.importorskip("hydra")
    from megatron_fleet.config.keys import leaves
    from megatron_fleet.telemetry import registry

    keys = {key.name for key in leaves()}
    sections = {name.rsplit(".", depth)[0] for name in keys for depth in range(1, name.count(".") + 1)}
    tops = {name.split(".")[0] for name in keys}
    patterns = {metric.pattern for metric in registry.METRICS}
    families = {pattern.split("/")[0] for pattern in patterns}
    text = (ROOT / page).read_text(encoding="utf-8")
    for mentioned in re.findall(r"`([^`\n]+)`", text):
        key = re.fullmatch(r"([a-z]+(?:\.[a-z_0-9]+)+)(?:=.*)?", mentioned)
        if key and key[1].split(".")[0] in tops and not key[1].endswith(".py"):
            assert key[1] in keys | sections, f"{page}: no key {key[1]}"
        if re.fullmatch(r"[a-z]+/[a-z0-9_:{}/]*[a-z0-9_}]", mentioned) and mentioned.split("/")[0] in families:
            assert mentioned in patterns or registry.find(mentioned), f"{page}: no metric {mentioned}"


def test_the_map_of_the_code_is_complete_and_names_what_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Map of the code")[1]
    named = set(re.findall(r"`([\w./]+(?:\.py|/))`", text))
    package = ROOT / "megatron_fleet"
    places = [ROOT, package, *(path for path in package.iterdir() if path.is_dir())]
    assert [name for name in named if "FAMILY" not in name and not any((p / name).exists() for p in places)] == []
    assert {f"{path.parent.name}/" for path in package.glob("*/__init__.py")} <= named


def commands(text: str) -> list[list[str]]:
    """Arguments of each `mfleet train` and `mfleet eval` in the code blocks of a page."""
    blocks = "".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    split = [shlex.split(line, comments=True) for line in blocks.splitlines()]
    return [words[2:] for words in split if words[:2] in (["mfleet", "train"], ["mfleet", "eval"])]


@pytest.mark.slow
def test_commands_of_pages_are_valid_configurations():
    pytest.importorskip("hydra")
    from megatron_fleet.config import validate
    from megatron_fleet.config.load import load

    checked = 0
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for words in commands(page.read_text(encoding="utf-8")):
            given = [word for word in words if "=" in word and "…" not in word and not word.startswith("-")]
            if not any(word.startswith(("experiment=", "model.path=")) for word in given):
                given.append("model.path=/model")
            config = load(given)
            if not any("…" in word for word in words):  # else a part of a command, which may need the rest
                validate.check(config)
                checked += 1
    assert checked >= 20
