"""The worker process of IsolatedGrader: grades one thread per request.

A request is {"thread": …}. The answer has "logs" and one of "grade", "ignored", "permanent" or "raised".
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from typing import Any

from engine.errors import PermanentEngineError
from engine.text.threads import StringThread
from tasks.graders.base import BaseGrader, Grade, GraderError, IgnoreGradeException
from tasks.graders.running.worker_process import WorkerConnection, connect
from tasks.graders.spec import GraderSpec, build


async def grade_as_json(grader: BaseGrader, thread: StringThread) -> dict[str, Any]:
    """Grade a thread and return the outcome as plain data, whatever the grader raises."""
    try:
        grade = await grader.grade(thread)
        if not isinstance(grade, Grade):
            raise TypeError(f"grade() returned {type(grade).__name__}; expected a Grade")
        return {"grade": grade.model_dump()}
    except IgnoreGradeException as declined:
        return {"ignored": str(declined)}
    except (GraderError, PermanentEngineError) as error:
        return {"permanent": str(error)}
    except SystemExit as error:
        return {"permanent": f"the grader raised {error!r}, which would end the process"}
    except Exception as error:  # noqa: BLE001  the boundary to a user's code: raised again in the run's process
        return {"raised": f"{type(error).__name__}: {error}"}


def serve(connection: WorkerConnection, grader: BaseGrader) -> None:
    """Set the grader up, grade until the input ends, then tear it down."""
    # Collect what the grader logs. The statistics are kept in the run's process.
    logs: list[dict[str, float]] = []

    def collect_log(values: Mapping[str, float]) -> None:
        logs.append(dict(values))

    grader.add_log = collect_log  # type: ignore[method-assign]
    with asyncio.Runner() as runner:
        try:
            runner.run(grader.setup())
        except Exception as error:  # noqa: BLE001  the boundary to a user's code: the parent raises it
            connection.write_line(f"setup raised {type(error).__name__}: {error}".replace("\n", " "))
            return

        # Each answer holds the logs of its own grade only.
        def answer(request: dict[str, Any]) -> dict[str, Any]:
            logs.clear()
            outcome = runner.run(grade_as_json(grader, StringThread.from_json(request["thread"])))
            return outcome | {"logs": list(logs)}

        connection.serve(answer)
        runner.run(grader.teardown())


def main() -> None:
    connection = connect()
    # The input ends without a line if the parent ended before it sent the configuration.
    configuration = json.loads(connection.requests.readline() or "{}")
    if configuration:
        # The run's module path comes first. On another machine the packages may be in other folders.
        sys.path[:] = [*configuration["sys_path"], *sys.path]
        serve(connection, build(GraderSpec.model_validate_json(configuration["spec"])))


if __name__ == "__main__":
    main()
