#!/usr/bin/env bash
# One command for a machine with a GPU, from the repository root: bash bench/gpu/run.sh [--cpu-smoke] [PART ...]
# Python: $PYTHON, else .venv's if it has torch, else the machine's. What torch and the rest need is never replaced;
# small packages that are missing come from the wheels in .whl/, else from an index if one answers, into a folder of
# their own. README.md beside this file says how to carry wheels to a machine without a network.
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
        # --no-deps: nothing that is here, torch above all, is fetched again
        # shellcheck disable=SC2086
        "${pip[@]}" --no-deps --retries 0 --timeout 5 $missing annotated-types typing-inspection pydantic-core \
            || echo "no index answered; carry wheels in .whl (bench/gpu/README.md)" >&2
    fi
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi

export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
# deterministic matrix products on a GPU need it before the first one
export CUBLAS_WORKSPACE_CONFIG=${CUBLAS_WORKSPACE_CONFIG:-:4096:8}
exec "$python" -m bench.gpu.run "$@"
