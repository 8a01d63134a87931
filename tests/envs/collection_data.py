"""Small data for servers of the OpenEnv collection whose own data would be downloaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def finqa(folder: Path) -> Mapping[str, str]:
    """One question about one table of one company."""
    table = [{"item": "sales", "amount": 120}, {"item": "costs", "amount": 70}]
    companies, questions = folder / "input_companies", folder / "benchmark_questions"
    (companies / "acme").mkdir(parents=True, exist_ok=True)
    questions.mkdir(exist_ok=True)
    (companies / "acme" / "income.json").write_text(json.dumps(table))
    cleaned = {"acme/income": {"description": "income", "table": json.dumps(table)}}
    (companies / "tables_cleaned_all_companies.json").write_text(json.dumps(cleaned))
    (questions / "finqa.csv").write_text(
        "id,user_query,company,question,answer,question_type,explanation\n"
        "1,How much did acme sell?,acme,How much did acme sell?,\\boxed{120},single,\n"
    )
    return {"FINQA_DATA_PATH": str(folder)}


NOTEBOOK = """
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from sqlalchemy import create_engine, text

engine = create_engine("sqlite:///notebook.db")
app = FastAPI()


class Note(BaseModel):
    text: str


@app.post("/notes", operation_id="add_note", summary="Add a note.")
def add_note(note: Note):
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO notes (text) VALUES (:text)"), {"text": note.text})
    return {"added": note.text}


@app.get("/notes", operation_id="list_notes", summary="List all notes.")
def list_notes():
    with engine.begin() as connection:
        return {"notes": [row[0] for row in connection.execute(text("SELECT text FROM notes"))]}


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=8000)
"""
VERIFIER = """
def verify_task_completion(initial_db_path, final_db_path, final_answer=None):
    connection = sqlite3.connect(final_db_path)
    (count,) = connection.execute("SELECT COUNT(*) FROM notes WHERE text = 'milk'").fetchone()
    return {"result": "complete" if count == 1 and final_answer == "1" else "others"}
"""


def agent_world_model(folder: Path) -> Mapping[str, str]:
    """One world, a notebook, with one task."""
    task = "Note that milk is needed, and answer with the number of notes."
    verification = {"task_idx": 0, "verification": {"code": VERIFIER}}
    table = {"ddl": "CREATE TABLE notes (text TEXT)", "indexes": []}
    files: dict[str, dict[str, Any]] = {
        "gen_scenario.jsonl": {"name": "notebook", "description": "Notes."},
        "gen_tasks.jsonl": {"tasks": [task]},
        "gen_db.jsonl": {"db_schema": {"tables": [table]}},
        "gen_sample.jsonl": {"sample_data": {"tables": []}},
        "gen_envs.jsonl": {"full_code": NOTEBOOK},
        "gen_verifier.jsonl": verification,
        "gen_verifier.pure_code.jsonl": verification,
    }
    for name, row in files.items():
        (folder / name).write_text(json.dumps({"scenario": "notebook"} | row) + "\n")
    return {"AWM_DATA_DIR": str(folder)}


def terminal_bench(folder: Path) -> Mapping[str, str]:
    """One task. It brings its own pytest, because the server runs tests in an environment that has none."""
    task = folder / "greeting"
    task.mkdir(exist_ok=True)
    (task / "greeting.txt").unlink(missing_ok=True)
    (task / "instruction.md").write_text("Write hello into the file greeting.txt.")
    (task / "pytest.py").write_text(
        "from pathlib import Path\n\nraise SystemExit(Path('greeting.txt').read_text() != 'hello\\n')\n"
    )
    return {"TB2_TASKS_DIR": str(folder), "TB2_OUTPUT_DIR": str(folder / "runs")}


def miniwob(folder: Path) -> Mapping[str, str]:
    """The pages of MiniWoB as its package has them, and this machine's Chromium where Playwright expects its own."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise FileNotFoundError("there is no chromium in PATH; install it (apt-get install chromium)")
    expected = folder / "chromium-1117" / "chrome-linux" / "chrome"
    expected.parent.mkdir(parents=True, exist_ok=True)
    expected.unlink(missing_ok=True)
    expected.symlink_to(chromium)
    (pages,) = folder.parent.glob("environment/lib/*/site-packages/miniwob/html/miniwob")
    return {"PLAYWRIGHT_BROWSERS_PATH": str(folder), "MINIWOB_URL": f"{pages.as_uri()}/"}
