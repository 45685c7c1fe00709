"""The line for a shell that asks a served model."""

from __future__ import annotations

import json
import shlex


def curl_line(engine_url: str, model: str, *, token_file: str = "", token_env: str = "") -> str:
    """Returns the `curl` command that asks `model` of the engine at this URL. The shell reads the engine's token from
    `token_file`, else from the environment variable `token_env`; without both, the engine has none."""
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
    url = f"{engine_url.rstrip('/')}/v1/chat/completions"
    line = shlex.join(["curl", url, "-H", "Content-Type: application/json", "-d", json.dumps(body)])
    token = f"$(cat {shlex.quote(token_file)})" if token_file else f"${token_env}" if token_env else ""
    return f'{line} -H "Authorization: Bearer {token}"' if token else line
