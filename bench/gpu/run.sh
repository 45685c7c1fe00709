#!/usr/bin/env bash
# One command for a machine with a GPU, from the repository root: bash bench/gpu/run.sh [--cpu-smoke] [PART ...]
# It uses the Python at $PYTHON, or else that of .venv if it has torch, or else python3. It replaces no installed package.
# Small packages that are missing are installed into a separate folder, from the wheels in .whl/ or else from a package
# index. README.md in this folder explains how to bring wheels to a machine without a network.
set -u
cd "$(dirname "$0")/../.." || exit 2

python=${PYTHON:-}
for candidate in "$python" .venv/bin/python python3; do
    if [ -n "$candidate" ] && "$candidate" -c 'import torch' 2>/dev/null; then python=$candidate; break; fi
    python=
done
if [ -z "$python" ]; then
    echo "no Python with torch: PYTHON, .venv/bin/python and python3 were tried. Set PYTHON to one that has torch" >&2
    exit 2
fi

site=${OSTINATO_BENCH_SITE:-${TMPDIR:-/tmp}/ostinato-bench-site}
missing=$("$python" - <<'PY'
from importlib.util import find_spec
needed = ["numpy", "pydantic", "pyarrow", "fsspec", "safetensors", "transformers", "tokenizers", "jinja2"]
print(" ".join(name for name in needed if find_spec(name) is None))
PY
)
if [ -n "$missing" ]; then
    echo "missing here: $missing"
    pip=("$python" -m pip install -q --disable-pip-version-check --target "$site" --upgrade)
    if compgen -G '.whl/*.whl' >/dev/null; then
        "${pip[@]}" --no-index --no-deps --no-compile .whl/*.whl || echo "the wheels in .whl did not install" >&2
    else
        # --no-deps: do not download installed packages again, above all torch
        # shellcheck disable=SC2086
        "${pip[@]}" --no-deps --retries 0 --timeout 5 $missing annotated-types typing-inspection pydantic-core \
            || echo "no index answered; carry wheels in .whl (bench/gpu/README.md)" >&2
    fi
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi

export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
# deterministic matrix products on a GPU need this variable before the first product
export CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8}
exec "$python" -m bench.gpu.run "$@"
