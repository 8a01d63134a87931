"""The reader follows types through our code, and tells each way in which a use can be wrong."""

from __future__ import annotations

import inspect

import pytest
from upstream_checks import faults, misfit
from upstream_sources import Sources
from upstream_uses import Reader

ENGINE = """
from dataclasses import dataclass, field
from typing import AsyncIterator, NotRequired, Protocol, TypedDict
from vllm.outputs import *

@dataclass
class Settings:
    size: int
    names: list[str] = field(default_factory=list)
    derived: int = field(init=False)

@dataclass
class MoreSettings(Settings):
    backend: str = "none"

class Prompt(TypedDict):
    ids: list[int]
    salt: NotRequired[str]

class Base:
    def __init__(self, settings: Settings, *, rank: int = 0) -> None:
        self.settings = settings
        self.outputs: list[Output] = []
        self.first = Output()

    def start(self) -> None: ...

    def send(self, chunk: bytes, last: bool = False) -> None: ...

class Engine(Base):
    @classmethod
    def make(cls, settings: Settings) -> "Engine": ...

    @property
    def last(self) -> Output: ...

    async def generate(self, prompt: Prompt, name: str) -> AsyncIterator[Output]: ...

class Client(Protocol):
    def post(self, message: dict | list) -> None: ...

def reset(engine: Engine, hard=False): ...
"""
OUTPUTS = """
class Output:
    tokens: list[int]
    reason: str | None = None
"""
OURS = '''
from vllm import engine
from vllm.engine import Base, Engine, MoreSettings, Output, Prompt

def make() -> Engine:
    arguments = {"size": 3}
    arguments["backend"] = "x"
    made = Engine.make(MoreSettings(**arguments))
    engine.reset(made, hard=True)
    return made

async def run() -> None:
    made = make()
    async for output in made.generate(Prompt(ids=[1]), name="a"):
        print(output.tokens, made.last.reason, made.settings.names)
    print([each.tokens for each in made.outputs], getattr(made, "added_later", None))

class Ours(Base):
    def __init__(self) -> None:
        super().__init__(MoreSettings(1, backend="x"), rank=3)

    def send(self, chunk: bytes, last: bool = False, more: int = 0) -> None:
        super().send(chunk, last)
        self.start()

class Plain(Base):
    """It has Base's constructor."""

def plain(given: Plain) -> None:
    Plain(MoreSettings(2), rank=4).send(given.first.reason)

def patch(module) -> None:
    def reset(engine, hard=False): ...
    module.reset = reset

PATCHES = {"vllm.engine": patch}
'''  # fmt: skip


@pytest.fixture
def read(tmp_path):
    """The faults of `OURS` after a change in it, or in the upstream sources."""

    def read(old: str = "", new: str = "") -> list[str]:
        texts = {"vllm/__init__.py": "", "vllm/outputs.py": OUTPUTS, "vllm/engine.py": ENGINE, "ours.py": OURS}
        assert old == "" or sum(text.count(old) for text in texts.values()) == 1, old
        (tmp_path / "vllm").mkdir()
        for name, text in texts.items():
            (tmp_path / name).write_text(text.replace(old, new) if old else text, encoding="utf-8")
        reader = Reader(Sources(tmp_path), {"megatron_fleet.ours": tmp_path / "ours.py"}, tmp_path)
        assert len(reader.uses) > 15
        return list(faults(reader).values())

    return read


def test_what_fits_is_no_fault(read):
    assert read() == []


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("import Base, Engine, MoreSettings", "import Base, Engine, MoreSettings, Gone", "vllm.engine has no Gone"),
        ("from vllm import engine\n", "from vllm import engine\nimport vllm.gone\n", "no module vllm.gone"),
        ("from vllm.outputs import *", "", "vllm.engine has no Output"),
        ("def reset(engine: Engine, hard=False)", "def reset(engine: Engine)", "unexpected keyword argument 'hard'"),
        ("made, hard=True)", "made, very_hard=True)", "unexpected keyword argument 'very_hard'"),
        ("made, hard=True)", "made, True, 3)", "too many positional arguments"),
        ('"backend"] = "x"', '"backends"] = "x"', "unexpected keyword argument 'backends'"),
        ('    backend: str = "none"', "    pass", "unexpected keyword argument 'backend'"),
        ("    size: int\n", "    size: int\n    width: int\n", "missing a required argument: 'width'"),
        ("salt: NotRequired[str]", "salt: str", "missing a required argument: 'salt'"),
        (", *, rank: int = 0", "", "unexpected keyword argument 'rank'"),
        ("    async def generate", "    async def generated", "has no generate"),
        ("output.tokens, made", "output.token, made", "has no token"),
        ("made.last.reason", "made.last.reasons", "has no reasons"),
        ("made.settings.names", "made.settings.name", "has no name"),
        ("print([each.tokens", "print([each.gone", "has no gone"),
        ("        self.start()", "        self.stop()", "has no stop"),
        ("def send(self, chunk: bytes, last: bool = False) -> None: ...", "def send(self, chunk: bytes, last: bool = "
         "False, *, wait: bool = False) -> None: ...", "ours lacks wait"),
        ("    def send(self, chunk: bytes, last: bool = False, more", "    def send(self, data: bytes, last: bool = "
         "False, more", "ours calls chunk data"),
        ("last: bool = False, more: int = 0", "last: bool = False, *, more: int", "ours requires more"),
        ("    def reset(engine, hard=False)", "    def reset(engine)", "ours lacks hard"),
        ("module.reset = reset", "module.restart = reset", "vllm.engine has no restart"),
        ("MoreSettings(2), rank=4", "MoreSettings(2), place=4", "unexpected keyword argument 'place'"),
        ("rank=4).send(", "rank=4).sent(", "has no sent"),
        ("given.first.reason", "given.first.cause", "has no cause"),
        ("given.first", "given.last", "has no last"),
        ('{"vllm.engine": patch}', '{"vllm.gone": patch}', "no module vllm.gone"),
    ],
)  # fmt: skip
def test_each_misfit_is_told(old, new, told, read):
    assert told in "\n".join(read(old, new))


@pytest.mark.parametrize(
    ("theirs", "ours", "told"),
    [
        ("(a, b=1)", "(a, b=2)", None),
        ("(a, b=1)", "(*args, **kwargs)", None),
        ("(a, *, c)", "(a, **kwargs)", None),
        ("(a, /)", "(other)", None),
        ("(a, b, c)", "(_, b, *__)", None),
        ("(a, b=1)", "(a)", "ours lacks b"),
        ("(a, b=1)", "(a, b)", "ours requires b"),
        ("(a, *rest)", "(a)", "ours lacks *rest"),
        ("(a, **more)", "(a)", "ours lacks **more"),
        ("(a, *, c)", "(a)", "ours lacks c"),
        ("(a, b=1)", "(a, **kwargs)", "ours lacks b"),
        ("(a)", "(a, b)", "ours requires b"),
        ("(a, b)", "(b, a)", "ours calls a b"),
    ],
)
def test_replacements_take_every_call(theirs, ours, told):
    def signature(text: str) -> inspect.Signature:
        return inspect.signature(eval(f"lambda {text.strip('()')}: None"))

    found = misfit(signature(theirs), signature(ours))
    assert found == told if told is None else found is not None and told in found
