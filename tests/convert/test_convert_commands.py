"""The command line of conversion: plans, progress, refusals, Ctrl-C, what it imports."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import tiny_models  # noqa: E402
from block_models import block_config  # noqa: E402
from convert_helpers import PROGRAM, change, command, files, mfleet  # noqa: E402
from waiting import HANG_S, wait_until  # noqa: E402

from megatron_fleet.storage import progress as progress_module  # noqa: E402
from megatron_fleet.storage.progress import ProgressLine  # noqa: E402

ROOT = Path(__file__).parents[2]
SMALL_FILES = """
import signal, sys, threading
from megatron_fleet import cli
from megatron_fleet.storage import local
from megatron_fleet.convert import to_megatron
to_megatron.FILE_BYTES = 100_000
{more}
sys.exit(cli.main(sys.argv[1:]))
"""
UNTIL_CTRL_C = """
interrupted = threading.Event()
def interrupt(*arguments):
    interrupted.set()
    signal.default_int_handler(*arguments)
# A shell without job control ignores it for what runs in the background.
signal.signal(signal.SIGINT, interrupt)
write_at = local.LocalWriter.write_at
def held(writer, *arguments):
    if writer._path.name not in ("__0_0.distcp", "__0_1.distcp"):
        interrupted.wait()
    write_at(writer, *arguments)
local.LocalWriter.write_at = held
"""


def test_a_plan_writes_nothing(made, convert, tmp_path):
    code, out, _ = convert("to-megatron", made("qwen3"), tmp_path / "mg", "--plan")
    assert code == 0 and list(tmp_path.iterdir()) == []
    assert out.startswith(f"{made('qwen3')} → {tmp_path / 'mg'}: 1 files, 0.00 GB in ")
    convert("to-megatron", made("qwen3"), tmp_path / "mg")
    assert convert("to-megatron", made("qwen3"), tmp_path / "mg", "--plan")[1].endswith(", complete already\n")


def test_a_plan_is_refused_where_the_conversion_would_be(made, refused, tmp_path):
    (tmp_path / "mine").write_text("")
    assert "something else is at this path" in refused("to-megatron", made("qwen3"), tmp_path, "--plan")


def test_finished_is_finished_and_another_is_refused(made, convert, refused, tmp_path):
    for said in ("complete", "complete"):
        code, out, _ = convert("to-megatron", made("qwen3"), tmp_path / "mg")
        assert (code, out) == (0, f"{tmp_path / 'mg'}: {said}\n")
    assert refused("to-megatron", made("qwen3"), tmp_path / "mg", "--layer-keys", "numbered") == (
        f"{tmp_path / 'mg'} already exists; name another folder or remove it."
    )
    assert "already exists" in refused("to-megatron", made("qwen3_tied"), tmp_path / "mg")
    assert "already exists" in refused("to-hf", tmp_path / "mg", made("qwen3"))


def test_shards_of_machines(made, convert, tmp_path, monkeypatch):
    from megatron_fleet.convert import to_megatron

    monkeypatch.setattr(to_megatron, "FILE_BYTES", 200_000)
    for k in (2, 3):
        code, out, _ = convert("to-megatron", made("qwen3"), tmp_path / "mg", "--shard", f"{k}/3")
        assert (code, out) == (0, f"{tmp_path / 'mg'}: this part is done, other parts are not\n")
    assert (
        convert("to-megatron", made("qwen3"), tmp_path / "mg", "--shard", "1/3")[1] == f"{tmp_path / 'mg'}: complete\n"
    )
    convert("to-megatron", made("qwen3"), tmp_path / "one")
    assert files(tmp_path / "mg") == files(tmp_path / "one")


def test_a_source_that_changed_meanwhile_is_refused(copied, convert, refused, tmp_path, monkeypatch):
    from megatron_fleet.convert import to_megatron

    monkeypatch.setattr(to_megatron, "FILE_BYTES", 200_000)
    source = copied("qwen3")
    convert("to-megatron", source, tmp_path / "mg", "--shard", "1/2")
    change(source, lambda name, tensor: tensor.half() if name == "model.norm.weight" else None)
    said = refused("to-megatron", source, tmp_path / "mg")
    assert said.startswith(f"{tmp_path / '.mg.partial'}: an unfinished conversion of {source} with other settings")


@pytest.mark.parametrize(
    "options",
    [("--workers", "0"), ("--workers", "x"), ("--shard", "3/2"), ("--layer-keys", "x"), ("--dtype", "bfloat16")],
)
def test_options_that_are_wrong(options, made, convert, tmp_path):
    code, out, errors = convert("to-megatron", made("qwen3"), tmp_path / "mg", *options)
    assert (code, out) == (2, "") and options[0] in errors
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(made, refused, tmp_path):
    (tmp_path / "file").write_text("")
    assert "Not a directory" in refused("to-megatron", made("qwen3"), tmp_path / "file" / "mg")


def test_a_limit_of_file_sizes(made, tmp_path):
    """A disk that refuses what is written, as far as a test can make one: the kernel's own limit."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536)); "
    limited = limit + PROGRAM
    done = mfleet("to-megatron", made("qwen3"), tmp_path / "mg", program=limited)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "are more than a file may have here" in done.stderr
    assert not (tmp_path / "mg").exists()
    assert mfleet("to-megatron", made("qwen3"), tmp_path / "mg").returncode == 0


