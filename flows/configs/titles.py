"""What flow runs are called: a name that says what the run is, short enough for a list of runs."""

from __future__ import annotations

from pathlib import PurePath

from tasks.datasets.spec import FileDataset, PythonDataset, ReasoningGymDataset

VERSION_LETTERS = 8


def model_title(key: str) -> str:
    """`models/smollm2-135m` -> smollm2-135m; `helper@<digest>` -> helper@ and the digest's first letters."""
    name, at, version = PurePath(key).name.partition("@")
    return f"{name}{at}{version[:VERSION_LETTERS] if len(version) > 2 * VERSION_LETTERS else version}" or key


def dataset_title(source: FileDataset | PythonDataset | ReasoningGymDataset) -> str:
    """The generator's name, the function's, or the file's without folder and ending; of a pattern, the folder's. Of
    several files, the first's, and how many more there are."""
    if isinstance(source, ReasoningGymDataset):
        return source.name
    if isinstance(source, PythonDataset):
        return source.path.partition(":")[2]
    path = PurePath(source.path)
    of_folder = any(letter in path.name for letter in "*?[") and path.parent.name
    name = path.parent.name if of_folder else path.stem
    return f"{name} and {len(source.further_paths)} more" if source.further_paths else name


def training_title(flow: str, key: str, source: FileDataset | PythonDataset | ReasoningGymDataset, seed: int) -> str:
    """`grpo smollm2-135m on chain_sum, seed 3`."""
    return f"{flow} {model_title(key)} on {dataset_title(source)}, seed {seed}"
