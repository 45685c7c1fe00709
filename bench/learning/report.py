from pathlib import Path
import json
FOLDER = Path(__file__).parent / "results"
def path_of(name): return FOLDER / f"{name}.jsonl"
def read(name):
    path = path_of(name)
    return [json.loads(l) for l in path.read_text().splitlines()] if path.exists() else []
def write(): pass