@pytest.mark.slow
def test_nothing_here_needs_torch(made, tmp_path):
    program = (
        "import sys; from megatron_fleet import cli; code = cli.main(sys.argv[1:]); "
        "heavy = {name.split('.')[0] for name in sys.modules} & {'torch', 'transformers', 'megatron', 'safetensors'}; "
        "sys.exit(str(heavy) if heavy else code)"
    )
    source = made("kimi_k25")
    for arguments in (
        ("to-megatron", source, tmp_path / "mg"),
        ("to-hf", tmp_path / "mg", tmp_path / "back"),
        ("inspect", tmp_path / "mg"),
        ("verify", tmp_path / "mg", source),
        ("inspect", source, "--hashes", tmp_path / "hashes.json"),
    ):
        done = mfleet(*arguments, program=program)
        assert (done.returncode, done.stderr.count("error")) == (0, 0), done.stderr
    assert files(tmp_path / "back") == files(source)


def test_ctrl_c_keeps_what_is_done(made, convert, tmp_path):
    line = command("to-megatron", made("qwen3_moe"), tmp_path / "mg", program=SMALL_FILES.format(more=UNTIL_CTRL_C))
    process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
    partial = tmp_path / ".mg.partial" / "release"
    wait_until((partial / "__0_1.distcp").exists, lambda: process.poll() is None)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=HANG_S)[1]
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "mfleet: stopped by Ctrl-C."
    assert not (tmp_path / "mg").exists()
    kept = {p.name: p.stat().st_mtime_ns for p in partial.glob("*.distcp")}
    assert {"__0_0.distcp", "__0_1.distcp"} <= kept.keys()
    program = SMALL_FILES.format(more="")
    assert mfleet("to-megatron", made("qwen3_moe"), tmp_path / "mg", program=program).returncode == 0
    assert kept.items() <= {p.name: p.stat().st_mtime_ns for p in (tmp_path / "mg" / "release").iterdir()}.items()
    assert [name for name in files(tmp_path / "mg") if name.rpartition("/")[2].startswith(".")] == ["release/.metadata"]
    assert convert("verify", made("qwen3_moe"), tmp_path / "mg")[0] == 0


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("to_megatron", ("{model}", "{tmp}/mg"), "mg: complete"),
        ("to_hf", ("{tmp}/none", "{tmp}/out"), ""),
        ("inspect_checkpoint", ("{model}",), "hf, 47 tensors"),
        ("verify", ("{model}", "{model}"), "47 tensors are equal"),
    ],
)
def test_the_scripts(script, arguments, said, made, tmp_path):
    filled = [text.format(model=made("qwen3"), tmp=tmp_path) for text in arguments]
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "convert" / f"{script}.py", *filled],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == (0 if said else 2), done.stderr
    assert said in done.stdout


# --- progress ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when told."""
    now = [100.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])

    def tick(seconds):
        now[0] += seconds

    return tick


