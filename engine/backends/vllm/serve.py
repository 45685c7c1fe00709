"""One vLLM server of a pool: vLLM's own web application, with `front` before it.

    python -m engine.backends.vllm.serve OPTIONS.json

OPTIONS.json holds the command-line arguments of vLLM's server. Its bearer token is in $OSTINATO_SERVER_TOKEN.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FRONT = "engine.backends.vllm.front.Front"


def main() -> None:
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser())
    flags: list[str] = json.loads(Path(sys.argv[1]).read_text())
    args: Any = parser.parse_args([*flags, "--middleware", FRONT])
    validate_parsed_serve_args(args)
    uvloop.run(run_server(args))


if __name__ == "__main__":
    main()
