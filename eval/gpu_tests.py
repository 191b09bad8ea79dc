"""Which GPU tests passed, from the logs of `pytest -v -m gpu`: one JSON with the tests of each file counted.

    python -m pytest -v -m gpu --numprocesses 8 > gpu.log
    python eval/gpu_tests.py gpu.log --commit $(git rev-parse --short HEAD) --out eval/results/gpu_tests_h200.json

A run may be spread over several logs, each with its own --commit in the same order; where a test is in two of them, the
later one counts. Exit status 1 when a test did not pass.
"""

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

OUTCOMES = ("PASSED", "FAILED", "ERROR", "SKIPPED")
# "[gw3] [ 10%] PASSED tests/x.py::test" with several processes, "tests/x.py::test PASSED [ 10%]" with one.
PARALLEL = re.compile(rf"^\[gw\d+\] \[ *\d+%\] ({'|'.join(OUTCOMES)}) (tests/.+?) *$")
SINGLE = re.compile(rf"^(tests/\S+?\.py::.+?) ({'|'.join(OUTCOMES)}) +\[ *\d+%\]")


def outcomes(log: str) -> dict[str, str]:
    """Test -> outcome; an error after a test has passed (of its teardown) counts."""
    found: dict[str, str] = {}
    for line in log.splitlines():
        if match := PARALLEL.match(line):
            outcome, test = match.groups()
        elif match := SINGLE.match(line):
            test, outcome = match.groups()
        else:
            continue
        if found.get(test) not in ("FAILED", "ERROR"):
            found[test] = outcome
    return found


def summary(logs: list[tuple[str, str]]) -> dict:
    """Of logs as (text, commit): see the module."""
    tests: dict[str, str] = {}
    runs = []
    for text, commit in logs:
        header = re.search(r"^device: .*$", text, re.MULTILINE)
        if header is None or not (here := outcomes(text)):
            raise ValueError(
                "a log without the line 'device: ...' or without tests: make it with pytest -v -m gpu"
            )
        runs.append({"commit": commit, "on": header.group().removeprefix("device: "), "tests": len(here)})
        tests |= here
    files = Counter(test.split("::")[0] for test, outcome in tests.items() if outcome == "PASSED")
    return {
        "runs": runs,
        "passed": files.total(),
        "not_passed": sorted(f"{test} {outcome}" for test, outcome in tests.items() if outcome != "PASSED"),
        "files": dict(sorted(files.items())),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument(
        "--commit", nargs="+", required=True, help="that the tests ran at: one, or one for each log"
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    commits = arguments.commit * (len(arguments.logs) if len(arguments.commit) == 1 else 1)
    try:
        if len(commits) != len(arguments.logs):
            raise ValueError(
                f"{len(arguments.logs)} logs and {len(commits)} commits: give one commit, or one for each"
            )
        texts = [path.read_text() for path in arguments.logs]
        figures = summary(list(zip(texts, commits, strict=True)))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    arguments.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(
        f"{figures['passed']} passed, {len(figures['not_passed'])} did not", *figures["not_passed"], sep="\n"
    )
    return 1 if figures["not_passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