def test_a_log_has_a_line_now_and_then(clock):
    stream = io.StringIO()
    with ProgressLine(stream) as line:
        line.start("out", 10_000_000_000, 1_000_000_000)
        for _ in range(9):
            clock(5)
            line.advance(1_000_000_000)
    assert stream.getvalue().splitlines() == [
        "out: 3.00 of 10.00 GB (30 %), 0.20 GB/s, 35 s left",
        "out: 5.00 of 10.00 GB (50 %), 0.20 GB/s, 25 s left",
        "out: 7.00 of 10.00 GB (70 %), 0.20 GB/s, 15 s left",
        "out: 9.00 of 10.00 GB (90 %), 0.20 GB/s, 5 s left",
        "out: 10.00 of 10.00 GB (100 %), 0.20 GB/s, 45.0 s",
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_has_one_line_that_changes(clock):
    stream = Terminal()
    with ProgressLine(stream) as line:
        line.start("out", 4_000_000)
        for _ in range(4):
            clock(0.5)
            line.advance(1_000_000)
    drawn = stream.getvalue()
    assert drawn.count("\n") == 1 and drawn.endswith("\n")
    assert drawn.split("\r\x1b[2K")[1:3] == [
        "out: 1.00 of 4.00 MB (25 %), 2.00 MB/s, 2 s left",
        "out: 2.00 of 4.00 MB (50 %), 2.00 MB/s, 1 s left",
    ]


@pytest.mark.parametrize(("stream", "expected"), [(io.StringIO(), ""), (Terminal(), "\n")])
def test_a_failure_ends_the_line_and_says_nothing(stream, expected, clock):
    with pytest.raises(ZeroDivisionError), ProgressLine(stream) as line:
        line.start("out", 10)
        raise ZeroDivisionError
    assert stream.getvalue() == expected


def test_two_phases_are_two_lines(clock):
    stream = io.StringIO()
    with ProgressLine(stream) as line:
        for what in ("first", "second"):
            line.start(what, 0)
    assert [text.split(":")[0] for text in stream.getvalue().splitlines()] == ["first", "second"]


def test_on_a_real_terminal(made, tmp_path):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command("to-megatron", made("qwen3"), tmp_path / "mg"), stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    assert process.communicate(timeout=HANG_S)[0].decode() == f"{tmp_path / 'mg'}: complete\n"
    drawn = os.read(ours, 100_000).decode()
    os.close(ours)
    assert "\x1b[2K" in drawn and "(100 %)" in drawn and drawn.endswith("\r\n")


def test_a_model_in_bf16_becomes_fp8(convert, refused, made, tmp_path, monkeypatch):
    """Codes and scales by the rule of the releases: largest magnitude / 448 of each block, and what is nearest."""
    small = made("qwen3")
    monkeypatch.setattr(tiny_models, "raw_config", block_config)
    plain = tiny_models.make("qwen3_moe", tmp_path / "plain")
    assert convert("to-megatron", plain, tmp_path / "mg")[0] == 0
    code, out, _ = convert("to-hf", tmp_path / "mg", tmp_path / "fp8", "--dtype", "fp8")
    assert code == 0 and out.endswith("complete\n")
    before, after = tiny_models.stored_tensors(plain), tiny_models.stored_tensors(tmp_path / "fp8")
    quantised = [name for name in before if "_proj." in name]
    assert set(after) == {*before, *(name + "_scale_inv" for name in quantised)}
    for name in quantised:
        rows, cols = before[name].shape
        blocks = before[name].float().reshape(rows // 128, 128, cols // 128, 128)
        scales = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scales[:, None, :, None]).reshape(rows, cols).to(torch.float8_e4m3fn)
        assert torch.equal(after[name + "_scale_inv"], scales)
        assert torch.equal(after[name].view(torch.uint8), codes.view(torch.uint8))
    assert all(torch.equal(after[name], before[name]) for name in before if name not in quantised)
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    assert config["quantization_config"]["modules_to_not_convert"] == [
        "lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"
    ]  # fmt: skip
    assert config["torch_dtype"] == "bfloat16"
    assert convert("to-megatron", tmp_path / "fp8", tmp_path / "again")[0] == 0, "it is a model like the releases"
    assert convert("to-megatron", small, tmp_path / "small")[0] == 0
    said = refused("to-hf", tmp_path / "small", tmp_path / "none", "--dtype", "fp8")
    assert "no layer can be quantised in blocks of 128 x 128" in said and not (tmp_path / "none").exists()
